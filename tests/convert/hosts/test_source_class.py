"""The source's own class with other sizes."""

from __future__ import annotations

from tiny import tiny_config

from attention.spec import AttentionSpec
from convert.families import FAMILIES
from convert.hosts.source_class import HOST


def test_another_number_of_kv_heads_leaves_the_config_as_it_was() -> None:
    config = tiny_config("llama", num_key_value_heads=8)
    smaller = HOST.sized({}, FAMILIES["llama"].of(config), AttentionSpec.from_config(config).grouped(2))
    assert (config.num_key_value_heads, smaller.num_key_value_heads) == (8, 2)
    assert AttentionSpec.from_config(smaller) == AttentionSpec.from_config(config).grouped(2)
