"""How threads wait: as the user says, or by what else runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eval.machine import threads


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("crowded", [False, True])
def test_threads_sleep_at_once_beside_other_work(crowded: bool, unset: pytest.MonkeyPatch) -> None:
    unset.setattr(threads, "_crowded", lambda: crowded)
    threads.wait_wisely()
    assert ("OMP_WAIT_POLICY" in os.environ, "GOMP_SPINCOUNT" in os.environ) == (crowded, not crowded)


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_has_set_stays(name: str, unset: pytest.MonkeyPatch) -> None:
    unset.setenv(name, "7")
    threads.wait_wisely()
    assert {key for key in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if key in os.environ} == {name}


@pytest.mark.parametrize(("running", "cores", "crowded"), [(1, 2, False), (2, 2, True), (5, 8, False), (8, 8, True)])
def test_other_work_counts_where_it_leaves_too_few_cores(
    running: int, cores: int, crowded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    (tmp_path / "loadavg").write_text(f"0.20 0.18 0.12 {running}/80 11206\n")
    assert threads._crowded(tmp_path / "loadavg") == crowded
    assert not threads._crowded(tmp_path / "none")
