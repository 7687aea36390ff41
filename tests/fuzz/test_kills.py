"""A short slice of the kills: one of a conversion to MLA with --refine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_killed_run_leaves_nothing_half_written_and_resumes() -> None:
    # In a process of its own: forks of one that has threads may hang.
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "kills.py"), "1", "3", "mla"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
