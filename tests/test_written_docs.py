"""What documentation says about the code is what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from convert.families import FAMILIES

ROOT = Path(__file__).parents[1]


def test_what_is_written_by_the_script_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/write_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_names_every_family() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if name not in text] == []
