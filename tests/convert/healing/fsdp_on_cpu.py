"""The command line under FSDP 2 on CPUs, where torch shards as well; accelerate offers that for accelerators alone."""

import os
from typing import Any

import stopping
from accelerate.state import AcceleratorState, DistributedType

from convert.healing.team import whole
from convert.healing.trainer import HealingTrainer

os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
_begin, _loss = AcceleratorState.__init__, HealingTrainer.compute_loss


def _sharded(state: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    _begin(state, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


def _sharding(trainer: HealingTrainer, *given: Any, **named: Any) -> Any:
    weights: list[Any] = [weight for weight in trainer.weights().values() if len(weight) % 2 == 0]
    assert all(2 * weight.to_local().numel() == whole(weight).numel() for weight in weights)
    return _loss(trainer, *given, **named)


AcceleratorState.__init__, HealingTrainer.compute_loss = _sharded, _sharding
stopping.main()
