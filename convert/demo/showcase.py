"""`convert demo`: the bundled MHA checkpoint through every conversion that there is, and into one report."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from convert.demo.corpus import held_out_text
from convert.execute import execute
from convert.methods import load_grouped
from convert.plan import Output, plan_grouped
from eval import report
from eval.evaluate import Settings, evaluate
from eval.source import Source
from eval.text import Text

MODEL = Path(__file__).parent / "python-5m-mha"
_TARGETS = (("mean", 4), ("mean", 2), ("mean", 1), ("first", 4), ("first", 2), ("first", 1))
_MODULES = ("difflib", "statistics")  # of those held out: as much as two minutes allow


def showcase(output: Path, quiet: bool = False) -> tuple[dict[str, Any], Path]:
    """Convert, evaluate on library modules that were held out of training, and write the report.

    Args:
        output: Receives one directory per conversion, and `report/`; those of an earlier demo are replaced.
        quiet: No progress bars.

    Returns:
        The report, and the path of its HTML page.
    """
    source = Source.parse(str(MODEL))
    converted = []
    for method, groups in _TARGETS:
        path = output / f"gqa{groups}-{method}"
        execute(plan_grouped("gqa", source, groups, load_grouped(method), 0, "cpu", Output(path, overwrite=True)), quiet=True)
        converted.append(Source.parse(str(path)))
    text = Text(f"Python {platform.python_version()}: {', '.join(_MODULES)}", held_out_text(_MODULES))
    found = evaluate([source, *converted], text, Settings(device="cpu", quiet=quiet))
    return found, report.write(found, output / "report")["report.html"]
