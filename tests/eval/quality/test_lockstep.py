"""The source runs once for any number of models, whatever the room on disk."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCABULARY
from written import Make

from attention.errors import Failure
from eval.inputs.loading import load
from eval.inputs.source import Source
from eval.inputs.text import Text
from eval.quality import evaluation, lockstep
from eval.quality.evaluation import report_of
from eval.quality.lockstep import Job, KeptLogits, portions
from eval.quality.perplexity import Batch, Score
from eval.quality.settings import EvaluationSettings

TEXT = Text("novel.txt", "It was a bright cold day in April, and the clocks were striking thirteen. " * 5)
SHORT = EvaluationSettings(contexts=(32, 16), device="cpu")
SCORED = 370 // 32 * 31 + 370 // 16 * 15  # at both contexts


@pytest.fixture
def models(checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """A source and five others; temporary files are in a directory of their own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    sizes = {"num_hidden_layers": 1}
    paths = [checkpoint(**sizes), *(checkpoint(name=f"m{n}", num_key_value_heads=1 + n % 2, **sizes) for n in range(5))]
    return [Source.parse(str(path)) for path in paths]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many tokens each model reads in blocks."""
    counts: dict[str, int] = {}

    @contextlib.contextmanager
    def counting(source: Source, *how: str) -> Iterator[Any]:
        def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            if not kwargs["use_cache"]:  # otherwise its cache is measured
                counts[source.name] = counts.get(source.name, 0) + kwargs["input_ids"].numel()

        with load(source, *how) as model:
            model.register_forward_pre_hook(count, with_kwargs=True)
            yield model

    monkeypatch.setattr(evaluation, "load", counting)
    return counts


@pytest.mark.parametrize("small", [0, 10**9], ids=["one at a time", "all together"])
def test_five_models_cost_one_pass_of_the_source(
    models: list[Source], read: dict[str, int], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "_SMALL", small)
    report_of(models, TEXT, SHORT)
    assert set(read.values()) == {370 // 32 * 32 + 370 // 16 * 16}
    assert len(read) == 6


def test_a_report_does_not_depend_on_groups_and_spans(
    models: list[Source],
    read: dict[str, int],
    tmp_path: Path,
    warned: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = models[:4]
    whole = report_of(models, TEXT, SHORT)
    once = dict(read)
    monkeypatch.setattr(lockstep, "_SMALL", 0)
    assert report_of(models, TEXT, SHORT) == whole
    monkeypatch.setattr("eval.quality.perplexity._LOGITS_AT_ONCE", 64 * VOCABULARY)  # several batches
    batched = report_of(models, TEXT, SHORT)
    read.clear()
    assert warned() == []
    monkeypatch.setattr(lockstep, "room_for_logits", lambda: 200 * VOCABULARY * 4)  # several portions
    assert report_of(models, TEXT, SHORT) == batched
    assert read == once
    (warning,) = warned()
    assert "has room for the source's logits on a part of the text only" in warning
    assert list((tmp_path / "temporary").iterdir()) == []


def test_spans_hold_all_jobs_in_order_and_no_more_than_fits() -> None:
    jobs = [Job(Batch(torch.zeros(1, length, dtype=torch.long), 1), [Score()]) for length in (5, 3, 9, 2, 2, 2)]
    sizes = [[len(job.batch.targets) for job in portion] for portion in portions(jobs, 10, 6 * 40)]
    assert sizes == [[4, 2], [8], [1, 1, 1]], "a batch that does not fit is a portion of its own"


def test_kept_logits_come_back_as_they_were(tmp_path: Path) -> None:
    kept = KeptLogits(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(3, 7).to(dtype)
        kept.keep(2, logits)
        assert kept.logits(2).dtype == dtype
        assert torch.equal(kept.logits(2), logits)


def test_a_view_takes_no_more_room_than_its_own_values(tmp_path: Path) -> None:
    whole = torch.zeros(1, 1000, 50)
    KeptLogits(tmp_path).keep(0, whole[:, 500:-1].flatten(0, 1))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 0.6 * whole.numel() * 4


def test_a_full_disk_fails_with_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(Failure, match=r"cannot keep the source's logits in .*: .*unexpected pos") as caught:
        KeptLogits(tmp_path).keep(0, torch.zeros(1, 1))
    assert "TMPDIR" in str(caught.value.hint)


def test_progress_counts_every_scored_token(models: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_SMALL", 0)
    seen: dict[str, tuple[int, int]] = {}
    report_of(models[:3], TEXT, SHORT, progress=lambda name, done, total, unit: seen.update({name: (done, total)}))
    assert seen == {"evaluate m0": (SCORED, SCORED), "evaluate m1": (SCORED, SCORED)}
