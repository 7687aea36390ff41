"""`convert demo`: runs the bundled MHA checkpoint through every conversion and writes one report.

Its text is that of the installed Python, on which the checkpoint was trained (`scripts/train_demo.py`), so that this repository
contains no copied text. Another Python version gives another text, so figures are reported with `platform.python_version()` and
a token hash.
"""

import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

from attention.errors import Failure, Interrupted
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
# Whole modules kept out of training. `VALIDATION` monitored the training; `HELD_OUT` was only used for reported figures.
VALIDATION = ("calendar", "configparser", "fractions", "optparse", "textwrap")
HELD_OUT = ("argparse", "difflib", "statistics", "tarfile")
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
    request = Request(source, Output(output, overwrite=True), text, device="cpu", checks=False)
    plans = plans_for(request, _GROUPS, _SIZES, _METHODS)
    held_out = Text(f"Python {platform.python_version()}: {', '.join(_MODULES)}", held_out_text(_MODULES))
    settings = EvaluationSettings(max_tokens=_TOKENS, device="cpu", probes=False)
    try:
        found = sweep(plans, held_out, settings, progress)
    except Interrupted:
        raise Interrupted("interrupted", hint="the same command begins again") from None
    return found, output / "report" / "report.html"


def library() -> Path:
    """The directory of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_text(modules: tuple[str, ...]) -> str:
    """The sources of `modules`, in order, separated by a blank line.

    Raises:
        Failure: This Python installation lacks the source of one of them.
    """
    sources = []
    for name in modules:
        there = [path for path in (library() / f"{name}.py", library() / name / "__init__.py") if path.is_file()]
        if not there:
            raise Failure(
                f"this Python ({sys.executable}) ships no source of its module {name!r} under {library()}",
                hint="use a Python with its standard library as .py files, or give your own text to `convert eval --text FILE`",
            )
        sources.append(there[0].read_text(encoding="utf-8"))
    return "\n\n".join(sources)
