"""Separate projections: configs whose RoPE does not fit their heads."""

from __future__ import annotations

import pytest
from tiny import tiny_config

from convert.families import FAMILIES


@pytest.mark.parametrize("model_type", ["codegen", "gptj"])
def test_rotary_dims_of_a_field_are_pairs_within_a_head(model_type: str) -> None:
    family = FAMILIES[model_type].of(tiny_config(model_type, rotary_dim=6))
    facts = family.describe()
    assert family.unreadable is None
    assert (facts["rotary_dims"], facts["rotary_pairing"], facts["rope_type"]) == (6, "interleaved", "default")
    for dims in (0, 3, 10):
        message = f"RoPE rotates pairs of each head's 8 dims, and rotary_dim is {dims}"
        assert family.of(tiny_config(model_type, rotary_dim=dims)).unreadable == message
