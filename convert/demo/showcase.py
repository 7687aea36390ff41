"""`convert demo`: runs the bundled MHA checkpoint through every conversion and writes one report."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from attention.errors import Interrupted
from convert.demo.corpus import VALIDATION, held_out_text
from convert.output.destination import Output
from convert.planning.base import Request
from convert.planning.calibration import CalibrationOptions
from convert.planning.sizes import LatentSize
from convert.planning.sweep import plans_for
from convert.planning.texts import texts_of
from convert.sweeping import sweep
from eval.inputs.source import Source
from eval.inputs.text import Text
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, silent

MODEL = Path(__file__).parent / "python-5m-mha"
_GROUPS = (4, 1)
_SIZES = (LatentSize(96, 32),)  # a quarter of the cache
_METHODS = ("aligned", "mean", "weighted", "pca")
_MODULES = ("difflib", "statistics")  # two of the held-out modules
_TOKENS = 8192  # evaluated tokens: as many as two minutes allow, with the installation
_CALIBRATION_TOKENS = 6144  # as many as two minutes allow


def showcase(output: Path, progress: Progress = silent) -> tuple[dict[str, Any], Path]:
    """Convert, evaluate on library modules that were held out of training, and write the report.

    Args:
        output: A directory for one subdirectory per conversion, and `report/`; it replaces those of an earlier demo.
        progress: Called with the progress of each stage.

    Returns:
        The report, and the path of its HTML page.
    """
    source = Source.parse(str(MODEL))
    calibration = output / "calibration.txt"
    output.mkdir(parents=True, exist_ok=True)
    calibration.write_text(held_out_text(VALIDATION), encoding="utf-8")  # modules that monitored the training
    text = CalibrationOptions(texts_of(calibration, None), _CALIBRATION_TOKENS)
    request = Request(source, Output(output, overwrite=True), text, "cpu", checks=False)
    plans = plans_for(request, _GROUPS, _SIZES, _METHODS)
    held_out = Text(f"Python {platform.python_version()}: {', '.join(_MODULES)}", held_out_text(_MODULES))
    settings = EvaluationSettings(max_tokens=_TOKENS, device="cpu", probes=False)
    try:
        found = sweep(plans, held_out, settings, progress)
    except Interrupted:
        raise Interrupted("interrupted", hint="the same command begins again") from None
    return found, output / "report" / "report.html"
