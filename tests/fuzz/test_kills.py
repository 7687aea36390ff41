"""A short slice of the kills: one of a conversion to MLA with --refine."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_file


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_half_written_and_resumes() -> None:
    done = run_file(Path(__file__).with_name("kills.py"), 1, 3, "mla")
    assert done.returncode == 0, done.stdout + done.stderr
