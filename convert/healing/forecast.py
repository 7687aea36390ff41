"""How long a healing takes: the work of its steps and of what it measures between them, from sizes alone."""

from __future__ import annotations

from convert.healing.memory import trained_numbers
from convert.healing.plan import HealPlan
from eval.machine.forecast import Decoder, Work
from eval.quality.evaluation import evaluation_work

_SAVED = 8  # as long as writing a byte takes, in bytes that are read from memory
_KEPT = 12  # bytes of a state, for each number that trains


def work_of(plan: HealPlan, text_tokens: int, held_out: int, evaluated: int = 0) -> Work:
    """The work of a healing that takes all its steps; it may stop earlier.

    Args:
        plan: The healing.
        text_tokens: Of the text to train on.
        held_out: Of the blocks to judge by.
        evaluated: Of the text to evaluate on; 0 without.
    """
    student, teacher = (Decoder.of(source.config, source.trust_remote_code) for source in (plan.converted, plan.teacher))
    trained, rates = trained_numbers(plan), len(plan.rates(1.0))
    steps = plan.steps + rates * plan.trial_steps
    points = 2 + -(-plan.steps // plan.every) + (rates if rates > 1 else 0)
    measured, cached = points * held_out, plan.options.teacher_cache is not None
    tokens = steps * plan.batch * plan.context
    taught = min(plan.tokens, text_tokens) + held_out if cached else tokens + measured
    work = student.load() + teacher.load() + teacher.forward(taught, plan.context)
    work += student.distilled(tokens, plan.context, trained, steps)
    work += student.forward(measured, plan.context) + student.compared(measured)
    work += student.forward(tokens, plan.context, logits=0) if plan.options.checkpointing else Work()
    work += Work(bytes=_SAVED * _KEPT * trained * -(-plan.steps // plan.every))
    if evaluated:
        models = [teacher, student, student] * (1 if plan.rounding is None else 2)  # also with their caches in the format
        work += evaluation_work(models, plan.converted, evaluated, (plan.context,))
    return work
