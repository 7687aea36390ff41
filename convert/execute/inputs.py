"""Lists what decides the bytes of a conversion, and keeps what depends on its source alone, for one run or for several."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attention.errors import KvfoldError
from convert.calibration.own_text import own_text
from convert.execute.checking import own_sample
from convert.output.destination import without_text
from convert.output.provenance import versions
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationText, GivenTexts
from eval.machine.device import rough
from eval.quality.opened import Opened
from eval.terminal.progress import Progress


def inputs_of(plan: Plan, texts: GivenTexts | None) -> dict[str, Any]:
    """List the inputs that decide the result's bytes, without its healing, which a resumed run may leave out."""
    command, options = plan.recipe
    return {
        "command": command,
        **without_text(options),
        "heal": None,
        "device": plan.runs_on,
        "rough_products_in": str(rough(torch.device(plan.runs_on))),
        "config": plan.source.raw,
        "files": plan.source.fingerprint,
        "calibration_hashes": texts.hashes if texts else [],
        "rows_to_write": plan.calibration.rows_to_write if plan.calibration else 0,
        "versions": versions(),
    }


def shared_directory(inputs: Mapping[str, Any], shared: Path, *of: Any) -> Path:
    """The directory, in one for several conversions, that keeps what depends on their source and on `of`."""
    made_from = [*(inputs[name] for name in ("model", "config", "files")), *of, inputs["device"], inputs["versions"]]
    directory = shared / hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def statistics_directory(inputs: Mapping[str, Any], shared: Path, text: CalibrationText, behind_norms: bool) -> Path:
    """The directory of the statistics of the source on this text."""
    seen = text.surveyed()
    return shared_directory(inputs, shared, seen.tokens.hash, seen.blocks.lengths, *(["behind norms"] if behind_norms else []))


def written(plan: Plan, kept: Path, progress: Progress) -> torch.Tensor | None:
    """The text that the model writes for its own calibration, `[rows, context]`; None if nothing has to be written."""
    if plan.calibration is None or not (rows := plan.calibration.rows_to_write):
        return None
    device = torch.device(plan.runs_on)
    with Opened() as opened:
        ids = own_text(plan.source, rows, plan.calibration.context, plan.seed, device, kept, progress, opening=opened)
        if plan.checks:  # while the model is loaded; if it writes nothing of use, the check says so
            with contextlib.suppress(KvfoldError):
                own_sample(plan.source, plan.seed, device, kept, progress, opened)
    return ids
