"""The steps behind the method of a layer. What they compute, tests of whole layers and of each fit hold."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from records import factored as factored_record
from records import inputs, measured, record

from attention.formats import FORMATS
from convert.execute import steps


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
