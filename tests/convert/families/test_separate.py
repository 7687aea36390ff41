"""Separate projections: every row's split and join are inverse, bit for bit, and copy nothing."""

from __future__ import annotations

import pytest
import torch
from alike import comes_back
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import SWITCHES, layer_tensors, switched, tiny_config, tiny_model

from convert.families import FAMILIES
from convert.families.separate import ROWS, SeparateProjections


@pytest.mark.parametrize("family", ROWS, ids=lambda row: row.model_type)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_join_is_the_inverse_of_split(family: SeparateProjections, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 3), "KV heads")
    share = data.draw(st.integers(1, 3), "query heads per KV head")
    head_dim = 2 * data.draw(st.integers(2, 5), "half of D")
    heads = groups * share
    width = (
        heads * head_dim
        if family.model_type in ("stablelm", "phi", "olmoe", "helium")
        else heads * data.draw(st.integers(1, 6), "E / H")
    )
    config = tiny_config(
        family.model_type,
        **{switch: data.draw(st.booleans(), switch) for switch in SWITCHES},
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        hidden_size=width,
    )
    layer = data.draw(st.integers(0, config.num_hidden_layers - 1), "layer")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    comes_back(family, config, layer, dtype)


@pytest.mark.parametrize("family", ROWS, ids=lambda row: row.model_type)
def test_a_split_copies_nothing_that_a_method_may_leave_alone(family: SeparateProjections) -> None:
    model = tiny_model(switched(family.model_type, True))
    tensors = layer_tensors(model, family, 0)
    back = family.join(family.split(tensors, model.config, 0), family.spec(model.config), 0)
    projections = [name for name in tensors if "_proj" in name or "dense" in name]
    assert projections
    for name in projections:
        assert back[name].data_ptr() == tensors[name].data_ptr(), name


@pytest.mark.parametrize("model_type", ["codegen", "gptj"])
def test_rotary_dims_of_a_field_are_pairs_within_a_head(model_type: str) -> None:
    family, config = FAMILIES[model_type], tiny_config(model_type, rotary_dim=6)
    facts = family.describe(config)
    assert family.unreadable(config) is None
    assert (facts["rotary_dims"], facts["rotary_pairing"], facts["rope_type"]) == (6, "interleaved", "default")
    for dims in (0, 3, 10):
        message = f"RoPE rotates pairs of each head's 8 dims, and rotary_dim is {dims}"
        assert family.unreadable(tiny_config(model_type, rotary_dim=dims)) == message
