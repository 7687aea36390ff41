"""English and Python text that every machine has: the bundled checkpoint is trained and evaluated on it.

It is read at run time from the installed Python (documentation topics, docstrings of built-in modules,
sources of the standard library), so that this repository contains no copied text. Another
Python version gives another text, so figures are reported with `platform.python_version()` and a token hash.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from attention.errors import Failure

# Whole modules kept out of training. `VALIDATION` monitored the training; `HELD_OUT` was only used for reported figures.
VALIDATION = ("calendar", "configparser", "fractions", "optparse", "textwrap")
HELD_OUT = ("argparse", "difflib", "statistics", "tarfile")


def library() -> Path:
    """The directory of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_text(modules: tuple[str, ...] = HELD_OUT) -> str:
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
