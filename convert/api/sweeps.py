"""`sweep`: many conversions of one source, compared in one report."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from convert import sweeping
from convert.api.conversions import request_of
from convert.arguments import options
from convert.execute.describe import PlannedConversion
from convert.planning.sizes import LatentSize
from convert.planning.sweep import REPORT, plans_for
from convert.sweeping import PlannedSweep, Sweep
from eval.arguments import checked
from eval.inputs.text import text_of
from eval.quality.settings import EvaluationSettings


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
    request = replace(request_of(model, output, given), accepts_a_copy=True, checks=False)
    latents = None if given["mla"] is None else [LatentSize(*size) for size in given["mla"]]
    plans = plans_for(request, given["groups"], latents, given["methods"])
    formats = tuple(given["cache_dtype"])
    contexts: Any = given["context"] or ()
    settings = EvaluationSettings(
        given["protocol"], tuple(map(int, contexts)), given["max_tokens"], "auto", given["device"], cache_dtypes=formats
    )
    for form, planned in itertools.product(formats, plans):
        planned.target.spec.bytes_per_token(form)  # refuses sizes that the format does not take
    if given["dry_run"]:
        return PlannedSweep([PlannedConversion(plan) for plan in plans])
    report = sweeping.sweep(plans, text_of(given["evaluate"]), settings, given["progress"])
    return Sweep(plans, report, request.output.path / REPORT)
