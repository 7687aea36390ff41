"""`sweep`: many conversions of one source, compared in one report."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack, overload

from convert import sweeping
from convert.api.conversions import request_of
from convert.arguments import options
from convert.execute.describe import PlannedConversion
from convert.planning.sizes import LatentSize
from convert.planning.sweep import REPORT, plans_for
from convert.sweeping import PlannedSweep, Sweep
from eval.api import contexts_of, names_of
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
    latents = None if given["mla"] is None else list(dict.fromkeys(LatentSize(*size) for size in given["mla"]))
    groups = None if given["groups"] is None else list(dict.fromkeys(given["groups"]))
    plans = plans_for(request, groups, latents, given["methods"])
    formats = names_of(given["cache_dtype"])
    settings = EvaluationSettings(
        given["protocol"], contexts_of(given["context"]), given["max_tokens"], "auto", given["device"], cache_dtypes=formats
    )
    for form, planned in itertools.product(formats, plans):
        planned.target.spec.bytes_per_token(form)  # refuses sizes that the format does not take
    if given["dry_run"]:
        return PlannedSweep([PlannedConversion(plan) for plan in plans])
    report = sweeping.sweep(plans, text_of(given["evaluate"]), settings, given["progress"], given["made"])
    return Sweep(plans, report, request.output.path / REPORT)
