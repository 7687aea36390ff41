"""English and Python text that every machine has: the bundled checkpoint is trained and evaluated on it.

It is read at run time from the installed Python (documentation topics, docstrings of built-in modules,
sources of the standard library), so that this repository contains no copied text. Another
Python version gives another text, so figures are reported with `platform.python_version()` and a token hash.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import warnings
from pathlib import Path

from attention.errors import Failure

# Whole modules kept out of training. `VALIDATION` monitored the training; `HELD_OUT` was only used for reported figures.
VALIDATION = ("calendar", "configparser", "fractions", "optparse", "textwrap")
HELD_OUT = ("argparse", "difflib", "statistics", "tarfile")
# Tests and vendored tools are repetitive; the last two rows are tables, not text.
_SKIPPED = {
    "site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "config",
    "encodings", "pydoc_data", "entities.py",
}  # fmt: skip


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_text(modules: tuple[str, ...] = HELD_OUT) -> str:
    """The sources of `modules`, in order, separated by a blank line.

    Raises:
        Failure: This Python installation lacks the source of one of them.
    """
    return "\n\n".join(_source(name) for name in modules)


def _source(name: str) -> str:
    for path in (_library() / f"{name}.py", _library() / name / "__init__.py"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise Failure(
        f"this Python ({sys.executable}) ships no source of its module {name!r} under {_library()}",
        hint="use a Python with its standard library as .py files, or give your own text to `convert eval --text FILE`",
    )


def training_documents() -> list[str]:
    """Documentation topics, built-in docstrings and library sources, without the held-out modules, in a fixed order."""
    return [*_topics(), *_docstrings(), *_sources()]


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items())]


def _docstrings() -> list[str]:
    documents = []
    for name in sorted(sys.builtin_module_names):
        with warnings.catch_warnings():  # some builds of Python have deprecated modules among these
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(name)
        members = [module, *(value for _, value in sorted(vars(module).items()) if callable(value))]
        text = "\n\n".join(doc for doc in map(inspect.getdoc, members) if doc)
        if text:
            documents.append(text)
    return documents


def _sources() -> list[str]:
    documents = []
    for path in sorted(_library().rglob("*.py")):
        parts = path.relative_to(_library()).parts
        name = parts[0].removesuffix(".py")
        if name in VALIDATION + HELD_OUT or any(part in _SKIPPED or part.startswith("config-") for part in parts):
            continue
        documents.append(path.read_text(encoding="utf-8", errors="replace"))
    return documents
