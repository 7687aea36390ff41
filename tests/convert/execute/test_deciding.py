"""What is decided for all layers together, and when queries are refitted."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from records import factored as factored_record
from records import inputs, measured, record
from written import Convert, Make, ok, read

from attention.formats import FORMATS
from convert import mla
from convert.execute import deciding
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
    after = module.Job.adapted(job, record(4, 2, 3, 0, 20), factored_record().paired("interleaved"), 0, measured(inputs(20)))
    assert seen == [FORMATS.get(fitted_to or "")]
    assert (after.rounding, after.rotary.pairing) == (FORMATS[form], "half"), "classes of pairs are those of the cache"


def test_frequencies_are_tried_on_all_layers(checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What outputs lose falls with the frequencies that rotate, to nothing with all; what the trial chooses stays."""
    tried = []

    def trial(losses: list[torch.Tensor], count: int, errors: Callable[[list[list[int]]], list[float]]) -> tuple[int, ...]:
        tried.append((len(losses), count, errors([[], [0], [0, 0], 4 * [0, 1, 2, 3]])))
        return (1, 3)

    monkeypatch.setattr(deciding, "pairs_by_trial", trial)
    given: dict[str, Any] = {"kv_lora_rank": 24, "qk_rope_head_dim": 4, "text": ["ab" * 300, "d e f" * 100], "heal": 0}
    done = mla(checkpoint("qwen2"), tmp_path / "out", **given, force=True)
    ((layers, count, (none, one, two, every)),) = tried
    assert (layers, count) == (3, 2)
    assert none > one > two > 1e3 * every
    assert done.provenance["rotary_frequencies"] == [1, 3]
    mla(checkpoint(), tmp_path / "ladder", **given, portable=True, force=True)
    assert len(tried) == 1, "a ladder is chosen as a whole"
