"""A short slice of the damage to what commands read, the same every time, and that what must never happen is seen."""

import time
from typing import Any

import click
import pytest
from fuzz import damaged

COUNTS = {"config": 60, "weights": 40, "gguf": 40, "recipe": 40}


@pytest.mark.parametrize("kind", damaged.KINDS)
def test_damage_ends_in_one_line_or_in_the_same_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.report.quality.to_svg", lambda models: "<svg/>")  # a sweep's report, of which nothing is damaged
    found = damaged.main(COUNTS.get(kind, 4), 5, (kind,))
    assert found.cases == COUNTS.get(kind, 4)
    assert found.ended_well > 3 or kind not in COUNTS, str(found)
    assert not found.wrong, str(found)


def fail(*lines: str) -> None:
    for line in lines:
        click.echo(line, err=True)
    click.get_current_context().exit(2)


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (lambda: {}["no such key"], "traceback: KeyError: 'no such key' (test_damaged.py"),
        (lambda: time.sleep(5), "hang: Hang:  (written.py"),
        (lambda: click.get_current_context().exit(7), "exit code 7"),
        (lambda: fail("error: one", "and two"), "not one line: 'error: one"),
        (lambda: fail("one"), "not one line: 'one"),
        (lambda: fail("error: \x1b[31m"), "control characters"),
        (lambda: click.echo("fine"), None),
        (lambda: fail("error: one", "hint: two"), None),
    ],
    ids=["traceback", "hang", "exit code", "two lines", "no error", "escape", "fine", "a hint"],
)
def test_what_must_never_happen_is_seen(body: Any, wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damaged, "LIMIT", 1)
    monkeypatch.setattr(damaged, "convert", click.Group("convert", {"plan": click.Command("plan", callback=body)}))
    _, found = damaged.judged("plan")
    assert str(found).startswith(str(wrong))
