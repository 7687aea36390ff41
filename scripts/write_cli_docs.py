"""Write docs/cli.md from the commands' own help: `python scripts/write_cli_docs.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from convert.cli import main

PATH = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# Command line

`python scripts/write_cli_docs.py` writes this page from `--help`. Do not edit it. The script is called `convert`, and also
`kvfold`, because ImageMagick has a `convert` too.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 failed on weights, text or machine; 2 wrong arguments or
config; 3 quality gate missed; 130 interrupted.
"""


def render() -> str:
    sections = [HEAD]
    for name, command in main.commands.items():
        context = click.Context(command, info_name=f"convert {name}", max_content_width=120, terminal_width=120)
        sections.append(f"## convert {name}\n\n```\n{command.get_help(context)}\n```\n")
    return "\n".join(sections)


if __name__ == "__main__":
    if "--check" in sys.argv:
        if PATH.read_text(encoding="utf-8") != render():
            raise SystemExit(f"{PATH} is stale: run python scripts/write_cli_docs.py")
    else:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(render(), encoding="utf-8")
