"""Stock Falcon as an output class of MQA: refused where its blocks differ."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_config

from convert.families import family_of
from convert.hosts.falcon import HOST

ONE_AFTER_THE_OTHER: dict[str, Any] = {"use_parallel_residual": False}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("changes", "groups", "message"),
    [
        ({"use_parallel_residual": True}, 1, "use_parallel_residual is true"),
        ({"attention_bias": False}, 1, "attention_bias is false"),
        ({"num_attention_heads": 8, "hidden_size": 72}, 1, "heads have 9 dims"),
        ({}, 2, "caches keys and values of all 8 query heads"),
        (
            {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0, "partial_rotary_factor": 0.5}},
            1,
            "4 of 8 dims rotate",
        ),
        (
            {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
            1,
            "RoPE of type 'yarn' cannot say that some are nope dims",
        ),
        ({}, 1, "None"),
    ],
)
def test_what_the_class_cannot_compute_is_refused(changes: dict[str, Any], groups: int, message: str) -> None:
    family = family_of("gpt_neox").of(tiny_config("gpt_neox", **(ONE_AFTER_THE_OTHER | changes)))
    assert message in str(HOST.refuses(family, family.spec.grouped(groups)))
