"""States of a running healing on disk, so that one that was stopped goes on as if it had not been."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from convert.checkpoint.writer import write_shard
from convert.healing.training import Point, State, Trainer
from eval.inputs.sealed import checksum, give_name, seal, sync_tree, unsealed

_log = logging.getLogger("kvfold")
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

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Progressed:
        """The inverse of `dataclasses.asdict`."""
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
        self._hashes: dict[int, str] = {}  # of the weights that were kept for some steps

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
            hashes = {"trained": checksum(temporary / _TRAINED), "best": self._hashes.get(progressed.best.step)}
            seal(temporary / _PROGRESS, {"progress": asdict(progressed), "hashes": hashes})
            sync_tree(temporary)
            shutil.rmtree(new, ignore_errors=True)  # a damaged one
            give_name(temporary, new)
            for old in self._directory.glob(f"{_STATE}*"):
                if old != new:
                    shutil.rmtree(old, ignore_errors=True)
        self._trainer.accelerator.wait_for_everyone()

    def load(self) -> Progressed | None:
        """Go back to the last state that is whole; None if there is none."""
        for state in sorted(self._directory.glob(f"{_STATE}*"), reverse=True):
            if state.suffix == ".tmp":
                continue
            if (progressed := self._whole(state)) is not None:
                self._trainer.load(State(**torch.load(state / _TRAINED, map_location="cpu", weights_only=True)))
                return progressed
            if self._trainer.leads:
                _log.warning("%s is damaged, so training goes on from an earlier state, or begins again", state)
        return None

    def _whole(self, state: Path) -> Progressed | None:
        """A state's note; None if it, or the best weights that it names, are not as they were written."""
        try:
            found = unsealed(state / _PROGRESS)
            if found is None or found["hashes"]["trained"] != checksum(state / _TRAINED):
                return None
            progressed = Progressed.parse(found["progress"])
            if (best := progressed.best.step) and found["hashes"]["best"] != checksum(self._best(best)):
                return None
        except (OSError, LookupError, TypeError, ValueError):
            return None
        self._hashes[progressed.best.step] = found["hashes"]["best"]
        return progressed

    def best(self, step: int) -> dict[str, torch.Tensor]:
        """The weights that were kept for this step, fp32 in main memory."""
        return load_file(self._best(step))

    def _save_best(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        """Keep the weights, and those of the best point before it, which the last state may name."""
        kept = {name: weight.dtype for name, weight in weights.items()}
        self._hashes[step] = write_shard(self._best(step), weights, kept)
        for old in sorted(self._directory.glob(f"{_BEST}-*.safetensors"))[:-2]:
            old.unlink()

    def _best(self, step: int) -> Path:
        return self._directory / f"{_BEST}-{step:08d}.safetensors"
