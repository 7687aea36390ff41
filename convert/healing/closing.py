"""The healing that ends a conversion: the result is distilled on its calibration texts before it is published."""

import logging
from dataclasses import replace
from typing import Any

from attention.errors import Failure, KvfoldError, Refusal
from convert.healing.describe import course_of
from convert.healing.plan import HealOptions, plan_heal
from convert.healing.team import place
from convert.healing.texts import TrainingText
from convert.healing.weights import write_files
from convert.output.writing import Work
from convert.planning.base import Plan
from convert.planning.calibration import LEAST_BLOCKS
from eval.inputs.reader import Reader
from eval.inputs.text import Tokens
from eval.machine.device import memory_for
from eval.quality.opened import Opened
from eval.terminal.progress import Progress

_log = logging.getLogger("kvfold")
_POINTS = 4  # of the curve: so few that it never stops early, by the few blocks that are held out
_TOKENS, _WRITING, _COURSE = "heal-tokens", "heal-writing", "healed"  # what a work directory remembers of a healing


def heal_result(plan: Plan, work: Work, text: Tokens, progress: Progress, opened: Opened) -> dict[str, Any] | None:
    """Distil the source into the checkpoint of a work directory.

    A resumed run goes on from the Trainer's last checkpoint. Files are replaced one by one after the last step; if that is
    interrupted, or a file is damaged later, the conversion writes it again, and the last checkpoint replaces all.

    Args:
        plan: The conversion that made the checkpoint, with a calibration.
        work: Its work directory.
        text: The text to heal on, from `CalibrationText.to_heal_on`.
        progress: Called with the progress of each stage.
        opened: Loads the models. The result in it has the healed weights then.

    Returns:
        The entry `healing` of conversion.json with the names of the tensors that changed; None if nothing was healed.

    Raises:
        Refusal: The work was begun with another number of tokens.
        Failure: It does not train. The work stays, and `--heal 0` publishes what was converted.
    """
    assert plan.calibration is not None
    tokens, context, begun = plan.calibration.heal, plan.calibration.heal_context, work.recall(_TOKENS)
    if begun not in (None, tokens) and (tokens or work.recall(_WRITING)):
        raise Refusal(
            f"the healing of {plan.output.path} was begun with {begun} tokens, not {tokens}",
            hint=f"repeat the command with --heal {begun} --resume, or begin again with --overwrite",
        )
    if not tokens:
        return None
    if course := work.recall(_COURSE):
        return dict(course)
    text = _blocks(text, plan.calibration.context, context)
    if (count := len(text.ids) // context) < LEAST_BLOCKS:
        _log.warning(
            "the result is not healed: the text has %d blocks of %d tokens, and %d or more are needed",
            count, context, LEAST_BLOCKS,
        )  # fmt: skip
        return None
    work.remember(_TOKENS, tokens)
    options = HealOptions((), tokens, context, cache_dtype=plan.cache_dtype, points=_POINTS)
    hint = "the same command with --resume and --heal 0 publishes it as it is"
    with memory_for("the healing of the result", hint):
        try:
            return _trained(plan, work, options, text, progress, opened)
        except KvfoldError as error:
            raise Failure(f"the conversion is done, its healing failed: {error}", hint=hint) from error


def _blocks(text: Tokens, context: int, part: int) -> Tokens:
    """A text of whole blocks, cut into parts of one length; what is left of each block is dropped."""
    return replace(text, ids=text.blocks(context)[:, : context // part * part].flatten())


def _trained(
    plan: Plan, work: Work, options: HealOptions, tokens: Tokens, progress: Progress, opened: Opened
) -> dict[str, Any]:
    from convert.healing.loop import train  # transformers' Trainer takes a second to import

    result = plan.source.beside(work.path, "the result")
    healing = plan_heal(result, plan.source, options, plan.output, str(plan.runs_on), plan.seed)
    batch = min(healing.batch, len(tokens.ids) // healing.context // LEAST_BLOCKS)
    healing = replace(healing, options=replace(options, batch_tokens=batch * healing.context))
    text, reader = TrainingText.of(healing, [tokens]), Reader(work.path)
    if not any(work.training.iterdir()):
        work.require_space(healing.disk)
    outcome = train(healing, text, reader, work.training, progress, opened)
    files: dict[str, str] = {}
    if outcome.weights:
        work.remember(_WRITING, True)
        for file, hash_ in write_files(work.path, reader, outcome.weights, progress):
            work.remember(file, work.recall(file), {file: hash_})
            files[file] = hash_
        with opened(result, "float32", place(healing)) as student:
            student.requires_grad_(False).zero_grad()  # it has the weights that were written
    else:
        opened.forget(result)  # its weights are those of a later step
    course = {**course_of(healing, text, outcome), "tensors": sorted(outcome.weights)}
    work.remember(_COURSE, course, files)
    return course
