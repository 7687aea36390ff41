"""The source's predictions for each block of a text, kept on disk, so that it need not be in memory while a student trains."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from attention.errors import Failure, Refusal
from convert.checkpoint.writer import require_finite
from convert.healing.batches import TrainingText
from convert.healing.loss import Expected, Prediction, chunks
from convert.healing.plan import HealPlan
from convert.healing.teacher import Teacher
from convert.healing.team import Team
from eval.inputs.sealed import read_object, seal_tensors, unsealed_tensors, write_whole

_MADE_OF = "teacher.json"
_HIDDEN = ".writing-"
_TOGETHER = 1000  # blocks in one directory
_VALUES, _TOKENS, _LOSSES = "log_probabilities", "tokens", "losses"
_DTYPES = {_VALUES: torch.float32, _TOKENS: torch.int32, _LOSSES: torch.float32}


class TeacherCache:
    """A directory with a file for each block: the largest log-probabilities of its tokens.

    A file has its name only once it is whole, whoever else writes it, so several runs and several processes can fill it.

    Args:
        directory: Where it is; made if it does not exist.
        made_of: What its content depends on, as JSON has it.

    Raises:
        Refusal: The directory has another content.
    """

    def __init__(self, directory: Path, made_of: dict[str, Any]) -> None:
        self._directory = directory
        before = read_object(directory / _MADE_OF)
        if before is None and directory.exists() and (not directory.is_dir() or any(_files(directory))):
            raise Refusal(f"{directory} is not a teacher cache", hint="--teacher-cache names a directory of its own")
        if before is not None and (other := [name for name in made_of if made_of[name] != before.get(name)]):
            raise Refusal(
                f"the cache {directory} was made with another {' and another '.join(other)}",
                hint="choose another directory with --teacher-cache, or remove this one",
            )
        if before is None:
            directory.mkdir(parents=True, exist_ok=True)
            with self._writing(directory / _MADE_OF) as file:
                write_whole(file, json.dumps(made_of).encode())

    @classmethod
    def of(cls, plan: HealPlan, directory: Path, text: TrainingText, team: Team) -> TeacherCache:
        """The cache of a plan's teacher on a text, made if it is not there."""
        made_of = {
            "model": plan.teacher.raw,
            "weights": plan.teacher.fingerprint,
            "text": text.tokens.hash,
            "context": plan.context,
            "top-k": plan.options.top_k,
            "arithmetic": f"{team.accelerator.device.type}, {'bf16' if team.bfloat16 else 'no'}",
        }
        return cls(directory, json.loads(json.dumps(made_of)))

    def missing(self, indices: Sequence[int]) -> list[int]:
        """Those of some blocks that are not there yet."""
        return [index for index in indices if not self._file(index).is_file()]

    def require_space(self, blocks: int, context: int, top_k: int) -> None:
        """Fail if the disk cannot hold so many more blocks."""
        needed = blocks * (context - 1) * (top_k * 8 + 4)
        if needed > (free := shutil.disk_usage(self._directory).free):
            raise Failure(
                f"no space: {self._directory} has {free / 1e9:.3f} GB free, what the teacher says takes {needed / 1e9:.3f} GB",
                hint="give a smaller --top-k, or a --teacher-cache on another disk",
            )

    def add(self, teacher: Teacher, text: TrainingText, indices: Sequence[int], vocabulary: int, device: str) -> None:
        """Let a teacher with so many words say what it has to say of some blocks, and keep that."""
        ids = text.blocks[list(indices)].to(device)
        expected = teacher.predictions(ids, torch.tensor(indices), len(ids))
        for index, parts in zip(indices, _of_each(expected, ids, vocabulary), strict=True):
            self._file(index).parent.mkdir(exist_ok=True)
            for name, part in parts.items():
                require_finite(f"{name} of block {index}", part)
            with self._writing(self._file(index)) as file:
                seal_tensors(file, parts, {"block": index})

    @contextlib.contextmanager
    def _writing(self, file: Path) -> Iterator[Path]:
        """Where to write a file, which then takes the place of this one."""
        with tempfile.TemporaryDirectory(dir=self._directory, prefix=_HIDDEN) as where:
            yield Path(where, file.name)
            Path(where, file.name).replace(file)

    def read(self, index: int) -> tuple[torch.Tensor, ...]:
        """The predictions for a block: the fields of a `Prediction`.

        Raises:
            Failure: Its file is damaged.
        """
        found = unsealed_tensors(file := self._file(index))
        if found is None or found[1] != {"block": index}:
            raise Failure(
                f"{file} is damaged, or is of another block than {index}",
                hint="remove it, and repeat the command with --resume",
            )
        values, tokens, losses = (found[0][name] for name in _DTYPES)
        return values, tokens.long(), losses

    def _file(self, index: int) -> Path:
        return self._directory / f"{index // _TOGETHER:05d}" / f"{index:08d}.safetensors"


def _files(directory: Path) -> Iterator[Path]:
    """The files in a directory, but for those that another run is about to put there."""
    return (path for path in directory.iterdir() if path.name != _MADE_OF and not path.name.startswith(_HIDDEN))


def _of_each(expected: Expected, ids: torch.Tensor, vocabulary: int) -> Iterator[dict[str, torch.Tensor]]:
    """The entry of each of the blocks `ids [B, T]`."""
    tokens = ids.shape[1] - 1
    for block in range(len(ids)):
        first = block * tokens
        found = [expected(slice(first + chunk.start, first + chunk.stop)) for chunk in chunks(tokens, vocabulary)]
        parts = (torch.cat([getattr(part, name) for part in found]).cpu() for name in Prediction._fields)
        yield {name: part.to(dtype) for (name, dtype), part in zip(_DTYPES.items(), parts, strict=True)}


class Kept(Teacher):
    """The source's predictions.

    Args:
        cache: With all blocks that the training sees.
    """

    def __init__(self, cache: TeacherCache) -> None:
        super().__init__()
        self._cache = cache

    def predictions(self, ids: torch.Tensor, indices: torch.Tensor, count: int) -> Expected:
        found = [self._cache.read(index) for index in indices[:count].tolist()]
        said = [torch.cat(parts).to(ids.device) for parts in zip(*found, strict=True)]
        return lambda chunk: Prediction(*(part[chunk] for part in said))
