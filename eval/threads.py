"""How the threads of torch wait for each other."""

from __future__ import annotations

import os


def wait_passively() -> None:
    """Let waiting threads sleep, unless the user has set OMP_WAIT_POLICY. Call it before torch is imported, which reads that.

    By default OpenMP's threads spin. Beside other work on the same cores, products then took 4 to 7 times longer.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
