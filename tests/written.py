"""What tests of whole conversions share: results of commands, and checkpoints as they lie on disk."""

import filecmp
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

# Fixtures of conftest.py: `checkpoint`, `convert` and `logits`.
Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]

_TEXT = ("--text", "TEXT", "--calibration-tokens", 256, "--calibration-context", 32, "--heal", 0)
# Results that several files look at, by their source and their command; `finished` of conftest.py makes each once.
RESULTS: dict[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "heads": ("llama", {}, ("gqa", "--groups", 2)),
    "heads with text": ("llama", {}, ("gqa", "--groups", 2, *_TEXT, "--evaluate", "TEXT")),
    "one head of kvfold's class": ("gpt_neox", {}, ("mqa", "--method", "mean", "--no-text")),
    "own text": ("llama", {}, ("mqa", "--calibration-tokens", 512, "--calibration-context", 32)),
    "latent in shards": ("llama", {}, ("mla", "--kv-lora-rank", 16, "--qk-rope-head-dim", 8, "--max-shard-size", "40KB")),
    "latent with text": ("llama", {}, ("mla", "--kv-lora-rank", 8, "--qk-rope-head-dim", 4, "--max-context", 32, *_TEXT)),
    "latent in int4": ("llama", {}, ("mla", "--kv-lora-rank", 24, "--qk-rope-head-dim", 8, "--cache-dtype", "int4", *_TEXT,
                                     "--evaluate", "TEXT")),
    "whole latent": ("llama", {"duplicated": 2}, ("mla", "--kv-lora-rank", 33, "--qk-rope-head-dim", 32)),
}  # fmt: skip

TENSORS = {  # of several dtypes and shapes, as files hold them
    "a.weight": torch.randn(4, 6),
    "b.weight": torch.randn(5).to(torch.bfloat16),
    "c.flags": torch.tensor([True, False, True]),
    "d.ids": torch.arange(7),
    "e.scalar": torch.tensor(2.5, dtype=torch.float64),
    "f.empty": torch.empty(0, 3),
}


@dataclass(frozen=True)
class Finished:
    """A result, the checkpoint that it was made of, and what its command said."""

    source: Path
    path: Path
    command: list[Any]
    stdout: str
    stderr: str

    @property
    def provenance(self) -> dict[str, Any]:
        return read(self.path / "conversion.json")

    @property
    def config(self) -> dict[str, Any]:
        return read(self.path / "config.json")

    @property
    def card(self) -> str:
        return (self.path / "README.md").read_text(encoding="utf-8")


# `finished("heads")`, a fixture of conftest.py.
Find = Callable[[str], Finished]


def characters(path: Path, seed: int = 0, count: int = 4000) -> Path:
    """A file of them, in an order that never repeats."""
    drawn = torch.randint(97, 123, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text("".join(map(chr, drawn)))
    return path


def read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def ok(result: Any) -> Any:
    assert result.exit_code == 0, result.output
    return result


def weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        part = load_file(file)
        assert not part.keys() & found.keys(), "a tensor is in two shards"
        found |= part
    assert found, f"there are no weights in {path}"
    return found


def is_a_copy(after: Path, before: Path) -> None:
    """Every tensor is the same, bit for bit."""
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


def same_but_for_the_run(a: Path, b: Path) -> None:
    names, others = (sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()) for path in (a, b))
    assert names == others
    assert any(name.endswith(".safetensors") for name in names), f"there are no weights in {a}"
    written = [read(path / "conversion.json") for path in (a, b)]
    for provenance in written:
        del provenance["run"]
    assert written[0] == written[1]
    others = [name for name in names if name != "conversion.json"]
    assert filecmp.cmpfiles(a, b, others, shallow=False) == (others, [], [])


def edit(path: Path, name: str = "config.json", /, **changes: Any) -> Path:
    """Change the config of a checkpoint, or another file of JSON."""
    (path / name).write_text(json.dumps(read(path / name) | changes))
    return path


def damage(source: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Change the weights of a checkpoint of one file."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return source


def without_tokenizer(source: Path) -> Path:
    for file in source.glob("*token*"):
        file.unlink()
    return source


def layer_notes(path: Path) -> list[dict[str, Any]]:
    """What conversion.json says of each layer."""
    found = list(read(path / "conversion.json")["layers"])
    assert found, f"no layer of {path} was converted"
    return found


def refused(result: Any, code: int, message: str) -> None:
    """A command said why it ended, on stderr alone."""
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def left_nothing(result: Any, code: int, message: str, out: Path) -> None:
    """A conversion to `out` said why it ended, and nothing is left."""
    refused(result, code, message)
    assert list(out.parent.glob(f"{out.name}*")) == []


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises it, whatever it is given."""

    def raises(*_: Any, **__: Any) -> Any:
        raise error.with_traceback(None)

    return raises


def stop_at(patch: pytest.MonkeyPatch, owner: Any, name: str, count: int, error: BaseException) -> None:
    """Let a function raise an error in place of its call of this number, from 1 on."""
    function, calls = getattr(owner, name), itertools.count(1)

    def stopped(*given: Any, **named: Any) -> Any:
        if next(calls) == count:
            raise error
        return function(*given, **named)

    patch.setattr(owner, name, stopped)


def constants_stay(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """What makes the norms of latents neutral is the same, and padding is still zeros."""
    latents = [name.removesuffix("kv_a_layernorm.weight") for name in before if name.endswith("kv_a_layernorm.weight")]
    assert latents, "there is a latent"
    for latent in latents:
        norm, bias, down = (
            f"{latent}kv_a_{part}" for part in ("layernorm.weight", "proj_with_mqa.bias", "proj_with_mqa.weight")
        )
        rank, empty = len(before[norm]), (before[down] == 0).all(1)
        assert torch.equal(after[norm], before[norm])
        assert torch.equal(after[bias][:rank], before[bias][:rank])
        assert empty.any()
        assert not after[down][empty].any()
        assert not torch.equal(after[down], before[down])
