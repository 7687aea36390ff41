"""What is decided for all layers together, and when queries are refitted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import factored as factored_record
from records import inputs, measured, record
from written import Convert, Make, ok, read

from attention.formats import FORMATS
from convert.execute import job as module


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"attn_logit_softcapping": 50.0, "sliding_window": 16}, []),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    ],
    ids=["capped, with windows", "both ways"],
)
def test_a_plan_says_why_queries_are_not_refitted(
    settings: dict[str, Any], fields: list[str], checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fitted = []
    monkeypatch.setattr(module, "refitted", lambda before, after, x, attended: fitted.append(x) or after)
    source = checkpoint("gemma2", num_hidden_layers=2, **settings)
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, *on))
    said = [note for note in read(tmp_path / "out" / "conversion.json")["notes"] if "refitted" in note]
    assert [note.split(": ")[1].removesuffix(" changes what heads attend to") for note in said] == fields
    assert bool(fitted) == (not fields)


@pytest.mark.parametrize(("form", "fitted_to"), [("int3", "int3"), ("int4", None), ("fp8", None), ("mixed", None)])
def test_queries_are_fitted_to_rounded_latents_of_few_bits_alone(form: str, fitted_to: str | None, monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr(module, "refitted", lambda before, after, *_: seen.append(after.rounding) or after)
    monkeypatch.setattr(module, "balanced", lambda after, _: after)
    plan = SimpleNamespace(target=SimpleNamespace(rounding=FORMATS[form]), calibration=SimpleNamespace(refit=True))
    job: Any = SimpleNamespace(plan=plan, shows_attention=True)
    after = module.Job.adapted(job, record(4, 2, 3, 0, 20), factored_record(), measured(inputs(20)))
    assert seen == [FORMATS.get(fitted_to or "")]
    assert after.rounding is FORMATS[form]
