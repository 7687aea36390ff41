"""Write the parts of the documentation that follow from the code: `python scripts/write_docs.py [--check]`.

docs/cli.md comes from the commands themselves, and the table of docs/models.md from the registries.
"""

import sys
from pathlib import Path
from typing import Any

import click

from convert.command.cli import main
from convert.hosts import HOSTS
from convert.planning.describe import refusals, support

ROOT = Path(__file__).parents[1]
CLI, MODELS = ROOT / "docs" / "cli.md", ROOT / "docs" / "models.md"
BEGIN, END = "<!-- scripts/write_docs.py writes this table -->\n", "<!-- end of the table -->\n"
SHARED, ANCHOR = "## Options of all conversions", "options-of-all-conversions"
CONVERSIONS = ("gqa", "mqa", "mla", "sweep")
HEAD = """# Command line

`convert COMMAND --help` explains each option; `python scripts/write_docs.py` lists them here.

Results go to stdout (`--json` for scripts), everything else to stderr. Exit codes: 0 done; 1 failed on weights, text or
machine; 2 wrong arguments or config; 3 a quality gate missed; 130 interrupted.
"""


def render_cli() -> str:
    """docs/cli.md: the arguments of each command and the names of its options; those of all conversions stand there once."""
    every = [set(_options(main.commands[name])) for name in CONVERSIONS]
    shared = [option for option in _options(main.commands[CONVERSIONS[0]]) if all(option in options for options in every)]
    names = ", ".join(f"`{name}`" for name in CONVERSIONS)
    conversions = f"{SHARED}\n\n{names} have these, too: `{' '.join(shared)}`\n"
    return "\n".join([HEAD, *(_section(name, main.commands[name], shared) for name in main.commands), conversions])


def _options(command: click.Command) -> list[str]:
    return [max(option.opts, key=len) for option in command.params if isinstance(option, click.Option)]


def _section(name: str, command: click.Command, shared: list[str]) -> str:
    context = click.Context(command, info_name=f"convert {name}")
    arguments = " ".join(command.collect_usage_pieces(context)).replace("[OPTIONS]", "").strip()
    own = " ".join(option for option in _options(command) if name not in CONVERSIONS or option not in shared)
    said = [part for part in (arguments, own) if part]
    more = f", and [those of all conversions](#{ANCHOR})" if name in CONVERSIONS else ""
    return f"## convert {name}\n\n`{' '.join(said)}`{more}\n"


def render_models() -> str:
    """docs/models.md with a current table; why a latent is not shared is said there once."""
    before, rest = MODELS.read_text(encoding="utf-8").split(BEGIN)
    said = support_markdown(support()).split("\n")
    lines = [line for line in said if not line.endswith("no KV heads to merge")]
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1]


def support_markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, in which families with the same output classes share a row, and why others have none."""
    together: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        together.setdefault(tuple(row[kind] for kind in HOSTS), []).append(row["family"])
    lines = [f"| {', '.join(names)} | {' | '.join(classes)} |" for classes, names in together.items()]
    kinds = [f"to {kind.upper()}" for kind in HOSTS]
    reasons = [f"- {line}" for line in refusals(rows)]
    return "\n".join([f"| from | {' | '.join(kinds)} |", f"| --- |{' --- |' * len(kinds)}", *lines, "", *reasons])


if __name__ == "__main__":
    for path, render in ((CLI, render_cli), (MODELS, render_models)):
        if "--check" not in sys.argv:
            path.write_text(render(), encoding="utf-8")
        elif path.read_text(encoding="utf-8") != render():
            raise SystemExit(f"{path} is stale: run python scripts/write_docs.py")
