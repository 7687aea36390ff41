"""The output of a command on stderr while it works: progress, and the library's warnings."""

import logging
import sys
import time
from typing import Any

import click

from eval.terminal.progress import Progress, duration, silent
from eval.terminal.text import printable

_AT_ONCE = 0.1  # seconds from the begin of a stage
_QUIET, _PARTS = 30.0, 10  # seconds without a line, or a tenth of a stage that is longer than that


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
    return Bars() if sys.stderr.isatty() else Lines()


class Lines:
    """Progress if stderr is not a terminal: a line when a stage begins, and now and then one with the time left."""

    def __init__(self) -> None:
        # By stage: when its last line was printed, how much of it was done then, and how much at the first line.
        self._said: dict[str, tuple[float, int, int]] = {}

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        at, said, first = self._said.get(stage, (now, done, done))
        if done == 0 or stage not in self._said:
            click.echo(f"{printable(stage)}: {total:,} {unit}{'' if total == 1 else 's'}", err=True)
            self._said[stage] = now, done, done
        elif now - at < _AT_ONCE and said == first:
            self._said[stage] = at, done, done  # what an earlier run has done says nothing about the speed
        elif said < done < total:
            pace = (now - at) / (done - said)
            if now - at >= max(_QUIET, pace * (total - first) / _PARTS):
                click.echo(f"{printable(stage)}: {done / total:.0%}, about {duration(pace * (total - done))} left", err=True)
                self._said[stage] = now, done, first


class Bars:
    """Progress if stderr is a terminal: a bar for the current stage, with the time left."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._stage: str | None = None

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        from tqdm import tqdm

        if done == 0 or stage != self._stage:  # a stage may go on after one within it
            if self._bar is not None:
                self._bar.close()
            self._bar = tqdm(
                total=total, initial=done, desc=printable(stage), unit=unit[:5], unit_scale=unit == "byte", file=sys.stderr
            )
            self._stage = stage
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()


class _Handler(logging.Handler):
    """Prints what the library logs as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"{record.levelname.lower()}: {printable(record.getMessage())}", err=True)
