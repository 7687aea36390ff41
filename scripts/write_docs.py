"""Write the parts of the documentation that follow from the code: `python scripts/write_docs.py [--check]`.

docs/cli.md comes from the commands' own help, and README's table of model types from the registries.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from convert.cli import main
from convert.planning.describe import support, support_markdown

ROOT = Path(__file__).parents[1]
CLI, README = ROOT / "docs" / "cli.md", ROOT / "README.md"
BEGIN, END = "<!-- scripts/write_docs.py writes this table -->\n", "<!-- end of the table -->\n"
HEAD = """# Command line

`python scripts/write_docs.py` writes this page from `--help`. Do not edit it. The script is called `convert`, and also
`kvfold`, because ImageMagick has a `convert` too.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 failed on weights, text or machine; 2 wrong arguments or
config; 3 quality gate missed; 130 interrupted.
"""


def render_cli() -> str:
    """docs/cli.md."""
    sections = [HEAD]
    for name, command in main.commands.items():
        context = click.Context(command, info_name=f"convert {name}", max_content_width=120, terminal_width=120)
        sections.append(f"## convert {name}\n\n```\n{command.get_help(context)}\n```\n")
    return "\n".join(sections)


def render_readme() -> str:
    """README.md with a current table."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + support_markdown(support()) + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    for path, render in ((CLI, render_cli), (README, render_readme)):
        if "--check" not in sys.argv:
            path.write_text(render(), encoding="utf-8")
        elif path.read_text(encoding="utf-8") != render():
            raise SystemExit(f"{path} is stale: run python scripts/write_docs.py")
