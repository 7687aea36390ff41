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
from attention.record import Attention
from attention.spec import AttentionSpec
from convert.execute import steps


def heads() -> Attention:
    """Two pairs of equal KV heads."""
    few = record(2, 2, 3, 0, 20)
    names = ("k", "v", "k_bias", "v_bias")
    whole = dataclasses.replace(few, **{name: getattr(few, name)[[0, 0, 1, 1]] for name in names})
    return dataclasses.replace(whole, **{name: getattr(record(4, 2, 3, 0, 20), name) for name in ("q", "o", "q_bias")})


def job_of(target: Any) -> Any:
    """A conversion without text."""
    return SimpleNamespace(text=None, shows_attention=False, device=torch.device("cpu"), plan=SimpleNamespace(target=target))


def test_a_change_merges_heads_that_are_next_to_each_other() -> None:
    before, target = heads(), grouped()
    after = steps.grouped(job_of(target), target, before, measured(inputs(20)))
    assert after.num_kv_heads == 2
    assert loss(before, after) < 1e-6


def test_a_change_factors_a_layer() -> None:
    before, target = record(4, 2, 3, 0, 20), latent(AttentionSpec(1, 8, 4, 6), 21, 24, 20)
    assert before.rotary is not None
    chosen = target.allocation(before.rotary).keeping((0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2), False)
    after = steps.latent(job_of(target), target, chosen, before, 0, measured(inputs(20)))
    assert after.down.shape == (20, 20)
    assert loss(before, after) < 1e-5


@pytest.mark.parametrize(("rope", "nope"), [(6, 5), (4, 11)])
def test_a_change_of_a_latent_has_the_dims_that_the_config_says(rope: int, nope: int) -> None:
    a = factored_record(4, 5, 3, 9, 20, value=7)
    before = AttentionSpec(1, 4, 4, 7, 10, 6, 5)
    target = latent(before, 10, rope, 9)
    chosen = target.allocation(a.rotary).keeping(tuple(range(rope // 2)), False)
    after = steps.latent(job_of(target), target, chosen, a.expanded(), 0, measured(inputs(20)))
    assert target.spec.qk_nope_head_dim == nope
    assert after.q_nope.shape == (4, nope, 20)
    assert after.up_k.shape == (4, nope, 9)
    assert after.up_v.shape == (4, 7, 9)
    assert after.k_rope.shape == (rope, 20)


@pytest.mark.parametrize(("form", "fitted_to"), [("int3", "int3"), ("int4", None), ("fp8", None), ("mixed", None)])
def test_queries_are_fitted_to_rounded_latents_of_few_bits_alone(form: str, fitted_to: str | None, monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr(steps, "refitted", lambda before, after, *_: seen.append(after.rounding) or after)
    text = SimpleNamespace(calibration=SimpleNamespace(refit=True))
    job: Any = SimpleNamespace(text=text, shows_attention=True, device=torch.device("cpu"))
    start = dataclasses.replace(factored_record(), rounding=FORMATS[form])
    after = steps.refit(job, record(4, 2, 3, 0, 20), start, measured(inputs(20)))
    assert seen == [FORMATS.get(fitted_to or "")]
    assert after.rounding is FORMATS[form]
