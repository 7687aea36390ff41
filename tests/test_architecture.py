"""The house rules of DESIGN and CONTRIBUTING that can be checked by reading the code."""

import ast
import re
import runpy
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from written import Make

from attention.models import CODE  # files that are copied beside weights, where they find each other by relative imports only
from convert.families import FAMILIES
from convert.methods import GROUPED, LATENT

ROOT = Path(__file__).parents[1]
PACKAGES = {"attention": set[str](), "eval": {"attention"}, "convert": {"attention", "eval"}}
# Per package: what each room may know of the others.
ROOMS = {
    "eval": {
        "terminal": set[str](),
        "machine": set[str](),
        "inputs": set[str](),
        "arguments": set[str](),
        "quality": {"inputs", "machine", "terminal"},
        "speed": {"inputs", "machine", "terminal"},
        "report": {"inputs", "terminal"},
        "options": {"arguments", "inputs", "quality", "terminal"},
        "api": {"arguments", "options", "inputs", "quality", "speed", "report", "terminal"},
        "__init__": {"api"},
    },
    "convert": {
        "families": set[str](),
        "methods": set[str](),
        "checkpoint": set[str](),
        "launch": set[str](),
        "hosts": {"families"},
        "output": {"checkpoint"},
        "arguments": {"methods", "hosts"},
        "planning": {"families", "methods", "hosts", "output"},
        "calibration": {"methods", "checkpoint"},
        "execute": {"families", "methods", "hosts", "checkpoint", "output", "planning", "launch", "calibration"},
        "healing": {"families", "checkpoint", "output", "planning", "launch", "calibration"},
        "converting": {"output", "planning", "launch", "execute", "healing"},
        "sweeping": {"methods", "output", "planning", "launch", "execute", "converting"},
        "api": {"methods", "hosts", "output", "arguments", "planning", "execute", "healing", "converting", "sweeping"},
        "demo": {"output", "planning", "sweeping"},
        "command": {"api", "launch", "arguments", "planning", "demo"},
        "__init__": {"api", "execute", "healing", "sweeping"},
    },
}
# Modules that are named like a model type's or a method's home may say its name.
NAMES_MODEL_TYPES = {"families", "hosts", "models"}
NAMES_METHODS = {"methods", "demo"}
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def place(path: Path) -> tuple[str, str]:
    """Package and room of a module."""
    package, *rest = path.parts
    return package, (rest[0] if len(rest) > 1 else path.stem)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported, wherever in the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and value of every string constant other than docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def leaks(path: Path, text: str) -> list[str]:
    """What a module does against the rules."""
    (package, room), tree = place(path), ast.parse(text)
    found = []
    for line, name in imported(tree):
        parts = name.split(".")
        if name.startswith(".") and not (ROOT / path in CODE and ROOT / path.parent / f"{parts[1]}.py" in CODE):
            found.append(f"{path}:{line}: relative import of {name}")
        if parts[0] in PACKAGES and parts[0] != package and parts[0] not in PACKAGES[package]:
            found.append(f"{path}:{line}: {package} imports {name}")
        if package in ROOMS and parts[0] == package and len(parts) > 1 and parts[1] != room:
            if parts[1] not in ROOMS[package]:
                found.append(f"{path}:{line}: {name} is in no room")
            elif parts[1] not in ROOMS[package][room]:
                found.append(f"{path}:{line}: {room} imports {name}")
    for line, value in strings(tree):
        if value in FAMILIES and not NAMES_MODEL_TYPES & {room, path.stem}:
            found.append(f"{path}:{line}: names the model type {value!r}")
        if value in (*GROUPED, *LATENT) and room not in NAMES_METHODS:
            found.append(f"{path}:{line}: names the method {value!r}")
    if not ast.get_docstring(tree):
        found.append(f"{path}: says not what it is for")
    if path.stem in ("utils", "helpers", "misc", "common"):
        found.append(f"{path}: has a name that says nothing")
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_module_breaks_a_rule(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert leaks(path, text) == []
    assert not re.search(r"^\s*(import eval\b|from \S+ import .*\beval\b)", text, re.MULTILINE), "shadows the builtin"


@pytest.mark.parametrize(
    ("path", "line", "says"),
    [
        ("attention/a.py", "import eval.report.quality", "attention imports eval.report.quality"),
        ("attention/a.py", "def f():\n    from convert.command import cli", "attention imports convert.command.cli"),
        ("eval/a.py", "from convert.families import family_of", "eval imports convert.families.family_of"),
        ("convert/methods/a.py", "from convert.families import FAMILIES", "methods imports convert.families.FAMILIES"),
        ("convert/families/a.py", "from convert import hosts", "families imports convert.hosts"),
        ("convert/execute/a.py", "import convert.sweeping", "execute imports convert.sweeping"),
        ("eval/inputs/a.py", "from eval.quality.perplexity import finite", "inputs imports eval.quality.perplexity.finite"),
        ("convert/api/facts.py", "from convert.command.cli import main", "api imports convert.command.cli.main"),
        ("convert/planning/a.py", "from convert.nowhere import x", "is in no room"),
        ("convert/planning/a.py", "from . import base", "relative import"),
        ("attention/models/a.py", "from .configuration_kvfold import KvfoldConfig", "relative import"),
        ("attention/models/modeling_kvfold.py", "from .a import KvfoldConfig", "relative import"),
        ("convert/planning/a.py", "if config.model_type == 'llama': pass", "names the model type 'llama'"),
        ("convert/execute/a.py", "kinds = ('mistral', 'x')", "names the model type 'mistral'"),
        ("convert/sweeping.py", "one = 'mean'", "names the method 'mean'"),
        ("convert/utils.py", "x = 1", "a name that says nothing"),
        ("convert/planning/a.py", None, "says not what it is for"),
    ],
)
def test_the_rules_can_be_broken(path: str, line: str | None, says: str) -> None:
    text = "x = 1\n" if line is None else f'"""A module."""\n{line}\n'
    found = leaks(Path(path), text)
    assert len(found) == 1, found
    assert says in found[0]


MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def others_of(name: str) -> set[str]:
    """The project's modules that a module imports."""
    found = {target for _, target in imported(ast.parse((ROOT / MODULES[name]).read_text(encoding="utf-8")))}
    return {target if target in MODULES else target.rpartition(".")[0] for target in found} & MODULES.keys() - {name}


def test_no_import_runs_in_a_circle() -> None:
    """Rooms are a partial order, whoever may be known knows not back; and so are modules."""
    for known in (*ROOMS.values(), {name: others_of(name) for name in MODULES}):
        assert set(TopologicalSorter(known).static_order()) == known.keys()


def test_packages_are_typed_and_no_module_bears_the_name_of_an_exported_function() -> None:
    """Importing such a module would bind its name over the function."""
    for package in map(import_module, PACKAGES):
        directory = Path(str(package.__file__)).parent
        assert (directory / "py.typed").is_file()
        modules = {path.stem for path in directory.iterdir() if path.suffix == ".py" or path.is_dir()}
        assert not modules & set(package.__all__), package.__name__
        assert all(callable(getattr(package, name)) for name in package.__all__)


def test_every_module_has_its_tests_where_they_are_looked_for() -> None:
    """tests/ mirrors the packages: tests/convert/checkpoint/test_writer.py is of convert/checkpoint/writer.py.

    `test_contract.py` is of a whole room.
    """
    modules = {str(path.with_suffix("")) for path in FILES}
    packages = {str(path.parent) for path in FILES}
    for test in (ROOT / "tests").rglob("test_*.py"):
        where = test.relative_to(ROOT / "tests")
        if where.parts[0] not in PACKAGES:
            continue
        of = str(where.parent / where.stem.removeprefix("test_").removesuffix("contract"))
        assert of in modules or of in packages, f"{where} is of no module"


# The house is to become smaller: what is reached is kept. Lower these whenever something goes.
MOST_LINES = {"product": 26_456, "tests": 23_688}
MOST_BYTES_OF_DOCUMENTS, MOST_IMPORTS = 80_000, 20
STAYS, RETURNS, DEPTH = 45, 10, 25  # as scripts/follow.py counts them


def lines_of(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_house_does_not_grow() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert lines_of(ROOT / path for path in FILES) <= MOST_LINES["product"]
    assert lines_of((ROOT / "tests").rglob("*.py")) <= MOST_LINES["tests"]
    assert sum(path.stat().st_size for path in documents) <= MOST_BYTES_OF_DOCUMENTS


@pytest.mark.parametrize("name", MODULES)
def test_no_module_imports_too_many_others(name: str) -> None:
    assert len(others_of(name)) <= MOST_IMPORTS


@pytest.mark.usefixtures("writing")
def test_the_model_goes_one_straight_line(shelf: Make) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "follow.py"))
    stays, depth = script["followed"](shelf())
    assert len(stays) <= STAYS, "\n".join(f"{'  ' * stay.depth}{stay.function}" for stay in stays)
    assert script["returns"](stays) <= RETURNS
    assert depth <= DEPTH
