"""Ranks of layers: how they are shared out, and how results of `mla --per-layer-ranks` run."""

import json
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import decodes_alike
from held import config_of, said, stock
from hypothesis import given, settings
from hypothesis import strategies as st
from latents import same_logits
from tiny import tiny_config
from tiny_mla import tokens
from written import Convert, Make, damage, edit, left_nothing, ok, read, refused, weights

from attention import load
from attention.latent import is_absorbed
from attention.spec import AttentionSpec
from convert.methods.ranks import interpolated, measured_ranks, shared_out
from convert.planning.budget import layer_ranks
from eval.quality.lockstep import measured_bytes_per_token

STEPS = (2, 4, 6, 8)


def test_rank_goes_where_it_saves_most() -> None:
    costs = [[9.0, 4.0, 2.0, 1.0], [3.0, 2.5, 2.2, 2.1], [0.0, 0.0, 0.0, 0.0]]
    assert shared_out(costs, STEPS, STEPS, 12) == (8, 2, 2)
    assert shared_out(costs, STEPS, STEPS, 6) == (2, 2, 2)
    assert shared_out(costs, STEPS, STEPS, 100) == (8, 8, 8)


def test_layers_that_hold_fewer_tokens_pay_less() -> None:
    costs = [[9.0, 4.0, 2.0, 1.0], [9.0, 4.0, 2.0, 1.0]]
    assert shared_out(costs, STEPS, STEPS, 8) == (4, 4)
    assert shared_out(costs, STEPS, STEPS, 4 * (1 + 9), (1, 9)) == (8, 2)
    assert shared_out(costs, STEPS, STEPS, 8 + 4 * 9, (1, 9)) == (8, 4)


def test_a_price_need_not_be_in_proportion_to_its_rank() -> None:
    costs, prices = [[9.0, 4.0, 2.0, 1.0], [9.0, 5.0, 2.0, 1.0]], (2, 4, 7, 9)
    assert shared_out(costs, STEPS, prices, 11) == (4, 6)
    assert shared_out(costs, STEPS, STEPS, 11) == (4, 6)
    assert shared_out(costs, STEPS, prices, 10) == (4, 4)
    costs, prices = [[10.0, 10.0, 4.0, 4.0], [10.0, 8.2, 8.2, 8.2]], (2, 3, 6, 7)
    assert shared_out(costs, STEPS, STEPS, 8) == (6, 2), "4 ranks for 6 are steeper than 2 for 1.8"
    assert shared_out(costs, STEPS, prices, 8)[1] == 4, "a price of 4 for 6 is less steep than one of 1 for 1.8"


convex = st.lists(st.floats(0, 10), min_size=3, max_size=3).map(
    lambda falls: [sum(sorted(falls, reverse=True)[i:]) for i in range(4)]
)


@settings(deadline=None)
@given(costs=st.lists(convex, min_size=1, max_size=4), spare=st.integers(0, 12))
def test_where_costs_fall_ever_less_no_choice_is_better(costs: list[list[float]], spare: int) -> None:
    total = 2 * len(costs) + 2 * spare
    found = shared_out(costs, STEPS, STEPS, total)

    def cost(ranks: tuple[int, ...]) -> float:
        return sum(row[STEPS.index(rank)] for row, rank in zip(costs, ranks, strict=True))

    assert sum(found) <= total
    best = min(cost(ranks) for ranks in product(STEPS, repeat=len(costs)) if sum(ranks) <= total)
    assert cost(found) == pytest.approx(best, abs=1e-9)


@settings(deadline=None)
@given(
    costs=st.lists(st.lists(st.floats(0, 10), min_size=4, max_size=4), min_size=1, max_size=5),
    steps=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    spare=st.integers(0, 30),
)
def test_ranks_never_take_more_than_allowed(costs: list[list[float]], steps: list[int], spare: int) -> None:
    prices = list(accumulate(steps))
    total = prices[0] * len(costs) + spare
    found = shared_out(costs, STEPS, prices, total)
    assert set(found) <= set(STEPS)
    assert sum(prices[STEPS.index(rank)] for rank in found) <= total


def test_costs_between_those_measured_fall_by_equal_shares() -> None:
    assert interpolated([2, 6], [16.0, 1.0], [2, 3, 4, 6]) == pytest.approx([16, 8, 4, 1])
    assert interpolated([2, 6, 8], [4.0, 1.0, 2.0], [2, 6, 8]) == pytest.approx([4, 1, 1]), "more rank never costs more"
    assert interpolated([4], [3.0], [4]) == pytest.approx([3])
    assert interpolated([2, 4], [1.0, 0.0], [2, 3, 4])[-1] == pytest.approx(0, abs=1e-200)


@settings(deadline=None)
@given(mean=st.integers(1, 600), full=st.integers(1, 2000))
def test_every_layer_can_have_the_least_rank_and_none_exceeds_full_size(mean: int, full: int) -> None:
    ranks = layer_ranks(mean, max(mean, full))
    assert 1 <= ranks[0] <= mean
    assert ranks[-1] <= max(mean, full)
    assert list(ranks) == sorted(set(ranks))
    measured = measured_ranks(ranks)
    assert (measured[0], measured[-1]) == (ranks[0], ranks[-1])
    assert set(measured) <= set(ranks)
    assert len(measured) <= 6


def test_ranks_are_multiples_of_what_the_cuda_kernel_takes_and_full_size() -> None:
    assert all(rank % 16 == 0 for rank in layer_ranks(512, 4096))
    assert layer_ranks(96, 300) == tuple(range(16, 241, 16))
    assert layer_ranks(100, 100)[-1] == 100
    assert layer_ranks(48, 75) == (*range(12, 73, 4), 75)


# ---- whole conversions -----------------------------------------------------------------------------------------------

RANKED = "--kv-lora-rank", 12, "--per-layer-ranks"


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "rope"), [("llama", ["--qk-rope-head-dim", 4]), ("gpt2", [])])
def test_results_run_alike_in_every_way(
    model_type: str, rope: list[Any], checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path
) -> None:
    ok(convert("mla", checkpoint(model_type), tmp_path / "out", *RANKED, *rope, *on))
    ranks, provenance = config_of(tmp_path / "out")["kv_lora_ranks"], read(tmp_path / "out" / "conversion.json")
    assert ranks == provenance["kv_lora_ranks"]
    assert len(ranks) == 3
    assert sum(ranks) <= 36
    assert len(set(ranks)) > 1, "this seed's layers differ"
    plain, absorbed, ids = stock(tmp_path / "out"), load(tmp_path / "out", when="always"), tokens(2, 12)
    assert [module.kv_lora_rank for module in absorbed.modules() if is_absorbed(module)] == ranks
    same_logits(said(absorbed, ids), said(plain, ids))
    assert torch.equal(decodes_alike(plain, ids), decodes_alike(absorbed, ids))
    spec = AttentionSpec.from_config(plain.config)
    assert spec.ranks == tuple(ranks)
    measured = measured_bytes_per_token(plain, "float32")
    assert measured == spec.bytes_per_token("float32") == provenance["kv_bytes_per_token"]["after"]
    absorbed.save_pretrained(tmp_path / "again")
    same_logits(said(stock(tmp_path / "again"), ids), said(plain, ids), 1e-6)


def test_of_a_budget_a_layer_that_adds_little_gets_the_least(
    checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path
) -> None:
    source = checkpoint("llama")
    damage(source, lambda tensors: tensors["model.layers.1.self_attn.o_proj.weight"].mul_(1e-3))
    ok(convert("mla", source, tmp_path / "out", "--kv-budget", "25%", "--per-layer-ranks", *on))
    provenance = read(tmp_path / "out" / "conversion.json")
    ranks, used = provenance["kv_lora_ranks"], provenance["kv_bytes_per_token"]
    assert ranks[1] == min(ranks) < min(ranks[0], ranks[2])
    assert used["after"] <= used["before"] / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*RANKED, "--qk-rope-head-dim", 4], "--per-layer-ranks needs calibration text"),
        ([*RANKED, "--qk-rope-head-dim", 4, "--portable", "on"], "the latents of its layers have one rank"),
        ([*RANKED, "--qk-rope-head-dim", 4, "--engine", "vllm", "on"], "vllm does not run it"),
        ([*RANKED, "--qk-rope-head-dim", 4, "--pad-rank", "on"], "give either --per-layer-ranks or --pad-rank"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: list[Any], message: str, checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path
) -> None:
    given = [part for option in options for part in (on if option == "on" else [option])]
    out = tmp_path / "out"
    left_nothing(convert("mla", checkpoint("llama"), out, *given), 2, message, out)


def test_such_a_result_keeps_its_ranks_and_is_not_converted_again(
    checkpoint: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path
) -> None:
    out, healed = tmp_path / "out", tmp_path / "healed"
    ok(convert("mla", checkpoint("llama"), out, *RANKED, "--qk-rope-head-dim", 4, *on, "--refine", 2))
    given = ["--kv-lora-rank", 4, "--qk-rope-head-dim", 2]
    refused(convert("mla", out, tmp_path / "smaller", *given), 2, "has latent attention already")
    facts = json.loads(ok(convert("inspect", out, "--json")).stdout)
    provenance = read(out / "conversion.json")
    assert facts["attention"] == provenance["kind"]
    assert facts["kv_lora_ranks"] == provenance["kv_lora_ranks"]
    assert facts["latents_possible"] == []
    rows = json.loads(ok(convert("plan", out, "--json")).stdout)["targets"]
    assert [row["kind"] for row in rows] == [provenance["kind"]]
    healing = ["--text", letters, "--context", 32, "--tokens", 256, "--batch-tokens", 64, "--lr", 1e-3]
    ok(convert("heal", out, healed, *healing))
    assert config_of(healed)["kv_lora_ranks"] == facts["kv_lora_ranks"]
    assert {n: t.shape for n, t in weights(out).items()} == {n: t.shape for n, t in weights(healed).items()}
    for ranks in ([12, 12], [12, 0, 12], [12, 12.5, 12], "12", [True, 1, 1]):
        edit(out, kv_lora_ranks=ranks)
        refused(convert("inspect", out), 2, "kv_lora_ranks is")


def test_a_class_that_ignores_the_ranks_is_not_counted_by_them() -> None:
    plain, stray = (tiny_config("deepseek_v3", **changes) for changes in ({}, {"kv_lora_ranks": [1, 1, 1]}))
    assert AttentionSpec.from_config(plain) == AttentionSpec.from_config(stray)
