"""The house rules of CONTRIBUTING.md that can be checked by reading the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {"attention": {"attention"}, "eval": {"attention", "eval"}, "convert": {"attention", "eval", "convert"}}
FILES = sorted(path for package in ALLOWED for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    ours = {name.split(".")[0] for name in imported(path)} & ALLOWED.keys()
    assert ours <= ALLOWED[package]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_families_and_hosts_know_model_types(path: Path) -> None:
    if {"families", "hosts"} & set(path.parts):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            names = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
            assert "model_type" not in names, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)) or not text.strip()
    assert path.name not in ("utils.py", "helpers.py", "misc.py")


def test_packages_are_typed() -> None:
    assert all((ROOT / package / "py.typed").is_file() for package in ALLOWED)
