"""English and Python that every machine has: the text the bundled checkpoint is trained and judged on.

Read at run time from the installed Python — its documentation topics, the docstrings of its built-in modules and
the sources of its standard library — so that no text is copied into this repository. It follows that another
Python version gives another text: whoever reports a figure reports `platform.python_version()` and a token hash too.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
from pathlib import Path

from attention.errors import Failure

# Whole modules kept out of training. `VALIDATION` watched the training; `HELD_OUT` was never looked at before it was reported.
VALIDATION = ("calendar", "configparser", "fractions", "optparse", "textwrap")
HELD_OUT = ("argparse", "difflib", "statistics", "tarfile")
# Tests and vendored tools repeat themselves; the last two rows are tables, not text.
_SKIPPED = {
    "site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "config",
    "encodings", "pydoc_data", "entities.py",
}  # fmt: skip


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_text(modules: tuple[str, ...] = HELD_OUT) -> str:
    """The sources of `modules`, in order, separated by a blank line.

    Raises:
        Failure: This Python installation has no readable source for one of them.
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
