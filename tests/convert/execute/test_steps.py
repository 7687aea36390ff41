"""What happens to a layer: what methods make of it, and the order of what follows."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from records import factored as factored_record
from records import inputs, loss, measured, record
from targets import grouped, latent

from attention.formats import FORMATS
from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.execute import steps
from convert.execute.steps import Pipeline, factored, latent_pipeline, merged
from convert.hosts import portable


def heads() -> Attention:
    """Two pairs of equal KV heads."""
    few = record(2, 2, 3, 0, 20)
    names = ("k", "v", "k_bias", "v_bias")
    whole = dataclasses.replace(few, **{name: getattr(few, name)[[0, 0, 1, 1]] for name in names})
    return dataclasses.replace(whole, **{name: getattr(record(4, 2, 3, 0, 20), name) for name in ("q", "o", "q_bias")})


def test_a_change_merges_heads_that_are_next_to_each_other() -> None:
    before = heads()
    after = merged(grouped(), before, 0, measured(inputs(20)))
    assert after.num_kv_heads == 2
    assert loss(before, after) < 1e-6


def test_a_change_factors_a_layer() -> None:
    before, target = record(4, 2, 3, 0, 20), latent(AttentionSpec(1, 8, 4, 6), 21, 24, 20)
    assert before.rotary is not None
    chosen = target.allocation(before.rotary).keeping((0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2), False)
    after = factored(target, chosen, (), before, 0, measured(inputs(20)))
    assert after.down.shape == (20, 20)
    assert loss(before, after) < 1e-5


@pytest.mark.parametrize(("rope", "nope"), [(6, 5), (4, 11)])
def test_a_change_of_a_latent_has_the_dims_that_the_config_says(rope: int, nope: int) -> None:
    a = factored_record(4, 5, 3, 9, 20, value=7)
    before = AttentionSpec(1, 4, 4, 7, 10, 6, 5)
    target = latent(before, 10, rope, 9)
    chosen = target.allocation(a.rotary).keeping(tuple(range(rope // 2)), False)
    after = factored(target, chosen, (), a.expanded(), 0, measured(inputs(20)))
    assert target.spec.qk_nope_head_dim == nope
    assert after.q_nope.shape == (4, nope, 20)
    assert after.up_k.shape == (4, nope, 9)
    assert after.up_v.shape == (4, 7, 9)
    assert after.k_rope.shape == (rope, 20)


def test_steps_follow_each_other_in_order() -> None:
    said: list[str] = []

    def step(name: str) -> Any:
        def run(before: Attention, after: Record, layer: int, known: Any) -> Record:
            said.append(f"{name} {layer}")
            return after

        return run

    pipeline = Pipeline(lambda before, layer, known: before, {name: step(name) for name in ("one", "two")})
    before = heads()
    assert pipeline(before, 7, measured(inputs(20))) is before
    assert said == ["one 7", "two 7"]


@pytest.mark.parametrize(
    ("host", "queries", "names"),
    [
        (None, None, ["refit", "scale"]),
        (portable.HOST, None, ["constant norm", "refit", "scale"]),
        (portable.HOST, 12, ["constant norm", "refit", "queries behind a norm", "scale"]),
    ],
)
def test_a_latent_is_made_in_this_order(host: Any, queries: int | None, names: list[str]) -> None:
    target = latent()
    target = dataclasses.replace(target, spec=dataclasses.replace(target.spec, q_lora_rank=queries))
    target = target if host is None else dataclasses.replace(target, host=host)
    plan = SimpleNamespace(choosing=lambda chosen: SimpleNamespace(layer_steps=chosen.layer_steps(refit=True)))
    job: Any = SimpleNamespace(plan=plan)
    assert list(latent_pipeline(job, target, None, ()).steps) == names  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_for_a_format_keys_and_values_are_balanced_before_they_are_fitted(form: str) -> None:
    target = dataclasses.replace(latent(), cache_dtype=form)
    assert target.layer_steps(refit=True) == ("balance", "refit", "scale")
    assert dataclasses.replace(target, cache_dtype="bfloat16").layer_steps(refit=True) == ("refit", "scale")


@pytest.mark.parametrize(("form", "fitted_to"), [("int3", "int3"), ("int4", None), ("fp8", None), ("mixed", None)])
def test_queries_are_fitted_to_rounded_latents_of_few_bits_alone(form: str, fitted_to: str | None, monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr(steps, "refitted", lambda before, after, *_: seen.append(after.rounding) or after)
    text = SimpleNamespace(calibration=SimpleNamespace(refit=True))
    job: Any = SimpleNamespace(text=text, shows_attention=True, device=torch.device("cpu"))
    start = dataclasses.replace(factored_record(), rounding=FORMATS[form])
    found = steps.refit(job, record(4, 2, 3, 0, 20), start, 0, measured(inputs(20)))
    assert seen == [FORMATS.get(fitted_to or "")]
    assert found.rounding is FORMATS[form]
