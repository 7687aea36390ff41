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


def test_models_has_every_family() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if name not in text] == []
