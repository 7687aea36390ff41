"""Stock classes of MLA: any list of frequencies in their config, gains stored whole, and what they take of a source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latents import full_size
from tiny import tiny_config
from written import Convert, Make, ok, weights

from attention.rope import Rotary, from_config
from attention.spec import AttentionSpec
from convert.families import FAMILIES, family_of
from convert.families.latent import LatentLayout
from convert.hosts.latent import DEEPSEEK, rope_parameters

# ---- frequencies -----------------------------------------------------------------------------------------------------


def written(rotary: Rotary, **changes: Any) -> tuple[dict[str, Any], Rotary]:
    """What goes into the config, and what the stock class makes of it."""
    parameters = rope_parameters(rotary, tiny_config("llama", **changes))
    config = tiny_config("deepseek_v3", qk_rope_head_dim=rotary.dims, head_dim=rotary.dims, rope_parameters=parameters)
    return parameters, from_config(config, rotary.dims, "interleaved")


@settings(max_examples=40, deadline=None)
@given(pairs=st.lists(st.integers(0, 31), min_size=1, max_size=70), theta=st.sampled_from([1e4, 5e5, 1e7]))
def test_any_list_of_frequencies_comes_back(pairs: list[int], theta: float) -> None:
    source = {"rope_type": "default", "rope_theta": theta}
    rotary = from_config(tiny_config("llama", head_dim=64, rope_parameters=source), 64).select(pairs, "interleaved")
    _, back = written(rotary, rope_parameters=source)
    torch.testing.assert_close(back.frequencies, rotary.frequencies, rtol=1e-6, atol=0)
    assert back.attention_factor == 1.0
    long = back.frequencies if back.long_frequencies is None else back.long_frequencies
    torch.testing.assert_close(long, rotary.frequencies, rtol=1e-6, atol=0)


@settings(max_examples=20, deadline=None)
@given(pairs=st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_both_lists_of_longrope_come_back_and_where_they_change(pairs: list[int]) -> None:
    frequencies = torch.tensor([1.0, 0.1, 0.03, 0.0002], dtype=torch.float64)
    rotary = Rotary(frequencies, "half", 1.3, frequencies / 7, 50).select(pairs, "interleaved")
    _, back = written(rotary)
    torch.testing.assert_close(back.frequencies, rotary.frequencies, rtol=1e-6, atol=0)
    assert back.long_frequencies is not None
    assert rotary.long_frequencies is not None
    torch.testing.assert_close(back.long_frequencies, rotary.long_frequencies, rtol=1e-6, atol=0)
    assert (back.long_beyond, back.attention_factor) == (50, 1.0)


def test_a_config_has_nothing_of_the_source_but_what_both_classes_know() -> None:
    config = tiny_config("mistral", sliding_window=128)
    raw = {"dtype": "bfloat16", "sliding_window": 128, "own_key": 5, "model_type": "mistral", "architectures": ["M"]}
    target = AttentionSpec.from_config(config).latent(16, 8)
    found = DEEPSEEK.config(raw, FAMILIES[config.model_type].of(config), target, None)
    assert "rope_parameters" not in found, "only sizes are wanted"
    assert not {"sliding_window", "own_key"} & found.keys()
    assert (found["model_type"], found["architectures"], found["dtype"]) == (
        "deepseek_v3", ["TransformersForCausalLM"], "bfloat16",
    )  # fmt: skip
    sized = DEEPSEEK.sized(raw, FAMILIES[config.model_type].of(config), target)
    assert AttentionSpec.from_config(sized) == target
    assert FAMILIES["deepseek_v3"].of(sized).unreadable is None, "what is written can be read"


def test_query_biases_go_through_the_latent_of_queries() -> None:
    biased = (("qwen2", {}), ("llama", {"attention_bias": True}), ("deepseek_v3", {"q_lora_rank": 80}))
    for model_type, changes in (*biased, ("llama", {})):
        family = FAMILIES[model_type].of(tiny_config(model_type, **changes))
        target, through = family.spec.latent(16, 8), (model_type, changes) != ("llama", {})
        assert DEEPSEEK.refuses(family, target) is None
        sized = DEEPSEEK.sized({}, family, target)
        assert sized.q_lora_rank == (80 if through else None)
        assert FAMILIES["deepseek_v3"].of(sized).unreadable is None
        note = "query biases go through q_a_proj, an identity with a constant: 64 × 80 more weights in each layer"
        assert DEEPSEEK.notes(family) == ((note,) if through else ())


# ---- MiniCPM3 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_gains_are_one_more_than_gemma_stores_rounded_once(
    stored: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = checkpoint("gemma")
    ok(convert("mla", source, tmp_path / "out", *full_size(4, 8), "--method", "svd", "--dtype", stored))
    before, after = weights(source), weights(tmp_path / "out")
    norms = [name for name in before if name.endswith("norm.weight")]
    assert len(norms) == 7
    for name in norms:
        assert torch.equal(after[name], (before[name].double() + 1).to(getattr(torch, stored))), name
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert set(norms) <= set(provenance["tensors"]["converted"])


def test_layers_that_scale_what_they_add_add_no_plain_output() -> None:
    family = family_of("minicpm3")
    assert family.of(tiny_config("minicpm3")).traits.adds_output
    assert not isinstance(family.of(tiny_config("minicpm3", scale_depth=1.4)), LatentLayout), "such a model is only counted"
