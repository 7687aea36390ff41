"""The command line under DeepSpeed. Before each step, it sees whether each of two processes holds half of AdamW's moments."""

from __future__ import annotations

import stopping

from convert.healing.training import Schedule, Trainer
from convert.healing.zero import ZeroTrainer

_step = Trainer.step


def _sharing(trainer: Trainer, step: int, schedule: Schedule) -> float:
    assert isinstance(trainer, ZeroTrainer)
    all_of_them = sum(weight.numel() for weight in trainer.weights().values())
    known = sum(state["exp_avg"].numel() for state in trainer.optimiser.optimizer.optimizer.state.values())
    assert known == 0 or all_of_them <= 2 * known < 1.01 * all_of_them  # filled up to be alike
    return _step(trainer, step, schedule)


Trainer.step = _sharing  # type: ignore[method-assign]
stopping.main()
