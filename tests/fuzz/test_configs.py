"""A fixed slice of the fuzzer of configs, and that it sees what it looks for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import pytest
from fuzz import configs


def test_mutated_configs_end_in_one_line() -> None:
    assert configs.main(count=40, seed=11) == []


def test_the_same_seed_gives_the_same_configs() -> None:
    assert list(configs.cases(20, 5)) == list(configs.cases(20, 5)) != list(configs.cases(20, 6))


def fail(*lines: str) -> None:
    for line in lines:
        click.echo(line, err=True)
    click.get_current_context().exit(2)


@pytest.mark.parametrize(
    ("body", "kind", "detail"),
    [
        (lambda: {}["no such key"], "traceback", "KeyError: 'no such key' (test_configs.py"),
        (lambda: time.sleep(5), "hang", "Hang:  (configs.py"),
        (lambda: click.get_current_context().exit(7), "exit code", "7"),
        (lambda: fail("error: one", "and two"), "several lines", "and two"),
        (lambda: fail("one"), "several lines", "one"),
        (lambda: fail("error: \x1b[31m"), "several lines", "control"),
    ],
    ids=["traceback", "hang", "exit code", "several lines", "no error", "control characters"],
)
def test_it_finds(body: Any, kind: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "LIMIT", 1)
    found = run(body, tmp_path, monkeypatch)
    assert found is not None
    assert found[0] == kind
    assert detail in found[1]


@pytest.mark.parametrize(
    "body", [lambda: click.echo("fine"), lambda: fail("error: one", "hint: two")], ids=["works", "refuses"]
)
def test_it_finds_nothing_where_nothing_is_wrong(body: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(body, tmp_path, monkeypatch) is None


def run(body: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str] | None:
    command = click.Command("plan", callback=body, params=[click.Argument(["model"], expose_value=False)])
    monkeypatch.setattr(configs, "convert", click.Group("convert", {"plan": command}))
    return configs.run("plan", directory)
