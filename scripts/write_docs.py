"""Write the parts of the documentation that follow from the code: `python scripts/write_docs.py [--check]`.

docs/cli.md comes from the commands' own help, and the table of docs/models.md from the registries.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import click

from convert.command.cli import main
from convert.planning.describe import support, support_markdown

ROOT = Path(__file__).parents[1]
CLI, MODELS = ROOT / "docs" / "cli.md", ROOT / "docs" / "models.md"
BEGIN, END = "<!-- scripts/write_docs.py writes this table -->\n", "<!-- end of the table -->\n"
HEAD = """# Command line

`python scripts/write_docs.py` writes this page from `--help`. Do not edit it. The script is called `convert`, and also
`kvfold`, because ImageMagick has a `convert` too.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 failed on weights, text or machine; 2 wrong arguments or
config; 3 quality gate missed; 130 interrupted.
"""


def render_cli() -> str:
    """docs/cli.md: each command with its own options, then what several have alike."""
    contexts = {name: _context(command, f"convert {name}") for name, command in main.commands.items()}
    records = {
        name: [p.get_help_record(ctx) for p in ctx.command.params if isinstance(p, click.Option)]
        for name, ctx in contexts.items()
    }
    counts = Counter(record for found in records.values() for record in found if record)
    # Of options of one name that differ, the most frequent one.
    shared = list({_name(record): record for record, count in reversed(counts.most_common()) if count > 1}.values())
    sections = [HEAD]
    for name, context in contexts.items():
        options = [record for record in records[name] if record]
        sections.append(f"## convert {name}\n\n```\n{_described(context, [o for o in options if o not in shared])}\n```\n")
        if names := [f"`{_name(option)}`" for option in options if option in shared]:
            sections.append(f"And as [below](#shared-options): {', '.join(names)}\n")
    sections.append(f"## Shared options\n\n```\n{_listed(contexts['mla'], sorted(shared, key=_name))}\n```\n")
    return "\n".join(sections)


def _context(command: click.Command, name: str) -> click.Context:
    return click.Context(command, info_name=name, max_content_width=120, terminal_width=120)


def _described(context: click.Context, options: list[tuple[str, str]]) -> str:
    """A command's usage and what it does, with some of its options."""
    formatter = context.make_formatter()
    context.command.format_usage(context, formatter)
    context.command.format_help_text(context, formatter)
    if options:
        with formatter.section("Options"):
            formatter.write_dl(options)
    return formatter.getvalue().rstrip()


def _listed(context: click.Context, options: list[tuple[str, str]]) -> str:
    formatter = context.make_formatter()
    formatter.write_dl(options)
    return formatter.getvalue().rstrip()


def _name(option: tuple[str, str]) -> str:
    """`--refit` of "--refit / --no-refit"."""
    found = re.search(r"--[\w-]+", option[0])
    assert found is not None, "every option has a long name"
    return found[0]


def render_models() -> str:
    """docs/models.md with a current table."""
    before, rest = MODELS.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + support_markdown(support()) + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    for path, render in ((CLI, render_cli), (MODELS, render_models)):
        if "--check" not in sys.argv:
            path.write_text(render(), encoding="utf-8")
        elif path.read_text(encoding="utf-8") != render():
            raise SystemExit(f"{path} is stale: run python scripts/write_docs.py")
