"""The Python API, which the command line calls too: `from convert import gqa, mqa, mla, heal, sweep, plan, inspect, refresh`.

Arguments have the names and defaults of the options. Functions return objects, raise `Refusal` or `Failure`, print nothing
and warn through the logger "kvfold".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from attention.errors import Refusal
from attention.kv_bytes import dtype_bytes
from convert import methods
from convert.arguments import options
from convert.arguments.sizes import parse_budget
from convert.planning.texts import DEFAULT, texts_of
from eval.api import contexts_of, names_of
from eval.arguments import checked
from eval.inputs.source import Source
from eval.inputs.text import text_of

if TYPE_CHECKING:
    from convert.execute.conversion import Conversion, PlannedConversion
    from convert.healing.describe import Healing, PlannedHealing
    from convert.planning.base import Plan, Request
    from convert.planning.describe import Facts
    from convert.sweeping import PlannedSweep, Sweep

_HALF = 0.5  # of the source's cache: a latent of which no size is given


@overload
def gqa(model: str | Path, output: str | Path, **given: Unpack[options.Gqa[Literal[False]]]) -> Conversion: ...
@overload
def gqa(model: str | Path, output: str | Path, **given: Unpack[options.Gqa[Literal[True]]]) -> PlannedConversion: ...
@checked
def gqa(model: str | Path, output: str | Path, **given: Unpack[options.Gqa[bool]]) -> Conversion | PlannedConversion:
    """Convert a checkpoint to grouped-query attention.

    Args:
        model: Directory, GGUF file or Hub id, with an optional `@revision`.
        output: The directory to create.
        **given: The options, in `convert.arguments.options`.

    Raises:
        Refusal: Wrong as seen from the arguments and the config.
        Failure: Weights, text or machine.
        NotPublished: The result is of no use by a check at the end, and neither a method nor `force` was given.
    """
    return _grouped("gqa", model, output, given["groups"], given)


@overload
def mqa(model: str | Path, output: str | Path, **given: Unpack[options.Mqa[Literal[False]]]) -> Conversion: ...
@overload
def mqa(model: str | Path, output: str | Path, **given: Unpack[options.Mqa[Literal[True]]]) -> PlannedConversion: ...
@checked
def mqa(model: str | Path, output: str | Path, **given: Unpack[options.Mqa[bool]]) -> Conversion | PlannedConversion:
    """Convert a checkpoint to multi-query attention: one KV head.

    Args:
        model: Directory, GGUF file or Hub id, with an optional `@revision`.
        output: The directory to create.
        **given: The options, in `convert.arguments.options`.

    Raises:
        Refusal: Wrong as seen from the arguments and the config.
        Failure: Weights, text or machine.
        NotPublished: The result is of no use by a check at the end, and neither a method nor `force` was given.
    """
    return _grouped("mqa", model, output, 1, given)


def _grouped(
    command: str, model: str | Path, output: str | Path, groups: int, given: Mapping[str, Any]
) -> Conversion | PlannedConversion:
    from convert.planning.grouped import plan_grouped

    method, output_class = methods.load_grouped(given["method"] or methods.GROUPED[0]), given["output_class"]
    plan = plan_grouped(_request(model, output, given), command, groups, method, output_class, given["cache_dtype"])
    return _converted(plan, given)


@overload
def mla(model: str | Path, output: str | Path, **given: Unpack[options.Mla[Literal[False]]]) -> Conversion: ...
@overload
def mla(model: str | Path, output: str | Path, **given: Unpack[options.Mla[Literal[True]]]) -> PlannedConversion: ...
@checked
def mla(model: str | Path, output: str | Path, **given: Unpack[options.Mla[bool]]) -> Conversion | PlannedConversion:
    """Convert a checkpoint to multi-head latent attention, or one that kvfold made to a smaller latent.

    Args:
        model: Directory, GGUF file or Hub id, with an optional `@revision`.
        output: The directory to create.
        **given: The options, in `convert.arguments.options`.

    Raises:
        Refusal: Wrong as seen from the arguments and the config.
        Failure: Weights, text or machine.
        NotPublished: The result is of no use by a check at the end, and neither a method nor `force` was given.
    """
    from convert.planning.latent import plan_latent
    from convert.planning.sizes import LatentSize

    request, method = _request(model, output, given), methods.load_latent(given["method"] or methods.LATENT[0])
    rank, rope_dim, budget = given["kv_lora_rank"], given["qk_rope_head_dim"], given["kv_budget"]
    share, size = _budget(_HALF if (rank, rope_dim, budget) == (None, None, None) else budget)
    latent = LatentSize(
        kv_lora_rank=rank,
        qk_rope_head_dim=rope_dim,
        kv_share=share,
        kv_bytes=size,
        freqfold=given["freqfold"],
        pad_rank=given["pad_rank"],
        portable=given["portable"],
        per_layer_ranks=given["per_layer_ranks"],
        cache_dtype=given["cache_dtype"],
    )
    plan = plan_latent(request, latent, method)
    return _converted(plan, given)


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
    from convert.healing.costs import within
    from convert.healing.describe import PlannedHealing
    from convert.healing.plan import HealOptions, plan_heal
    from convert.healing.run import execute
    from convert.healing.texts import TrainingTexts
    from convert.output.destination import Output, check_output

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
        check_output(where.path, model.directory, where.overwrite, where.resume)
    if given["time"] is not None:
        plan = within(plan, float(given["time"]), given["progress"])
    if given["dry_run"]:
        return PlannedHealing(plan, TrainingTexts.read(plan).known.passes(plan.steps, plan.batch))
    evaluate = given["evaluate"]
    return execute(plan, None if evaluate is None else text_of(evaluate), given["progress"])


@overload
def sweep(model: str | Path, output: str | Path, **given: Unpack[options.Sweep[Literal[False]]]) -> Sweep: ...
@overload
def sweep(model: str | Path, output: str | Path, **given: Unpack[options.Sweep[Literal[True]]]) -> PlannedSweep: ...
@checked
def sweep(model: str | Path, output: str | Path, **given: Unpack[options.Sweep[bool]]) -> Sweep | PlannedSweep:
    """Convert a checkpoint to many targets by many methods, and compare them in one report.

    Args:
        model: Directory, GGUF file or Hub id, with an optional `@revision`.
        output: A directory for one subdirectory per result, and `report/`.
        **given: The options, in `convert.arguments.options`.

    Raises:
        Refusal: Wrong as seen from the arguments and the config.
        Failure: Weights, text or machine.
    """
    from convert import sweeping
    from convert.execute.conversion import PlannedConversion
    from convert.planning.sizes import LatentSize
    from eval.quality.settings import EvaluationSettings

    request = replace(_request(model, output, given), accepts_a_copy=True, checks=False)
    latents = None if given["mla"] is None else list(dict.fromkeys(LatentSize(*size) for size in given["mla"]))
    groups = None if given["groups"] is None else list(dict.fromkeys(given["groups"]))
    plans = sweeping.plans_for(request, groups, latents, given["methods"])
    formats = names_of(given["cache_dtype"])
    settings = EvaluationSettings(
        given["protocol"], contexts_of(given["context"]), given["max_tokens"], "auto", given["device"], cache_dtypes=formats
    )
    for form, planned in itertools.product(formats, plans):
        planned.target.spec.bytes_per_token(form)  # refuses sizes that the format does not take
    if given["dry_run"]:
        return sweeping.PlannedSweep([PlannedConversion(plan) for plan in plans])
    done: list[Plan] = []

    def finished(plan: Plan) -> None:
        done.append(plan)
        given["made"](plan)

    found = sweeping.sweep(plans, text_of(given["evaluate"]), settings, given["progress"], finished)
    return sweeping.Sweep(done, found, request.output.path / sweeping.REPORT)


@checked
def plan(model: str | Path, **given: Unpack[options.Plan]) -> Facts:
    """KV memory of each target, and the GPUs that it fits on; reads only the config.

    Args:
        model: Directory, GGUF file or Hub id.
        **given: The options, in `convert.arguments.options`.

    Returns:
        A dict of numbers; `str()` of it is a table for people.

    Raises:
        Refusal: The model cannot be read.
    """
    from convert.hosts.engines import engine_of
    from convert.planning.base import readable, require_stored
    from convert.planning.describe import capacity
    from eval.machine.capacity import GPUS

    source, gpus = Source.parse(str(model), given["trust_remote_code"]), given["gpus"] or GPUS
    readable(source)  # first: its refusals say more than those of `source`
    for name, gigabytes in gpus.items():
        if not 1e-6 <= gigabytes <= 1e9:
            raise Refusal(f"memory of {name} is {gigabytes}; it must be at least 1e-06 and at most 1e+09")
    context = source.longest_context if given["context"] is None else int(given["context"])
    dtype, engine = given["dtype"] or source.dtype, engine_of(given["engine"])
    if engine:
        require_stored(engine, given["cache_dtype"], engine.caches, untried=True)
    return capacity(source, dtype, given["batch"], context, gpus, given["gpu_share"], engine, given["cache_dtype"])


@checked
def inspect(model: str | Path, **given: Unpack[options.Inspect]) -> Facts:
    """A model's attention and what it can be converted to; reads only the config.

    Args:
        model: Directory, GGUF file or Hub id.
        **given: The options, in `convert.arguments.options`.

    Returns:
        A dict of numbers; `str()` of it is a table for people.

    Raises:
        Refusal: The model cannot be read.
    """
    from convert.planning.describe import inspection

    return inspection(Source.parse(str(model), given["trust_remote_code"]))


@checked
def refresh(output: str | Path) -> Facts:
    """Renew the code beside the weights of a result of kvfold's class; nothing else in its directory changes.

    Args:
        output: The directory of the result.

    Returns:
        A dict of the versions of the code, before and now; `str()` of it is a line for people.

    Raises:
        Refusal: There is nothing to renew, or it is newer than this version's.
        Failure: Another run writes to the directory, or the files cannot be replaced, and are as they were.
    """
    from convert.output import refreshing
    from convert.planning.describe import Facts

    found = refreshing.refresh(Path(output))
    renewed = [f"{name} ({f'version {before}' if before else 'no version'})" for name, before in found["renewed"].items()]
    said = f"renewed {' and '.join(renewed)}" if renewed else "there was nothing to renew"
    return Facts(found, f"{said}: the code in {output} is kvfold's, version {found['code_version']}")


def _request(model: str | Path, output: str | Path, given: Mapping[str, Any]) -> Request:
    """What the user asks of a conversion besides its target."""
    from convert.hosts.engines import engine_of
    from convert.output.destination import Output
    from convert.planning.base import Request
    from convert.planning.calibration import CalibrationOptions

    source = Source.parse(str(model), given["trust_remote_code"])
    if given["dtype"] is not None:
        dtype_bytes(given["dtype"])
    engine_of(given["engine"])
    calibration = CalibrationOptions(
        texts=texts_of(given["text"], given["dataset"]),
        tokens=given["calibration_tokens"],
        context=given["calibration_context"],
        refit=given["refit"],
        refine=given["refine"] or 0,
        max_context=given["max_context"],
        no_text=given["no_text"],
        heal=given["heal"],
    )
    where = Output(Path(output), given["dtype"], given["max_shard_size"], given["overwrite"], given["resume"], given["engine"])
    force = given.get("force", False)
    named = force or given.get("method") is not None
    return Request(source, where, calibration, given["device"], given["seed"], named, force)


def _converted(planned: Plan, given: Mapping[str, Any]) -> Conversion | PlannedConversion:
    """The conversion that is planned, carried out unless only the plan is asked for."""
    from convert.converting import convert
    from convert.execute.conversion import PlannedConversion

    if given["dry_run"]:
        return PlannedConversion(planned)
    evaluate = given["evaluate"]
    return convert(planned, None if evaluate is None else text_of(evaluate), given["progress"])


def _budget(given: Any) -> tuple[float | None, int | None]:
    """A budget as (share, bytes), of which one is None, or both."""
    if given is None or isinstance(given, tuple):
        return given or (None, None)
    return parse_budget(f"{100 * given:.12g}%" if isinstance(given, float) else str(given))
