"""What tests of whole conversions share: results of commands, and checkpoints as they lie on disk."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Fixtures of conftest.py: `checkpoint`, `convert` and `logits`.
Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]

TENSORS = {  # of several dtypes and shapes, as files hold them
    "a.weight": torch.randn(4, 6),
    "b.weight": torch.randn(5).to(torch.bfloat16),
    "c.flags": torch.tensor([True, False, True]),
    "d.ids": torch.arange(7),
    "e.scalar": torch.tensor(2.5),
    "f.empty": torch.empty(0, 3),
}


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


def same_but_for_the_run(a: Path, b: Path) -> None:
    names, others = (sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()) for path in (a, b))
    assert names == others
    assert any(name.endswith(".safetensors") for name in names), f"there are no weights in {a}"
    written = [json.loads((path / "conversion.json").read_text()) for path in (a, b)]
    for provenance in written:
        del provenance["run"]
    assert written[0] == written[1]
    others = [name for name in names if name != "conversion.json"]
    assert filecmp.cmpfiles(a, b, others, shallow=False) == (others, [], [])


def edit(path: Path, **changes: Any) -> Path:
    """Change the config of a checkpoint."""
    raw = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(raw))
    return path


def silence(source: Path, layer: int) -> Path:
    """A model of which one layer adds nothing, as after pruning."""

    def prune(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"].zero_()

    return damage(source, prune)


def damage(source: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Change the weights of a checkpoint of one file."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return source


def layer_notes(path: Path) -> list[dict[str, Any]]:
    """What conversion.json says of each layer."""
    found = list(json.loads((path / "conversion.json").read_text())["layers"])
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
