"""The source's own class: two keys of its config, and the shapes that follow."""

from __future__ import annotations

import copy
import json

import pytest
from tiny import tiny_config, tiny_model

from convert.families import FAMILIES
from convert.families.separate import ROWS, SeparateProjections
from convert.hosts.source_class import HOST


@pytest.mark.parametrize("family", ROWS, ids=lambda row: row.model_type)
def test_shapes_at_fewer_heads_are_those_of_the_class(family: SeparateProjections) -> None:
    config = tiny_config(family.model_type)
    target = family.spec(config).grouped(2)
    assert HOST.layout(family) is family
    assert HOST.refuses(family, config, target, "float16") is None
    model = tiny_model(tiny_config(family.model_type, num_key_value_heads=2))
    there = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if ".self_attn." in name}
    sized, named = HOST.sized({}, config, target), {}
    for layer in range(config.num_hidden_layers):
        named |= HOST.layout(family).shapes(sized, layer)
    assert named == there


def test_nothing_else_of_a_config_changes() -> None:
    config = tiny_config("llama")
    raw = json.loads(config.to_json_string()) | {"own_key": [1, 2]}
    given, before = copy.deepcopy(raw), FAMILIES["llama"].spec(config)
    written = HOST.config(raw, config, before.grouped(2), None)
    assert written == raw | {"num_key_value_heads": 2, "head_dim": 8}
    assert raw == given
    sized = HOST.sized(raw, config, before.grouped(2))
    assert (sized.num_key_value_heads, config.num_key_value_heads) == (2, 4), "the source's own is left alone"


def test_what_is_a_default_is_written_all_the_same() -> None:
    config = tiny_config("llama")
    raw = {key: value for key, value in json.loads(config.to_json_string()).items() if "head" not in key}
    written = HOST.config(raw, config, FAMILIES["llama"].spec(config), None)
    assert (written["num_key_value_heads"], written["head_dim"]) == (4, 8)
    assert HOST.reserved(512) == 0
