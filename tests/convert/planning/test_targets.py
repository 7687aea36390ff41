"""Targets: what is said of each, and its change of a layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from records import factored, inputs, loss, measured, record
from tiny import tiny_config

from attention.record import Attention
from attention.spec import AttentionSpec
from convert.hosts import deepseek_v3, source_class
from convert.methods import load_grouped, load_latent
from convert.planning.targets import GroupedTarget, LatentTarget

MHA = AttentionSpec(2, 8, 4, 6)


def grouped(
    groups: int = 2, method: str = "mean", grouping: str = "contiguous", seed: int = 0, **options: Any
) -> GroupedTarget:
    spec = MHA.grouped(groups)
    return GroupedTarget("gqa", options, MHA, spec, load_grouped(method), source_class.HOST, grouping, seed, 0.02)


def latent(before: AttentionSpec = MHA, rank: int = 16, rope: int = 4, channels: int = 15, **changes: Any) -> LatentTarget:
    return LatentTarget(before, before.latent(rank, rope), load_latent("svd"), deepseek_v3.HOST, channels, **changes)


def heads(scattered: bool = False) -> Attention:
    """Two pairs of equal KV heads, next to each other or apart."""
    few = record(2, 2, 3, 0, 20)
    order = [0, 1, 0, 1] if scattered else [0, 0, 1, 1]
    names = ("k", "v", "k_bias", "v_bias")
    whole = dataclasses.replace(few, **{name: getattr(few, name)[order] for name in names})
    return dataclasses.replace(whole, **{name: getattr(record(4, 2, 3, 0, 20), name) for name in ("q", "o", "q_bias")})


# ---- fewer KV heads ------------------------------------------------------------------------------------------------


def test_a_grouped_target_says_what_was_asked_for_and_what_comes_of_it() -> None:
    target = grouped(groups=2, grouping="similar", method="aligned")
    target = dataclasses.replace(target, options={"groups": 2, "grouping": "similar"})
    assert target.recipe() == {"groups": 2, "grouping": "similar"}
    assert target.facts() == {"kv_heads_after": 2}
    assert target.steps() == ["--grouping similar"]
    assert not target.copies
    assert grouped().steps() == []
    recipe = grouped(groups=2)
    recipe.recipe()["groups"] = 5
    assert "groups" not in recipe.options, "a recipe is the reader's own"


def test_as_many_groups_as_heads_is_a_copy_whatever_the_grouping() -> None:
    target = grouped(groups=4, grouping="similar", method="aligned")
    assert target.copies
    assert target.steps() == []


def test_a_change_merges_heads_that_are_next_to_each_other() -> None:
    before = heads()
    source, after = grouped().change(before, 0, measured(inputs(20)))
    assert source is before
    assert after.num_kv_heads == 2
    assert loss(before, after) < 1e-6


def test_similar_heads_are_brought_together_in_the_source_too() -> None:
    before = heads(scattered=True)
    known = measured(inputs(20))
    source, after = grouped(method="aligned", grouping="similar").change(before, 0, known)
    assert torch.equal(source.k[0], source.k[1])
    assert loss(before, source) < 1e-6, "the same function in another order"
    assert loss(source, after) < 1e-4
    _, apart = grouped(method="aligned").change(before, 0, known)
    assert loss(before, apart) > 1e-2


def test_random_weights_follow_seed_and_layer() -> None:
    def drawn(seed: int, layer: int) -> torch.Tensor:
        return grouped(method="random", seed=seed).change(heads(), layer, measured(inputs(20)))[1].k

    assert torch.equal(drawn(1, 0), drawn(1, 0))
    assert not torch.equal(drawn(1, 0), drawn(2, 0))
    assert not torch.equal(drawn(1, 0), drawn(1, 1))


# ---- a latent ------------------------------------------------------------------------------------------------------


def test_a_latent_target_says_its_size_and_its_channels() -> None:
    target = latent()
    assert (target.command, target.copies, target.steps()) == ("mla", False, [])
    assert target.recipe() == {"kv_lora_rank": 16, "qk_rope_head_dim": 4}
    assert target.facts() == {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "latent_channels": 15}
    assert latent(freqfold=2, pad_rank=True).recipe() == {
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "freqfold": 2, "pad_rank": True,
    }  # fmt: skip


def test_an_allocation_begins_with_what_the_sizes_say() -> None:
    rotary = record(4, 2, 3).rotary
    assert rotary is not None
    found = latent(freqfold=2).allocation(rotary)
    assert (found.rank, found.pairs, found.freqfold, found.rotary) == (15, (), 2, rotary)
    assert (found.nope_dims, found.rotary_keys, found.pursued) == (6, 4, False)
    source = MHA.latent(16, 4)
    smaller = latent(source, 12, 4, 11).allocation(rotary)
    assert (smaller.nope_dims, smaller.rotary_keys) == (6, 1), "all that rotates still does"
    assert latent(source, 12, 2, 11).allocation(rotary).nope_dims == 10, "all dims of the source's keys"


def test_a_change_factors_a_layer() -> None:
    before, target = record(4, 2, 3, 0, 20), latent(AttentionSpec(1, 8, 4, 6), 21, 24, 20)
    assert before.rotary is not None
    chosen = target.allocation(before.rotary).keeping((0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2), False)
    source, after = target.change(chosen, before, measured(inputs(20)))
    assert source is before
    assert after.down.shape == (20, 20)
    assert loss(before, after) < 1e-5


@pytest.mark.parametrize(("rope", "nope"), [(6, 5), (4, 11)])
def test_a_change_of_a_latent_has_the_dims_that_the_config_says(rope: int, nope: int) -> None:
    a = factored(4, 5, 3, 9, 20, value=7)
    before = AttentionSpec(1, 4, 4, 7, 10, 6, 5)
    target = latent(before, 10, rope, 9)
    chosen = target.allocation(a.rotary).keeping(tuple(range(rope // 2)), False)
    _, after = target.change(chosen, a.expanded(), measured(inputs(20)))
    assert target.spec.qk_nope_head_dim == nope
    assert after.q_nope.shape == (4, nope, 20)
    assert after.up_k.shape == (4, nope, 9)
    assert after.up_v.shape == (4, 7, 9)
    assert after.k_rope.shape == (rope, 20)


def test_a_copy_keeps_the_config_as_it_was_written() -> None:
    source = dataclasses.make_dataclass("Written", ["raw", "config"])
    written = source({"model_type": "deepseek_v3", "odd": 1}, tiny_config("deepseek_v3"))
    before = AttentionSpec.from_config(written.config)
    target = LatentTarget(before, before, load_latent("svd"), deepseek_v3.HOST, 15)
    assert target.copies
    assert target.config(written, None) == written.raw
    assert target.config(written, None) is not written.raw
