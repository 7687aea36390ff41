"""Converts one source to many targets by many methods, with one survey (two with QK-norm), one evaluation and one report."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from attention.errors import Refusal
from convert import methods
from convert.converting import convert
from convert.execute.conversion import PlannedConversion
from convert.launch import require_alone
from convert.methods.grouped import GroupedMethod
from convert.methods.latent import LatentMethod
from convert.methods.text import Method, TextUse
from convert.output.destination import Output, check_output
from convert.output.lock import exclusive
from convert.output.writing import explained, watched
from convert.planning.base import Plan, convertible
from convert.planning.calibration import CalibrationOptions, GivenTexts, require_consistent
from convert.planning.describe import plans_text
from convert.planning.grouped import plan_grouped
from convert.planning.latent import plan_latent
from convert.planning.sizes import LatentRequest
from eval.inputs.overlap import warn_of_overlap
from eval.inputs.source import Source
from eval.inputs.text import Text
from eval.machine.device import require_device
from eval.quality.evaluation import prepare, report_of
from eval.quality.settings import EvaluationSettings
from eval.report import quality as report
from eval.terminal.progress import Progress, silent

_log = logging.getLogger("kvfold")
_SHARES = (0.25, 0.125)  # of the source's cache, if no latent is given
REPORT, _SURVEY = "report", "survey"  # in DIR


@dataclass(frozen=True)
class Sweep:
    """Several conversions of one source.

    Attributes:
        plans: The plan of each result, with the choices made on the way.
        report: The evaluation of the source and all results.
        report_directory: The directory of report.json, report.md and report.html.
    """

    plans: list[Plan]
    report: dict[str, Any]
    report_directory: Path

    def as_dict(self) -> dict[str, Any]:
        """The report."""
        return self.report

    def __str__(self) -> str:
        return report.to_markdown(self.report)


@dataclass(frozen=True)
class PlannedSweep:
    """A sweep that a dry run has planned.

    Attributes:
        conversions: Each result.
    """

    conversions: list[PlannedConversion]

    @property
    def plans(self) -> list[Plan]:
        """The plan of each result."""
        return [one.plan for one in self.conversions]

    def as_dict(self) -> list[dict[str, Any]]:
        """The conversions."""
        return [one.as_dict() for one in self.conversions]

    def __str__(self) -> str:
        return plans_text(self.plans)


@dataclass(frozen=True)
class Wanted:
    """The results that a sweep should make.

    Attributes:
        groups: KV heads of GQA; if None and `latents` is None too, halves of the source's.
        latents: Sizes of MLA; if None and `groups` is None too, shares of the source's cache.
        methods: Names; None for all that can run, without the control.
        calibration: Text for methods that use it; at least one must. Steps beyond a method (`--refine`, …) apply to our own
            methods only.
        output: DIR, and how to write it.
        device: As on the command line.
        seed: As on the command line.
    """

    groups: tuple[int, ...] | None
    latents: tuple[LatentRequest, ...] | None
    methods: tuple[str, ...] | None
    calibration: CalibrationOptions
    output: Output
    device: str = "auto"
    seed: int = 0


def plans_for(source: Source, wanted: Wanted) -> list[Plan]:
    """One plan per target and method, in the order of the report.

    Raises:
        Refusal: Something that the user named cannot be done. Defaults that do not fit the source are
            left out.
    """
    require_device(wanted.device)
    require_consistent(source, wanted.calibration)
    candidates = _all(source, wanted)
    counts = Counter(candidate.name for candidate in candidates)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise Refusal(f"two targets would both be named {twice[0]}", hint="leave one of them out")
    _require_use(wanted.calibration, [candidate.method for candidate in candidates])
    if idle := sorted(set(wanted.methods or ()) - {candidate.method.name for candidate in candidates}):
        raise Refusal(
            f"{' and '.join(idle)} of --methods can make none of the targets",
            hint=f"for --groups there are {', '.join(methods.GROUPED)}, for --mla {', '.join(methods.LATENT)}",
        )
    plans: list[Plan] = []
    named = any(given is not None for given in (wanted.latents, wanted.groups, wanted.methods))
    for name, _, plan in candidates:
        output = replace(wanted.output, path=wanted.output.path / name)
        check_output(output.path, source.directory, output.overwrite, output.resume)
        try:
            plans.append(replace(plan(output), accepts_any_loss=True))  # baselines lose much, and that is what is measured
        except Refusal as refusal:
            if named:
                raise
            _log.warning("%s is left out: %s", name, refusal)
    if not plans:
        raise Refusal(f"there is nothing to convert {source.reference} to", hint="see `convert inspect`")
    there = wanted.output.path / REPORT
    if there.exists() and not (wanted.output.overwrite or wanted.output.resume):
        raise Refusal(f"{there} exists: an earlier sweep's report", hint="choose another DIR, or replace it with --overwrite")
    return plans


def sweep(
    plans: Sequence[Plan],
    evaluate_on: Text,
    settings: EvaluationSettings,
    progress: Progress = silent,
    made: Callable[[Plan], object] = lambda plan: None,
) -> dict[str, Any]:
    """Carry out every plan, evaluate the results beside their source, and write the report.

    Args:
        plans: From `plans_for`. With `--resume`, results that are finished stay.
        evaluate_on: Held-out text.
        settings: How to evaluate.
        progress: Called with the progress of each stage.
        made: Called with each plan, as carried out, when its result is complete.

    Returns:
        The report that is written to DIR/report.

    Raises:
        KvfoldError: Finished results stay, for a resumed sweep.
    """
    require_alone("a sweep")
    directory, source = plans[0].output.path.parent, plans[0].source
    _, held_out = prepare([source], evaluate_on, settings)  # errors in a text should come before the work
    calibration = next((plan.calibration for plan in plans if plan.calibration), None)
    if calibration:
        warn_of_overlap(held_out, GivenTexts.read(source, calibration).whole, "calibration")
    with exclusive(directory), explained("sweep", directory):
        require_unchanged = watched([source])
        directory.mkdir(parents=True, exist_ok=True)
        for plan in plans:
            require_unchanged()
            made(convert(plan, None, progress, directory / _SURVEY).plan)
        results = [source.beside(plan.output.path) for plan in plans]
        found = report_of([source, *results], evaluate_on, settings, progress=progress)
        require_unchanged()
        report.write(found, directory / REPORT)
        for kept in (directory / _SURVEY).glob("[0-9a-f]" * 16):  # as conversions name them: anything else is the user's
            shutil.rmtree(kept, ignore_errors=True)
        with contextlib.suppress(OSError):
            (directory / _SURVEY).rmdir()
        return found


class _Candidate(NamedTuple):
    """A possible result of a sweep.

    Attributes:
        name: The name of its directory.
        method: The method that makes it.
        plan: Maps an output to its plan.
    """

    name: str
    method: Method
    plan: Callable[[Output], Plan]


def _all(source: Source, wanted: Wanted) -> list[_Candidate]:
    heads = convertible(source).spec.num_kv_heads
    everything = wanted.groups is None and wanted.latents is None
    groups = [heads >> i for i in range(1, heads.bit_length()) if heads % (1 << i) == 0] if everything else wanted.groups
    latents = [LatentRequest(kv_share=share) for share in _SHARES] if everything else wanted.latents
    return [
        *(
            _Candidate(f"gqa-{n}-{m.name}", m, _grouped(source, wanted, n, m))
            for n in groups or ()
            for m in map(methods.load_grouped, _chosen(methods.GROUPED, wanted))
        ),
        *(
            _Candidate(f"mla-{_size_name(size)}-{m.name}", m, _latent(source, wanted, size, m))
            for size in latents or ()
            for m in map(methods.load_latent, _chosen(methods.LATENT, wanted))
            if m.text is not TextUse.NEEDED or not wanted.calibration.no_text or wanted.methods
        ),
    ]


def _require_use(wanted: CalibrationOptions, made_by: Iterable[Method]) -> None:
    """Refuse text that no method of the sweep uses, and steps that none takes."""
    uses = {method.text for method in made_by}
    steps = wanted.steps.flags
    for idle, enough in ((wanted.flags, TextUse.USED in uses or TextUse.NEEDED in uses), (steps, TextUse.USED in uses)):
        if idle and uses and not enough:
            raise Refusal(
                f"no method of this sweep has any use for {idle}",
                hint=f"leave it out, or add {' or '.join(_ours())} to --methods",
            )


def _ours() -> list[str]:
    """Our own methods: with text, they can take the steps beyond a method."""
    found: list[Method] = [*map(methods.load_grouped, methods.GROUPED), *map(methods.load_latent, methods.LATENT)]
    return [method.name for method in found if method.text is TextUse.USED]


def _grouped(source: Source, wanted: Wanted, groups: int, method: GroupedMethod) -> Callable[[Output], Plan]:
    text = _calibration(method, wanted)
    return lambda output: plan_grouped("gqa", source, groups, method, wanted.seed, wanted.device, output, text)


def _latent(source: Source, wanted: Wanted, size: LatentRequest, method: LatentMethod) -> Callable[[Output], Plan]:
    text = _calibration(method, wanted)
    return lambda output: plan_latent(source, size, method, text, wanted.device, output, wanted.seed)


def _calibration(method: Method, wanted: Wanted) -> CalibrationOptions:
    text = wanted.calibration
    if method.text is TextUse.IGNORED:
        return CalibrationOptions()
    return replace(text, heal=text.heal or 0) if method.text is TextUse.USED else text.text_alone


def _chosen(known: Sequence[str], wanted: Wanted) -> list[str]:
    return [name for name in known if wanted.methods is None or name in wanted.methods]


def _size_name(size: LatentRequest) -> str:
    if size.kv_lora_rank is not None:
        return f"{size.kv_lora_rank}+{size.qk_rope_head_dim}"
    return f"{size.kv_share:.4%}".rstrip("0%").rstrip(".") + "%" if size.kv_share else f"{size.kv_bytes}B"
