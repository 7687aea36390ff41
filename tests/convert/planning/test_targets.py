"""Targets: what is said of each."""

from __future__ import annotations

import dataclasses

from records import record
from targets import MHA, grouped, latent

# ---- fewer KV heads ------------------------------------------------------------------------------------------------


def test_a_grouped_target_says_what_was_asked_for_and_what_comes_of_it() -> None:
    target = dataclasses.replace(grouped(groups=2), options={"groups": 2})
    assert target.recipe() == {"groups": 2}
    assert target.facts() == {"kv_heads_after": 2}
    assert (target.copies, grouped(groups=4).copies) == (False, True)
    assert (grouped().layer_steps(True), grouped().layer_steps(False)) == (("refit",), ())
    recipe = grouped(groups=2)
    recipe.recipe()["groups"] = 5
    assert "groups" not in recipe.options, "a recipe is the reader's own"


# ---- a latent ------------------------------------------------------------------------------------------------------


def test_a_latent_target_says_its_size_and_its_channels() -> None:
    target = latent()
    assert (target.command, target.copies, target.layer_steps(False)) == ("mla", False, ("scale",))
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
