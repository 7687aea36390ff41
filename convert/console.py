"""The output of a command on stderr while it works: progress, and the library's warnings."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from eval.escapes import printable
from eval.progress import Progress, silent


def console(verbose: bool, quiet: bool) -> Progress:
    """Set up stderr for one command, and return its progress callback. Only `verbose` shows transformers' warnings and bars."""
    if not verbose:
        from transformers.utils import logging as of_transformers

        of_transformers.set_verbosity_error()
        of_transformers.disable_progress_bar()
    logger = logging.getLogger("kvfold")
    logger.handlers = [_Handler(logging.ERROR if quiet else logging.INFO)]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if quiet:
        return silent
    return Bars() if sys.stderr.isatty() else one_line


def one_line(stage: str, done: int, total: int, unit: str) -> None:
    """Progress if stderr is not a terminal: one line when a stage begins."""
    if done == 0:
        count = f"{total:,} {unit}{'' if total == 1 else 's'}"
        click.echo(f"{printable(stage)}: {count}", err=True)


class Bars:
    """Progress if stderr is a terminal: a bar for the current stage."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        from tqdm import tqdm

        if done == 0:
            if self._bar is not None:
                self._bar.close()
            self._bar = tqdm(total=total, desc=printable(stage), unit=unit[:5], unit_scale=unit == "byte", file=sys.stderr)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()


class _Handler(logging.Handler):
    """Prints warnings as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"{record.levelname.lower()}: {printable(record.getMessage())}", err=True)
