"""`heal`: the distillation of a source into a converted checkpoint."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from attention.errors import Refusal
from convert.arguments import options
from convert.healing.describe import Healing, PlannedHealing
from convert.healing.plan import HealOptions, plan_heal
from convert.healing.run import execute, within
from convert.healing.texts import TrainingTexts
from convert.output.destination import Output, check_output
from convert.planning.texts import DEFAULT, texts_of
from eval.arguments import checked
from eval.inputs.source import Source
from eval.inputs.text import text_of


@overload
def heal(converted: str | Path, output: str | Path, **given: Unpack[options.Heal[Literal[False]]]) -> Healing: ...
@overload
def heal(converted: str | Path, output: str | Path, **given: Unpack[options.Heal[Literal[True]]]) -> PlannedHealing: ...
@checked
def heal(converted: str | Path, output: str | Path, **given: Unpack[options.Heal[bool]]) -> Healing | PlannedHealing:
    """Distil the source into a converted checkpoint, end to end.

    Args:
        converted: The checkpoint to heal: a directory or a Hub id.
        output: The directory to create.
        **given: The options, in `convert.arguments.options`.

    Raises:
        Refusal: Wrong as seen from the arguments and the configs.
        Failure: Weights, text or machine.
    """
    if given["time"] is not None and given["tokens"] is not None:
        raise Refusal("tokens and time contradict each other", hint="give one of them")
    trusted, named = given["trust_remote_code"], given["teacher"]
    source, teacher = Source.parse(str(converted), trusted), None if named is None else Source.parse(str(named), trusted)
    options_given: Mapping[str, Any] = given
    same = {field.name: options_given[field.name] for field in fields(HealOptions) if field.name in given}
    wanted = HealOptions(texts_of(given["text"], given["dataset"]) or DEFAULT, **same)
    where = Output(Path(output), overwrite=given["overwrite"], resume=given["resume"])
    plan = plan_heal(source, teacher, wanted, where, given["device"], given["seed"])
    for model in (plan.converted, plan.teacher):
        check_output(where, model.directory)
    if given["time"] is not None:
        plan = within(plan, float(given["time"]), given["progress"])
    if given["dry_run"]:
        return PlannedHealing(plan, TrainingTexts.read(plan).whole().passes(plan.steps, plan.batch))
    evaluate = given["evaluate"]
    return execute(plan, None if evaluate is None else text_of(evaluate), given["progress"])
