"""`gqa`, `mqa` and `mla`: a request from options, its plan, and the conversion."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from attention.spec import dtype_bytes
from convert import methods
from convert.arguments import options
from convert.arguments.sizes import parse_budget
from convert.converting import convert
from convert.execute.describe import Conversion, PlannedConversion
from convert.hosts.engines import engine_of
from convert.output.destination import Output
from convert.planning.base import Request
from convert.planning.calibration import CalibrationOptions
from convert.planning.plans import plan_grouped, plan_latent
from convert.planning.sizes import LatentSize
from convert.planning.texts import texts_of
from eval.arguments import checked
from eval.inputs.source import Source
from eval.machine.device import compute_device

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
    return _grouped(model, output, "gqa", given["groups"], given)


@overload
def mqa(model: str | Path, output: str | Path, **given: Unpack[options.Mqa[Literal[False]]]) -> Conversion: ...
@overload
def mqa(model: str | Path, output: str | Path, **given: Unpack[options.Mqa[Literal[True]]]) -> PlannedConversion: ...
@checked
def mqa(model: str | Path, output: str | Path, **given: Unpack[options.Mqa[bool]]) -> Conversion | PlannedConversion:
    """Convert a checkpoint to multi-query attention: one KV head. Raises what `gqa` does.

    Args:
        model: As of `gqa`.
        output: As of `gqa`.
        **given: The options, in `convert.arguments.options`.
    """
    return _grouped(model, output, "mqa", 1, given)


@overload
def mla(model: str | Path, output: str | Path, **given: Unpack[options.Mla[Literal[False]]]) -> Conversion: ...
@overload
def mla(model: str | Path, output: str | Path, **given: Unpack[options.Mla[Literal[True]]]) -> PlannedConversion: ...
@checked
def mla(model: str | Path, output: str | Path, **given: Unpack[options.Mla[bool]]) -> Conversion | PlannedConversion:
    """Convert a checkpoint to multi-head latent attention. Raises what `gqa` does.

    Args:
        model: As of `gqa`.
        output: As of `gqa`.
        **given: The options, in `convert.arguments.options`.
    """
    request, method = request_of(model, output, given), methods.load_latent(given["method"] or methods.LATENT[0])
    rank, rope_dim, budget = given["kv_lora_rank"], given["qk_rope_head_dim"], given["kv_budget"]
    if (rank, rope_dim, budget) == (None, None, None):
        budget = _HALF
    if budget is not None:  # numbers are checked as strings are
        budget = parse_budget(f"{100 * budget:.12g}%" if isinstance(budget, float) else str(budget))
    options_given: Mapping[str, Any] = given
    same = {field.name: options_given[field.name] for field in fields(LatentSize) if field.name in given}
    latent = LatentSize(budget=budget, **same)
    plan = plan_latent(request, latent, method)
    return PlannedConversion(plan) if given["dry_run"] else convert(plan, given["evaluate"], given["progress"])


def _grouped(
    model: str | Path, output: str | Path, command: str, groups: int, given: Mapping[str, Any]
) -> Conversion | PlannedConversion:
    method, output_class = methods.load_grouped(given["method"] or methods.GROUPED[0]), given["output_class"]
    request = request_of(model, output, given)
    plan = plan_grouped(request, command, groups, method, output_class, given["cache_dtype"])
    return PlannedConversion(plan) if given["dry_run"] else convert(plan, given["evaluate"], given["progress"])


def request_of(model: str | Path, output: str | Path, given: Mapping[str, Any]) -> Request:
    """What the user asks of a conversion besides its target."""
    compute_device(given["device"])
    source = Source.parse(str(model), given["trust_remote_code"])
    if given["dtype"] is not None:
        dtype_bytes(given["dtype"])
    engine_of(given["engine"])
    calibration = CalibrationOptions(
        texts=texts_of(given["text"], given["dataset"]),
        tokens=given["calibration_tokens"],
        context=given["calibration_context"],
        refit=given["refit"],
        max_context=given["max_context"],
        no_text=given["no_text"],
        heal=given["heal"],
    )
    where = Output(Path(output), given["dtype"], given["max_shard_size"], given["overwrite"], given["resume"], given["engine"])
    force = given.get("force", False)
    named = force or given.get("method") is not None
    return Request(
        source,
        where,
        calibration,
        keep_layers=tuple(given["keep_layers"] or ()),
        all_layers=given["all_layers"],
        device=given["device"],
        seed=given["seed"],
        accepts_any_loss=named,
        accepts_a_copy=force,
    )
