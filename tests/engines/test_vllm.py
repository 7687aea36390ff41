"""vLLM generates what transformers generates, or does not start. `make test-engines` runs this where vLLM is installed."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer
from written import Convert, Make, edit, ok

from attention.models.vllm import LATENT_PROVEN, PROVEN
from attention.patch import load, pad_values
from attention.spec import dtype_bytes
from attention.versions import CACHE as GIVEN_CACHE

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make test-engines)"),
]

SOURCE = Path(__file__).parents[2] / "convert" / "demo" / "python-5m-mha"
SCRIPT = Path(__file__).with_name("vllm_tokens.py")
TOKENS = 48
AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
CACHE = 2**30  # bytes that vLLM may use for keys and values
# vLLM's kernel on CPUs takes no other size.
LATENT = ("mla", "--kv-lora-rank", 512, "--qk-rope-head-dim", 64, "--pad-rank")
TEXT = argparse.__file__  # Python code that does not change with this repository
CALIBRATION = ("--text", TEXT, "--calibration-tokens", 8192, "--heal", 0)
FOUR_HEADS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
TARGETS = {"MQA": ("mqa",), "GQA-4": ("gqa", "--groups", 4), "MLA-512+64": LATENT}
IDS = [[5, 9, 30, 40, 22], [50, 7], [33, 60, 61, 8, 90, 12]]  # of models with random weights
SHORT = {"max_model_len": 256, "enforce_eager": True}  # compiling takes a minute
# A pass computes 512 tokens, and a beginning that two prompts share is computed once.
LONG = {"max_model_len": 16384, "enforce_eager": True, "max_num_batched_tokens": 512, "enable_prefix_caching": True}
PROMPTS = ["def main():\n    ", "import os\n\n", "class Point:\n    def __init__(self"]


def served(
    model: Path, dtype: str, prompts: list[list[int]], options: dict[str, Any] = SHORT, **more: str
) -> subprocess.CompletedProcess[str]:
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(CACHE // 2**30), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    output = str(model.with_name("tokens.json"))
    command = [sys.executable, str(SCRIPT), str(model), dtype, str(TOKENS), output, json.dumps(options)]
    return subprocess.run(
        command, input=json.dumps(prompts), capture_output=True, text=True, env=os.environ | more | settings, timeout=900,
        check=False,
    )  # fmt: skip


def expected(model: Path, dtype: str, ids: list[int], steps: list[list[Any]]) -> torch.Tensor:
    """The log-probabilities `[T, V]` that transformers gives at the same tokens: the stock class, all at once.

    Behind long prompts in 16 bits, kvfold decodes over latents, as vLLM does: to expand keys and values rounds otherwise.
    """
    tokens = [token for token, _ in steps]
    if dtype == "float32" or len(ids) < 1000:
        made = pad_values(AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval())  # for long prompts
        parts = [ids + tokens[:-1]]
    else:
        made, parts = load(model, dtype=dtype), [ids, *([token] for token in tokens[:-1])]
    cache, logits = None, list[torch.Tensor]()
    with torch.inference_mode():
        for part in parts:
            out = made(torch.tensor([part]), use_cache=True, **{GIVEN_CACHE: cache})
            cache = out[GIVEN_CACHE]
            logits.append(out.logits[0])
    return torch.cat(logits)[len(ids) - 1 :].float().log_softmax(-1)


def same_tokens(model: Path, dtype: str, prompts: list[list[int]], options: dict[str, Any] = SHORT, shares: int = 1) -> int:
    """vLLM's tokens are those of transformers, and its cache has the bytes that were planned, in so many shares.

    Returns the tokens that it found in its cache.
    """
    done = served(model, dtype, prompts, options)
    assert done.returncode == 0, done.stderr[-2000:]
    near, off = {"float32": (0.01, 5e-4), "bfloat16": (0.1, 0.1), "float16": (0.02, 0.02)}[dtype]
    made = json.loads(model.with_name("tokens.json").read_text())
    for ids, steps in zip(prompts, made["steps"], strict=True):
        assert len(steps) == TOKENS
        known = expected(model, dtype, ids, steps)
        for step, (token, logprob) in zip(known, steps, strict=True):
            assert float(step.max() - step[token]) <= near, "another token only where two are nearly as likely"
            assert abs(float(step[token]) - logprob) <= off
    said = re.search(r"KV cache size: ([\d,]+) tokens", done.stdout + done.stderr)
    assert said
    planned = json.loads((model / "conversion.json").read_text())["kv_bytes_per_token"]
    predicted = planned["after"] * dtype_bytes(dtype) // dtype_bytes(planned["cache_dtype"]) // shares
    assert CACHE / int(said[1].replace(",", "")) == pytest.approx(predicted, rel=0.01)
    return int(made["cached"])


def prompts_of(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)(PROMPTS)["input_ids"]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("target", "dtype"),
    [("MQA", "float32"), ("GQA-4", "float32"), *(("MLA-512+64", dtype) for dtype in ("float32", "bfloat16", "float16"))],
)
def test_tokens_are_those_of_transformers(target: str, dtype: str, processes: int, convert: Convert, tmp_path: Path) -> None:
    """Also by tensor parallelism, in which KV heads are divided, and every process caches the one of MQA, or the latent."""
    command, *options = TARGETS[target]
    ok(convert(command, SOURCE, tmp_path / "out", *options))
    options_of_vllm = SHORT | {"tensor_parallel_size": processes}
    same_tokens(tmp_path / "out", dtype, prompts_of(tmp_path / "out"), options_of_vllm, processes if target == "GQA-4" else 1)


@pytest.mark.parametrize(
    ("model_type", "target", "dtype"),
    [
        ("gptj", ("gqa", "--groups", 2), "float32"),
        ("gpt2", ("mqa",), "float32"),
        ("qwen3", ("gqa", "--groups", 2, "--method", "mean"), "float32"),
        ("qwen2", LATENT, "float32"),
        ("qwen2", LATENT, "float16"),
    ],
    ids=str,
)
def test_other_output_classes_run_too(
    model_type: str, target: tuple[Any, ...], dtype: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    """Stock Phi and GPTBigCode, and a latent of queries that carries biases; random weights."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "rotary_dim": 16}
    source = checkpoint(model_type, **sizes, max_position_embeddings=256)
    if model_type == "qwen2":  # transformers 5.19 makes any tokenizer of a qwen2 one of this class
        Qwen2Tokenizer({"<|endoftext|>": 0} | {chr(32 + i): i for i in range(1, 96)}, []).save_pretrained(source)
    command, *options = target
    ok(convert(command, source, tmp_path / "out", *options, "--engine", "vllm"))
    same_tokens(tmp_path / "out", dtype, IDS)


@pytest.mark.parametrize(("target", "dtype"), [("MQA", "float32"), ("MLA-512+64", "float32"), ("MLA-512+64", "bfloat16")])
def test_long_requests_that_begin_alike(target: str, dtype: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """Three prompts of 16,000 tokens: the second begins with 15,500 of the first, the third has another token at position 9."""
    source = checkpoint("llama", **FOUR_HEADS, max_position_embeddings=16384)
    command, *options = TARGETS[target]
    ok(convert(command, source, tmp_path / "out", *options, *CALIBRATION, "--engine", "vllm"))
    ids = torch.randint(4, 90, (3, 16000), generator=torch.Generator().manual_seed(0))
    ids[1, :15500] = ids[0, :15500]
    ids[2], ids[2, 9] = ids[0], ids[0, 9] ^ 1
    cached = same_tokens(tmp_path / "out", dtype, ids.tolist(), LONG)
    caches = target == "MQA" or (dtype == "bfloat16" and AMX)  # its kernel for other CPUs caches no prefix of latents
    assert (cached > 15000) is caches


@pytest.mark.parametrize(("tied", "more"), [(True, ()), (False, ()), (False, ("--engine", "llama.cpp"))], ids=str)
def test_its_own_deepseek_class_runs_portable_results(
    tied: bool, more: tuple[Any, ...], checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    """Also with the latent of queries that llama.cpp wants."""
    source = checkpoint("llama", **FOUR_HEADS, max_position_embeddings=256, tie_word_embeddings=tied)
    ok(convert("mla", source, tmp_path / "out", *LATENT[1:], "--portable", *CALIBRATION, *more))
    same_tokens(tmp_path / "out", "float32", IDS)


@pytest.mark.parametrize(
    ("changed", "dtype", "more", "message"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "float32", {}, "ZeroDivisionError"),
        ({}, "float32", {"enforce_eager": False}, "Data-dependent branching"),
        pytest.param(
            {}, "float16", {"attention_backend": "AMX_MLA"}, "AMX_MLA computes wrongly in torch.float16",
            marks=pytest.mark.skipif(not AMX, reason="this CPU has no AMX"),
        ),
    ],
    ids=["saved again", "compiled", "AMX"],
)  # fmt: skip
def test_some_latents_do_not_start(
    changed: Any, dtype: str, more: dict[str, Any], message: str, convert: Convert, tmp_path: Path
) -> None:
    """As transformers saves them, for a class that would drop the biases; compiled; and in float16 in a kernel for bfloat16."""
    ok(convert("mla", SOURCE, tmp_path / "out", *LATENT[1:]))
    made = edit(tmp_path / "out", **changed)
    done = served(made, dtype, prompts_of(made), SHORT | more)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


@pytest.mark.parametrize(("model_type", "groups"), [*((name, 2) for name in PROVEN), ("qwen3", 1)])
def test_kvfolds_class_runs_where_kvfold_is_installed(
    model_type: str, groups: int, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "use_qk_norm": True}
    source = checkpoint(model_type, **sizes, max_position_embeddings=256)
    ours = ["--class", "kvfold", "--engine", "vllm", "--method", "mean"]
    ok(convert("gqa", source, tmp_path / "out", "--groups", groups, *ours))
    same_tokens(tmp_path / "out", "float32", IDS)


@pytest.mark.parametrize(("model_type", "compiled"), [*((name, False) for name in LATENT_PROVEN), ("qwen3", True)])
def test_kvfolds_latents_are_cached_as_they_are(
    model_type: str, compiled: bool, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    source = checkpoint(model_type, **sizes, rotary_pct=1.0, rotary_dim=64, use_qk_norm=True, max_position_embeddings=256)
    ok(convert("mla", source, tmp_path / "out", *LATENT[1:], "--no-text", "--engine", "vllm"))
    same_tokens(tmp_path / "out", "float32", IDS, SHORT | {"enforce_eager": not compiled})


@pytest.mark.parametrize(
    ("model_type", "target", "plugins", "message"),
    [
        ("qwen3", ("mla", "--kv-budget", "50%"), "kvfold", "2 of its layers are as in its source"),
        ("gemma2", ("mla", "--kv-budget", "50%"), "kvfold", "is built around gemma2, which was not run there"),
        ("qwen3", ("gqa", "--groups", 2, "--class", "kvfold"), "", "trust_remote_code=True"),
    ],
    ids=str,
)
def test_what_it_would_run_wrongly_does_not_start(
    model_type: str, target: tuple[Any, ...], plugins: str, message: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    command, *options = target
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None}
    source = checkpoint(model_type, head_dim=32, max_position_embeddings=256, **windows)
    ok(convert(command, source, tmp_path / "out", *options, "--no-text"))
    done = served(tmp_path / "out", "float32", [[5, 9]], VLLM_PLUGINS=plugins)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
