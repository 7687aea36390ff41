"""The text that a source writes, and the check at the end: what a result loses on that and on what nothing was fitted to."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attention.encoded_forward import store_encoded
from attention.errors import KvfoldError, NotPublished
from attention.patch import pad_values
from convert.calibration.own_text import own_text
from convert.calibration.stream import positioned
from convert.methods.text import Method, TextUse
from convert.planning.base import Plan, lacks_room
from convert.planning.calibration import Calibration
from eval.inputs.loading import load
from eval.inputs.text import Tokens
from eval.machine.device import input_device, memory_for
from eval.quality.opened import Opened, Opening
from eval.quality.perplexity import Batch, Score, batches, logits_of
from eval.report.quality import LARGE, meaning
from eval.terminal.progress import Progress, stage

_log = logging.getLogger("kvfold")
OWN_ROWS, OWN_LENGTH = 8, 128  # that the source writes for it
_CHECK, _HEALING = 1, 3  # added to the seed for the text of the check, and to heal on; `convert heal` adds 2
_WARN, _WORST = LARGE, 5.0  # nats: beyond the second a result is of no use
_CONTEXT = 512  # tokens of a row


class Sample(NamedTuple):
    """Text to check on.

    Attributes:
        text: Its name.
        ids: `[n, T]`.
        first: The first token of each row that is scored.
        positions: `[T]`, which may skip; None for those from 0 on.
    """

    text: str
    ids: torch.Tensor
    first: int = 1
    positions: torch.Tensor | None = None

    @classmethod
    def of(cls, tokens: Tokens, context: int) -> Sample:
        """Blocks of a text, cut so that their logits do not fill a memory; nothing is read over the end of a block."""
        return cls(tokens.name, tokens.blocks(context)[:, :_CONTEXT])

    @classmethod
    def far(cls, rows: torch.Tensor, limit: int) -> list[Sample]:
        """Make samples of far positions from short rows `[n, T]`: copies at a quarter of the limit, and the last quarter.

        Positions skip. The rows' own tokens in random order are copied, and all rows lie between: many tokens are harder to
        look over than many positions.
        """
        text = rows.flatten()
        if limit < 2 * len(text):
            return []  # where rows show enough
        order = torch.randperm(len(text), generator=torch.Generator().manual_seed(0))
        run, near, late = text[order][: len(text) // 4], torch.arange(rows.shape[1]), limit * 3 // 4
        copies, size = torch.cat((run, text, run)), len(run) + len(text)
        apart, places = max(limit // 4, size), torch.arange(len(copies))
        return [
            cls(
                f"copies {apart:,} tokens later (positions skip)",
                copies[None],
                size + 1,
                places + (places >= size) * (apart - size),
            ),
            cls(f"the source's own text from position {late:,} on (positions skip)", rows, 1, near + (near > 0) * late),
        ]


def checked(
    plan: Plan, result: Path, given: Sequence[Sample], kept: Path, progress: Progress, opened: Opened
) -> dict[str, Any] | None:
    """Compare a result with its source.

    Args:
        plan: Of the conversion.
        result: The directory of its checkpoint.
        given: Of the texts that the user gave, blocks that were not fitted.
        kept: A directory for what the source writes.
        progress: Called with the blocks that are done.
        opened: Loads the models.

    Returns:
        For the provenance: `{"texts": [{"text", "tokens", "source_nats", "loss_nats"}]}`; None if the models do not fit in
        memory, or if the source does not run.

    Raises:
        NotPublished: The result is of no use, and the user has not asked for it.
        Failure: The result does not run, or gives logits that are not finite.
    """
    source, vocabulary = plan.source, plan.source.vocabulary
    if not opened.holds(source) and (missing := lacks_room(source.config, plan.runs_on)):
        _log.warning("the result was not compared with its source: %s", missing)
        return None
    samples, limit = list(given), plan.calibration and plan.calibration.skips_to
    try:
        own = own_sample(plan, kept, progress)
        samples = [Sample("the source's own text", own), *samples, *Sample.far(own, limit or 0)]
    except KvfoldError as error:  # which says nothing of the result
        _log.warning("the result was not checked on text of its source, which does not write: %s", error)
    if not samples:
        return None
    converted, where = source.beside(result, "the result"), str(plan.runs_on)
    form = plan.cache_dtype if plan.target.rounding else None
    total = 2 * sum(len(sample.ids) for sample in samples)
    with stage(progress, "check", total, "block") as done, memory_for("the check of the result", "give --device cpu"):
        with opened(source, "auto", where) as model:
            before = _losses(model, samples, vocabulary, done)
        with opened(converted, "auto", where) if form is None else load(converted, "auto", where) as model:
            after = _losses(model, samples, vocabulary, done, form)
    found: list[dict[str, Any]] = [
        {"text": sample.text, "tokens": sample.ids[:, sample.first - 1 :].numel(), "source_nats": one, "loss_nats": other - one}
        | ({} if sample.first == 1 else {"copies": True})
        for sample, one, other in zip(samples, before, after, strict=True)
    ]
    _judge(found, vocabulary, plan.accepts_any_loss, _next_step(plan.target.method, plan.calibration))
    return {"texts": found}


def written(plan: Plan, kept: Path, progress: Progress) -> torch.Tensor | None:
    """The text that the model writes to be calibrated and healed on, `[rows, context]`; None if it writes nothing."""
    if plan.calibration is None or not (rows := plan.calibration.rows_to_write):
        return None
    with Opened() as opened:
        length, how = plan.calibration.context, (plan.runs_on, kept, progress)
        ids = own_text(plan.source, rows, length, plan.seed, *how, opening=opened)
        if others := plan.calibration.blocks_to_heal_on:  # apart, so that the first rows are the same without a healing
            more = own_text(plan.source, others, length, plan.seed + _HEALING, *how, opening=opened)
            ids = torch.cat((ids, more))
        if plan.checks:  # while the model is loaded; if it writes nothing of use, the check says so
            with contextlib.suppress(KvfoldError):
                own_sample(plan, kept, progress, opened)
    return ids


def own_sample(plan: Plan, kept: Path, progress: Progress, opening: Opening = load) -> torch.Tensor:
    """The source's own text, `[n, T]`, from `kept` if it has been written before. Errors as of `own_text`."""
    length = min(OWN_LENGTH, plan.source.max_positions or OWN_LENGTH)
    return own_text(plan.source, OWN_ROWS, length, plan.seed + _CHECK, plan.runs_on, kept, progress, opening=opening)


@torch.inference_mode()
def _losses(
    model: Any, samples: Sequence[Sample], vocabulary: int, done: Callable[[int], None], form: str | None = None
) -> list[float]:
    """Mean nats per token of a model on each text, with its cache in a format, or without one."""
    pad_values(model)  # as a healing leaves it: a resumed run measures the same
    if form is not None:
        store_encoded(model, form)
    losses = []
    for sample in samples:
        score = Score()
        for batch in batches([Batch(sample.ids, sample.first)], vocabulary):
            places = None if sample.positions is None else sample.positions.expand_as(batch.ids).to(input_device(model))
            score.add(batch, logits_of(model, batch, **positioned(places)))
            done(len(batch.ids))
        losses.append(score.loss)
    return losses


def _judge(found: Sequence[dict[str, Any]], vocabulary: int, accepts_any: bool, hint: str) -> None:
    """Warn of a large loss, and keep a ruined model back where nobody has asked for it."""
    for one in sorted(found, key=lambda one: -float(one["loss_nats"])):
        loss = one["loss_nats"]
        if not loss > _WARN:
            return
        worse = loss + one["source_nats"] > math.log(vocabulary) >= one["source_nats"]
        said = f"on {one['tokens']} tokens of {one['text']}, the result loses {loss:.2f} nats per token over its source"
        if one.get("copies"):  # which text hardly shows
            _log.warning("%s: it copies worse from so far; %s", said, hint)
            continue
        said += f" ({meaning(loss)})"
        said += ", and is worse than an even guess" if worse else ""
        if (loss > _WORST or worse) and not accepts_any:
            raise NotPublished(
                f"{said}: it is of no use, and was not published",
                hint=f"{hint}; or publish it all the same with --resume --force",
            )
        _log.warning("%s: %s", said, hint)


def _next_step(method: Method, calibration: Calibration | None) -> str:
    if method.text is TextUse.IGNORED:
        return "leave out --method: the default one loses less"
    if calibration is None:
        return "leave out --no-text, or give --text FILE"
    if not any(text.own for text in calibration.texts):
        return "add a text of that kind: --text self, or another --text FILE"
    return "keep more of the cache, or heal the result with `convert heal`"
