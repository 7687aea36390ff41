"""Progress on stderr: lines with the time left, and bars."""

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from convert.command.console import Bars, Lines, console
from eval.terminal.progress import duration


def at(second: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be so late."""
    monkeypatch.setattr("convert.command.console.time", SimpleNamespace(monotonic=lambda: second))


def test_a_long_stage_says_now_and_then_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 seconds: at most a line each 30."""
    lines = Lines()
    for second in range(201):
        at(second, monkeypatch)
        lines("survey", second, 200, "layer")
    assert capsys.readouterr().err.splitlines() == [
        "survey: 200 layers",
        "survey: 15%, about 2.8 minutes left",
        "survey: 30%, about 2.3 minutes left",
        "survey: 45%, about 1.8 minutes left",
        "survey: 60%, about 80 seconds left",
        "survey: 75%, about 50 seconds left",
        "survey: 90%, about 20 seconds left",
    ]


def test_what_an_earlier_run_has_done_is_no_speed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    at(0, monkeypatch)
    lines("heal", 0, 1000, "token")
    lines("heal", 900, 1000, "token")
    at(40, monkeypatch)
    lines("heal", 910, 1000, "token")
    assert capsys.readouterr().err.splitlines()[1:] == ["heal: 91%, about 6 minutes left"]


def test_a_short_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    for done in range(4):
        lines("try", done, 3, "candidate")
    lines("rank", 0, 1, "layer")
    assert capsys.readouterr().err == "try: 3 candidates\nrank: 1 layer\n"


def test_bars_show_the_time_left_also_after_a_stage_within(capsys: pytest.CaptureFixture[str]) -> None:
    bars = Bars()
    bars("convert", 0, 100, "byte")
    bars("survey", 0, 2, "layer")
    bars("survey", 2, 2, "layer")
    bars("convert", 50, 100, "byte")
    bar = bars._bar
    assert (bar.desc, bar.n, bar.total) == ("convert", 50, 100)
    assert "<" in str(bar).rpartition("[")[2]  # elapsed < remaining
    bars("convert", 100, 100, "byte")
    assert "convert" in capsys.readouterr().err


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("kvfold")
    before = found.handlers, found.level, found.propagate
    yield found
    found.handlers, found.level, found.propagate = before


def test_quiet_prints_nothing(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    progress = console(False, True)
    logger.info("takes about 1.2 GB of memory on cpu")
    progress("fit", 0, 2, "layer")
    assert capsys.readouterr().err == ""
    console(False, False)
    logger.info("takes about 1.2 GB of memory on cpu")
    assert capsys.readouterr().err == "info: takes about 1.2 GB of memory on cpu\n"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.01, "1 second"),
        (7.26, "7.3 seconds"),
        (99.6, "100 seconds"),
        (725, "12 minutes"),
        (6e3, "1.7 hours"),
        (2e7, "231 days"),
    ],
)
def test_durations_have_two_digits(seconds: float, said: str) -> None:
    assert duration(seconds) == said
