"""The command line. It also says what was made, and with STOP_AT in the environment interrupts a healing before that step."""

import json
import os
import sys
from typing import Any

from convert.command import cli
from convert.healing import run
from convert.healing.trainer import HealingTrainer


def main() -> None:
    compute_loss, execute = HealingTrainer.compute_loss, run.execute

    def stopping(trainer: HealingTrainer, *given: Any, **named: Any) -> Any:
        if trainer.state.global_step == int(os.environ.get("STOP_AT", "-1")):
            raise KeyboardInterrupt
        return compute_loss(trainer, *given, **named)

    def saying(*given: Any) -> run.Healing:
        healing = execute(*given)
        print(f"returned: {json.dumps(healing.provenance, sort_keys=True)}", file=sys.stderr)
        return healing

    run.execute = saying
    HealingTrainer.compute_loss = stopping  # type: ignore[method-assign]
    cli.main(prog_name="convert")


if __name__ == "__main__":
    main()
