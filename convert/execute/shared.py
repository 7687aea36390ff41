"""Keeps what depends on the source alone, its own text and its statistics, for one conversion or for several."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from convert.calibration.own_text import own_text
from convert.execute.job import device_of
from convert.output.provenance import versions
from convert.output.writing import Work
from convert.planning.base import Plan, location_of
from convert.planning.calibration import CalibrationText
from eval.terminal.progress import Progress


def directory_of(plan: Plan, work: Work, shared: Path | None, *of: Any) -> Path:
    """The directory that keeps what depends on the source and on `of`: that of this conversion, or a shared one."""
    if shared is None:
        return work.steps
    source = plan.source
    made_from = [location_of(source), source.raw, source.fingerprint, *of, str(device_of(plan)), versions()]
    directory = shared / hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def statistics_directory(plan: Plan, work: Work, text: CalibrationText | None, shared: Path | None) -> Path:
    """The directory of the statistics of the source on this text."""
    if text is None:
        return work.steps
    seen, behind_norms = text.surveyed(), ["behind norms"] if plan.reads_projections else []
    return directory_of(plan, work, shared, seen.tokens.hash, seen.blocks.lengths, *behind_norms)


def written(plan: Plan, kept: Path, progress: Progress) -> torch.Tensor | None:
    """The text that the model writes for its own calibration, `[rows, context]`; None if nothing has to be written."""
    if plan.calibration is None or not (rows := plan.calibration.rows_to_write):
        return None
    return own_text(plan.source, rows, plan.calibration.context, plan.seed, device_of(plan), kept, progress)
