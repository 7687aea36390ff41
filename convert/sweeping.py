"""Converts one source to many targets by many methods, with one survey (two with QK-norm), one evaluation and one report."""

import contextlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.converting import convert
from convert.execute.describe import PlannedConversion
from convert.launch import require_alone
from convert.output.destination import exclusive
from convert.output.writing import explained, watched
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationText
from convert.planning.sweep import REPORT
from eval.inputs.text import Text, warn_of_overlap
from eval.quality.evaluation import prepare, report_of
from eval.quality.settings import EvaluationSettings
from eval.report import quality as report
from eval.terminal.progress import Progress, silent
from eval.terminal.text import table

_log = logging.getLogger("kvfold")
_SURVEY = "survey"  # in DIR


@dataclass(frozen=True)
class Sweep:
    """Several conversions of one source.

    Attributes:
        plans: The plan of each result.
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
        rows, first = [], self.plans[0]
        for plan in self.plans:
            spec = plan.target.spec
            before, after = plan.kv_bytes_per_token
            rows.append([plan.output.path.name, spec.kind, plan.target.method.name, f"{after:.0f}", f"{after / before:.1%}"])
        at = first.before.at_context(first.context)
        shown = table(["result", "attention", "method", f"KV bytes/token{at}", "of the source's"], rows, right=(3, 4))
        return f"{shown}\n\nwould be written to {first.output.path.parent}, with a report"


def sweep(
    plans: Sequence[Plan], evaluate_on: Text, settings: EvaluationSettings, progress: Progress = silent
) -> dict[str, Any]:
    """Carry out every plan, evaluate the results beside their source, and write the report.

    Args:
        plans: From `plans_for`. With `--resume`, results that are finished stay.
        evaluate_on: Held-out text.
        settings: How to evaluate.
        progress: Called with the progress of each stage.

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
        warn_of_overlap(held_out, CalibrationText.read(source, calibration).whole, "calibration")
    with exclusive(directory), explained("sweep", directory):
        require_unchanged = watched([source])
        directory.mkdir(parents=True, exist_ok=True)
        for plan in plans:
            require_unchanged()
            convert(plan, None, progress, directory / _SURVEY)
            _log.info("made %s (%s)", plan.output.path, plan.target.spec.kind)
        results = [source.beside(plan.output.path) for plan in plans]
        found = report_of([source, *results], evaluate_on, settings, progress=progress)
        require_unchanged()
        report.write(found, directory / REPORT)
        for kept in (directory / _SURVEY).glob("[0-9a-f]" * 16):  # as conversions name them: anything else is the user's
            shutil.rmtree(kept, ignore_errors=True)
        with contextlib.suppress(OSError):
            (directory / _SURVEY).rmdir()
        return found
