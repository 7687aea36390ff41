"""Grouped attention packed for one new token, against stock transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import INTERPRETER
from tiny import tiny_config, tiny_model
from tiny_mla import error, logits, mla_model, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attention.kernels
from attention import load, pack, restore
from attention.errors import Refusal
from attention.grouped import NAMES
from convert.families import FAMILIES


def grouped_model(model_type: str = "llama", **changes: Any) -> Any:
    model = tiny_model(tiny_config(model_type, **changes))
    model.set_attn_implementation("sdpa")
    return model


def padding(batch: int, length: int) -> torch.Tensor:
    """Ones, and zeros for left padding in all sequences but the first."""
    return (torch.arange(length) >= torch.arange(batch)[:, None]).long()


WITHOUT_SDPA = ("gemma2", "vaultgemma")  # whose scores are capped


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in WITHOUT_SDPA])
def test_packed_families_compute_what_stock_computes(model_type: str) -> None:
    model = grouped_model(model_type)
    ids, mask = tokens(3, 20), padding(3, 20)
    expected, padded = logits(model, ids), logits(model, ids, mask)
    with attention.kernels.watched() as seen:
        assert error(logits(pack(model), ids), expected) < 1e-5
    assert seen == {"torch": None}
    assert error(logits(model, ids, mask), padded) < 1e-5


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_model_generates_the_same_tokens(backend: Any) -> None:
    """Left padding, over a cache that grows and one that does not."""
    if backend == "triton" and not INTERPRETER:
        pytest.skip("on a CPU by the interpreter")
    model, ids, mask = grouped_model(head_dim=16), tokens(2, 9), padding(2, 9)
    wanted = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    for cache in ("dynamic", "static"):
        expected = restore(model).generate(ids, cache_implementation=cache, **wanted)
        found = pack(model, backend=backend).generate(ids, cache_implementation=cache, **wanted)
        assert torch.equal(found, expected)


class Largest(TorchDispatchMode):
    """The most values of a tensor that any operation makes."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        out = function(*arguments, **(options or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.most = max(self.most, tensor.numel())
        return out


@pytest.mark.parametrize("packed", [False, True], ids=["stock", "packed"])
def test_compiled_steps_do_not_repeat_the_cache(packed: bool) -> None:
    """Stock they do: the test would fail if it could not tell."""
    model, cached = grouped_model(num_key_value_heads=1), 64
    model = pack(model) if packed else model
    cache = StaticCache(config=model.config, max_cache_len=cached)
    largest = Largest()

    def watching(graph: Any, examples: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with largest:
                return graph.forward(*arguments)

        return run

    torch.compiler.reset()
    step = torch.compile(model, backend=watching, fullgraph=True)
    with torch.no_grad():
        expected = logits(restore(grouped_model(num_key_value_heads=1)), tokens(2, 11), chunks=[10])
        model(tokens(2, 11)[:, :10], past_key_values=cache)
        found = step(tokens(2, 11)[:, 10:], past_key_values=cache).logits
    assert error(found, expected[:, -1:]) < 1e-5
    repeated = 2 * model.config.num_attention_heads * cached * model.config.head_dim
    assert (largest.most >= repeated) is not packed


def test_save_pretrained_writes_the_stock_checkpoint(tmp_path: Path) -> None:
    model = grouped_model()
    model.save_pretrained(tmp_path / "stock")
    pack(model).save_pretrained(tmp_path / "packed")
    for path in (tmp_path / "stock").iterdir():
        assert path.read_bytes() == (tmp_path / "packed" / path.name).read_bytes()
    again = load(tmp_path / "packed", dtype=torch.float32, backend="torch")
    assert again.config._attn_implementation == NAMES["torch"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "packed").config._attn_implementation == "sdpa"
    assert load(tmp_path / "packed", attn_implementation="eager").config._attn_implementation == "eager"
    tiny_model(tiny_config("llama", num_key_value_heads=8)).save_pretrained(tmp_path / "mha")
    assert load(tmp_path / "mha").config._attn_implementation == "sdpa"


def test_the_attention_functions_of_transformers_stay_as_they_are() -> None:
    model, other = pack(grouped_model()), grouped_model()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert other.config._attn_implementation == "sdpa"
    assert restore(model).config._attn_implementation == "sdpa"
    eager = tiny_model(tiny_config("llama"))
    assert restore(eager).config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("make", "backend", "said"),
    [
        (lambda: grouped_model(num_key_value_heads=8), "auto", "LlamaForCausalLM has no query heads that share a KV head"),
        (mla_model, "auto", "DeepseekV3ForCausalLM has no query heads that share a KV head"),
        (
            lambda: tiny_model(tiny_config("llama")),
            "auto",
            "cannot pack LlamaForCausalLM: it attends through 'eager', and must",
        ),
        (lambda: AutoModelForCausalLM.from_config(tiny_config("gemma2")), "auto", "cannot pack Gemma2ForCausalLM"),
        (grouped_model, "cuda", "there is no backend 'cuda': it must be one of 'auto', 'triton', 'torch'"),
    ],
    ids=["mha", "mla", "eager", "gemma2", "backend"],
)
def test_what_cannot_be_packed_is_refused(make: Any, backend: Any, said: str) -> None:
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(Refusal, match=said):
        pack(model, backend=backend)
    assert model.config._attn_implementation == before


def test_a_class_that_leaves_no_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = grouped_model()
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda *_: None)
    with pytest.raises(Refusal, match="its class does not let its attention function be chosen"):
        pack(model)
