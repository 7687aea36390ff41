"""A pass through a rounding cache reads what an encoded cache gives, and passes gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_model
from tiny_mla import mla_model, tokens
from transformers import DynamicCache

from attention.encoded_forward import store_encoded
from attention.encoding import rounded
from attention.errors import Refusal
from attention.formats import FORMATS, KIVI, format_named
from attention.rounded import read_rounded, rounding_cache
from attention.spec import AttentionSpec

LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def heads() -> Any:
    return tiny_model(tiny_config("llama", num_key_value_heads=2)).double()


def latent() -> Any:
    return mla_model(dtype=torch.float64, **LATENT)


def through(model: Any, ids: torch.Tensor, form: str) -> torch.Tensor:
    cache = rounding_cache(format_named(form), AttentionSpec.from_config(model.config))
    found: torch.Tensor = model(ids, past_key_values=cache, use_cache=True).logits
    return found


@pytest.mark.parametrize(
    ("make", "form"), [(heads, "int4"), (heads, "fp8"), (latent, "int4"), (latent, "int2"), (latent, "fp8"), (latent, "mixed")]
)
def test_a_text_is_read_as_from_an_encoded_cache(make: Any, form: str) -> None:
    model, ids = make(), tokens(2, 40)
    with torch.no_grad():
        found, plain = through(model, ids, form), model(ids).logits
        expected = store_encoded(model, form)(ids).logits
    assert torch.equal(found, expected)
    assert not torch.allclose(found, plain, atol=1e-4)


def test_kivi_rounds_keys_along_time_in_full_groups() -> None:
    """Known answer: each channel of 32 consecutive tokens shares a scale, and values those of one token, as in int4."""
    form, states = FORMATS["int4"], torch.randn(2, 75, 64, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([rounded(group.mT, form, "values").mT for group in states[:, :64].split(32, 1)] + [states[:, 64:]], 1)
    assert torch.equal(rounded(states, KIVI["kivi4"], "keys"), expected)
    assert torch.equal(rounded(states, KIVI["kivi4"], "values"), rounded(states, form, "values"))


def test_a_model_reads_whole_texts_rounded() -> None:
    model, ids = heads(), tokens(2, 40)
    with torch.no_grad():
        expected = through(model, ids, "kivi2")
        assert not torch.allclose(model(ids).logits, expected, atol=1e-3)
        read_rounded(model, "kivi2")
        output = model(input_ids=ids, use_cache=False)
    assert torch.equal(output.logits, expected)
    assert output.past_key_values is None
    for given in ({"attention_mask": torch.tensor([[0] + [1] * 39, [1] * 40])}, {"past_key_values": DynamicCache()}):
        with pytest.raises(Refusal, match="kivi2 rounds whole texts: it takes no cache and no padding"):
            model(ids, **given)


@pytest.mark.parametrize("make", [heads, latent])
def test_gradients_pass_as_if_nothing_were_rounded(make: Any) -> None:
    """In float64 the rounding of int8 is small, and so is what it does to gradients; none of them is cut."""
    model, ids = make(), tokens(2, 40)
    gradients = []
    for logits in (model(ids).logits, through(model, ids, "int8")):
        model.zero_grad()
        logits.log_softmax(-1)[..., 5].sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    plain, through_rounding = gradients
    assert plain.keys() == through_rounding.keys()
    for name, expected in plain.items():
        assert float((through_rounding[name] - expected).norm()) < 0.05 * float(expected.norm()) + 1e-9, name
