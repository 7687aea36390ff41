"""How the threads of torch wait for each other."""

from __future__ import annotations

import os
import time
from pathlib import Path

_SPINS = "1000"  # turns of a waiting loop, which take some microseconds; libgomp's default is 300,000


def wait_wisely() -> None:
    """Choose how threads of GNU OpenMP wait, unless the user has: call it before torch is imported, which reads that.

    Without other work they spin for microseconds: if they slept at once, a conversion took 1.5 times longer. Beside other work
    they sleep at once: with libgomp's default products took 4 to 7 times longer there, and 1.4 times with a short spin.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    if _crowded():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def _crowded(state: Path = Path("/proc/loadavg")) -> bool:
    """Whether threads that run now leave fewer cores than this process has; False where the system does not say."""
    if not state.is_file():
        return False
    own = len(os.sched_getaffinity(0))
    running = []
    for _ in range(3):  # many run for a moment only
        running.append(int(state.read_text().split()[3].partition("/")[0]) - 1)  # without this one
        time.sleep(0.005)
    return min(running) + own > (os.cpu_count() or own)
