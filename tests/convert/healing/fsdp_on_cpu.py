"""The command line under FSDP 2 on CPUs, where torch shards as well; accelerate offers that for accelerators alone."""

from __future__ import annotations

import os
from typing import Any

import stopping
from accelerate.state import AcceleratorState, DistributedType

from convert.healing.sharded import part, whole
from convert.healing.training import Schedule, Trainer

os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
_begin = AcceleratorState.__init__


def _sharded(state: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    _begin(state, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


_step = Trainer.step


def _sharding(trainer: Trainer, step: int, schedule: Schedule) -> float:
    assert all(
        2 * part(weight).numel() == whole(weight).numel() for weight in trainer.weights().values() if len(weight) % 2 == 0
    )
    return _step(trainer, step, schedule)


AcceleratorState.__init__, Trainer.step = _sharded, _sharding
stopping.main()
