"""Conversions by several processes: the result of one, but for the order of sums."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_team
from refitting import in_full

import convert
from attention.errors import Refusal
from convert.processes import ALONE, Processes

Make = Callable[..., Path]
SIZES = {"calibration_tokens": 1280, "calibration_context": 64, "device": "cpu"}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "refined behind converted layers": ("llama", "mla", LATENT | {"refine": 2, "propagate": True}),
    "of a size that the text chooses": ("llama", "mla", {"kv_budget": "25%"}),
    "behind QK-norm": ("qwen3", "mla", LATENT),
    "one layer after the other": ("llama", "mqa", {"refit": False}),
    "on blocks of two lengths": ("mistral", "mqa", {"refine": 2, "calibration_tokens": 4096, "calibration_context": 1024}),
    "without text": ("llama", "mqa", {"text": None, "method": "mean"}),
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "train.txt"
    letters = torch.randint(32, 126, (6000,), generator=torch.Generator().manual_seed(3)).tolist()
    path.write_text("".join(map(chr, letters)), encoding="utf-8")
    return path


@pytest.mark.launch
def test_two_processes_do_what_one_does(
    checkpoint: Make, text: Path, tmp_path: Path, logits: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and errors are the same, but for the order of sums. The first case is stopped at its last layer, and resumed."""
    in_full(monkeypatch.setattr)
    given, sources = {}, {name: checkpoint(name, name=name, num_hidden_layers=2) for name in ("llama", "qwen3")}
    sources["mistral"] = checkpoint("mistral", name="mistral", max_position_embeddings=1024, num_hidden_layers=2)
    for name, (model_type, command, options) in CASES.items():
        common = {} if "text" in options else SIZES | {"text": str(text)}
        given[name] = [command, str(sources[model_type]), str(tmp_path / "two" / name), common | options | {"resume": True}]
    (tmp_path / "cases.json").write_text(json.dumps(list(given.values())), encoding="utf-8")
    script = Path(__file__).with_name("conversions.py"), tmp_path / "cases.json"
    stopped = run_team(*script, STOP_AT="1")
    assert stopped.returncode != 0
    assert "interrupted" in stopped.stderr
    assert [path.name for path in (tmp_path / "two").iterdir() if path.is_dir()] == [f"{next(iter(given))}.partial"]
    launched = run_team(*script)
    assert launched.returncode == 0, launched.stderr
    assert launched.stderr.count("fit: 1 layer") == 1  # by one process, of one layer
    for name, (command, source, output, options) in given.items():
        one = getattr(convert, command)(source, tmp_path / "one" / name, **options)
        found = json.loads(Path(output, "conversion.json").read_text(encoding="utf-8"))["layers"]
        for layer, expected in zip(found, one.layers, strict=True):
            assert layer == pytest.approx(expected, rel=1e-3, abs=1e-6), name
        torch.testing.assert_close(logits(output), logits(one.output), rtol=1e-3, atol=1e-3, msg=name)
        assert not Path(f"{output}.partial").exists()


@pytest.mark.launch
def test_a_refusal_ends_all_processes(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    """Here torchrun itself starts the command."""
    source = checkpoint("llama")
    given = source, tmp_path / "out", "--text", text, "--calibration-context", 128, "--calibration-tokens", 128
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "convert.cli"]
    command = [str(part) for part in (*torchrun, "mqa", *given)]
    launched = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert launched.returncode != 0
    assert "2 processes cannot share a calibration text of 1 blocks of 128 tokens" in launched.stderr
    assert "Traceback" not in launched.stderr.partition("torch")[0]
    assert not (tmp_path / "out.partial").exists()


def test_a_sweep_takes_one_process(checkpoint: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(Refusal, match="a sweep runs in one process, not in 2"):
        convert.sweep(checkpoint("llama"), tmp_path / "out", evaluate=text, groups=[2])


def test_parts_are_all_of_it_in_order() -> None:
    for count in range(1, 5):
        for things in range(12):
            parts = [Processes(index, count).part(things) for index in range(count)]
            assert [thing for part in parts for thing in part] == list(range(things))
    assert ALONE.first(lambda: 5) == 5
