"""What a healing keeps on disk while it runs, so that one that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attention.errors import Failure
from convert.checkpoint.workdir import read_object
from convert.checkpoint.writer import sync_directory, sync_tree, write_shard, write_whole
from convert.healing.training import Point, State, Trainer

_STATE, _TRAINED, _PROGRESS, _BEST = "state-", "trained.pt", "progress.json", "best"


@dataclass
class Progressed:
    """How far a healing is.

    Attributes:
        rate: The learning rate that was chosen.
        tried: What each rate reached: its mean KL on the held-out blocks.
        curve: The points so far.
        step: Steps taken.
    """

    rate: float
    tried: dict[str, float]
    curve: list[Point] = field(default_factory=list)
    step: int = 0

    @property
    def best(self) -> Point:
        """The point with the smallest KL."""
        return min(self.curve, key=lambda point: point.kl)

    def as_dict(self) -> dict[str, Any]:
        return {"rate": self.rate, "tried": self.tried, "step": self.step, "curve": [point.as_dict() for point in self.curve]}

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Progressed:
        """The inverse of `as_dict`."""
        curve = [Point(**point) for point in found["curve"]]
        return cls(found["rate"], found["tried"], curve, found["step"])


class States:
    """The states of one healing, of which the last whole one counts. One process writes them, and all read them.

    Args:
        directory: Where they are.
        trainer: Whose state it is.
    """

    def __init__(self, directory: Path, trainer: Trainer) -> None:
        self._directory, self._trainer = directory, trainer

    def save(self, progressed: Progressed) -> None:
        """Keep the state, and forget those before it. If its point is the best so far, keep its weights, too."""
        state = self._trainer.state()
        if self._trainer.leads:
            if progressed.best.step == progressed.step:
                self._save_best(progressed.step, state.weights)
            new = self._directory / f"{_STATE}{progressed.step:08d}"
            temporary = new.with_name(f"{new.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                torch.save(state._asdict(), temporary / _TRAINED)
            except RuntimeError as error:  # which torch raises where a disk is full
                raise OSError(f"cannot write {temporary / _TRAINED}: {str(error).splitlines()[0][:160]}") from error
            write_whole(temporary / _PROGRESS, json.dumps(progressed.as_dict()).encode())
            sync_tree(temporary)
            temporary.rename(new)
            sync_directory(self._directory)
            for old in self._directory.glob(f"{_STATE}*"):
                if old != new:
                    shutil.rmtree(old, ignore_errors=True)
        self._trainer.accelerator.wait_for_everyone()

    def load(self) -> Progressed | None:
        """Go back to the last state; None if there is none.

        Raises:
            Failure: It is damaged.
        """
        for state in sorted(self._directory.glob(f"{_STATE}*"), reverse=True):
            found = read_object(state / _PROGRESS)
            if state.suffix != ".tmp" and found is not None:
                try:
                    self._trainer.load(State(**torch.load(state / _TRAINED, map_location="cpu", weights_only=True)))
                    return Progressed.parse(found)
                except Exception as error:  # unpickling can fail in any way
                    reason = " ".join(str(error).split())[:160]
                    raise Failure(f"{state} is damaged: {reason}", hint="begin again with --overwrite") from error
        return None

    def best(self, step: int) -> dict[str, torch.Tensor]:
        """The weights that were kept for this step, fp32 in main memory."""
        from safetensors.torch import load_file

        return load_file(self._best(step))

    def _save_best(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        """Keep the weights, and those of the best point before it, which the last state may name."""
        write_shard(self._best(step), weights, {name: weight.dtype for name, weight in weights.items()})
        for old in sorted(self._directory.glob(f"{_BEST}-*.safetensors"))[:-2]:
            old.unlink()

    def _best(self, step: int) -> Path:
        return self._directory / f"{_BEST}-{step:08d}.safetensors"
