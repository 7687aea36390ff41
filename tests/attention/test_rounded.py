"""A pass through a rounding cache reads what an encoded cache gives, and passes gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_model
from tiny_mla import mla_model, tokens

from attention.encoded_forward import store_encoded
from attention.formats import FORMATS
from attention.rounded import rounding_cache
from attention.spec import AttentionSpec

# What a latent of these sizes, and heads, can be cached in without groups along time.
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def heads() -> Any:
    return tiny_model(tiny_config("llama", num_key_value_heads=2)).double()


def latent() -> Any:
    return mla_model(dtype=torch.float64, **LATENT)


def through(model: Any, ids: torch.Tensor, form: str) -> torch.Tensor:
    cache = rounding_cache(FORMATS[form], AttentionSpec.from_config(model.config))
    found: torch.Tensor = model(ids, past_key_values=cache, use_cache=True).logits
    return found


@pytest.mark.parametrize(
    ("make", "form"), [(heads, "int8"), (heads, "fp8"), (latent, "int4"), (latent, "int2"), (latent, "fp8"), (latent, "mixed")]
)
def test_a_text_is_read_as_from_an_encoded_cache(make: Any, form: str) -> None:
    model, ids = make(), tokens(2, 40)
    with torch.no_grad():
        found, plain = through(model, ids, form), model(ids).logits
        expected = store_encoded(model, form)(ids).logits
    assert torch.equal(found, expected)
    assert not torch.allclose(found, plain, atol=1e-4)


def test_keys_in_groups_along_time_are_rounded_in_full_groups() -> None:
    """All but a query's own group are read as from an encoded cache: the first token of each group reads just those."""
    model, ids = heads(), tokens(1, 33)
    with torch.no_grad():
        found, expected = through(model, ids, "int4"), store_encoded(model, "int4")(ids).logits
    assert not torch.allclose(found[:, 1:32], expected[:, 1:32], atol=1e-6)
    model = heads()
    model.config.num_hidden_layers = 1  # of the first layer alone: other layers read what earlier tokens became
    del model.model.layers[1:]
    with torch.no_grad():
        found, expected = through(model, ids, "int4"), store_encoded(model, "int4")(ids).logits
    torch.testing.assert_close(found[:, 32], expected[:, 32])


@pytest.mark.parametrize("make", [heads, latent])
def test_gradients_pass_as_if_nothing_were_rounded(make: Any) -> None:
    """In float64 the rounding of int8 is small, and so is what it does to gradients; none of them is cut."""
    model, ids = make(), tokens(2, 40)
    gradients = []
    for logits in (model(ids).logits, through(model, ids, "int8")):
        model.zero_grad()
        logits.log_softmax(-1)[..., 5].sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    plain, rounded = gradients
    assert plain.keys() == rounded.keys()
    for name, expected in plain.items():
        assert float((rounded[name] - expected).norm()) < 0.05 * float(expected.norm()) + 1e-9, name
