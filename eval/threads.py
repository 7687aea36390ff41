"""How the threads of torch wait for each other."""

from __future__ import annotations

import os


def spin_briefly() -> None:
    """Let waiting threads of GNU OpenMP spin for microseconds, then sleep, unless the user has set how they wait.

    Call it before torch is imported, which reads that. By default they spin for a millisecond: beside other work on the same
    cores, products then took 4 to 7 times longer. Without any spinning, a conversion on an idle machine took 1.4 times longer.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
