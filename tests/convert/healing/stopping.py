"""The command line. With STOP_AT in the environment, a healing is interrupted before that step."""

from __future__ import annotations

import os
from typing import Any

from convert.command import cli
from convert.healing.training import Trainer


def main() -> None:
    step = Trainer.step

    def stopping(trainer: Trainer, at: int, schedule: Any) -> float:
        if at == int(os.environ.get("STOP_AT", "-1")):
            raise KeyboardInterrupt
        return step(trainer, at, schedule)

    Trainer.step = stopping  # type: ignore[method-assign]
    cli.main(prog_name="convert")


if __name__ == "__main__":
    main()
