"""Keeps models loaded from one part of a command to the next, so that each is loaded once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.inputs.loading import compute_dtype, load
from eval.inputs.source import Source
from eval.machine.capacity import count_parameters
from eval.machine.device import compute_device, free_memory

_BYTES = 4  # of a weight: models run in fp32 on some devices

Opening = Callable[[Source, str, str], AbstractContextManager[Any]]


@dataclass
class _Model:
    """A loaded model, what frees it, and how many blocks use it."""

    model: Any
    close: Callable[[], None]
    users: int = 0


class Opened:
    """Loads models as `eval.inputs.loading.load` does, and frees them when the block of this object ends.

    One that no block uses is freed before that, where memory does not suffice for the next one.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[Path, str, str], _Model] = {}

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    @contextlib.contextmanager
    def __call__(self, source: Source, dtype: str = "auto", device: str = "auto") -> Iterator[Any]:
        """The model of a checkpoint. Arguments and errors as of `load`."""
        where = compute_device(device)
        key = source.files, compute_dtype(source, dtype, str(where)), str(where)
        if key not in self._models:
            if _BYTES * count_parameters(source.config) > free_memory(where):
                self.free()
            stack = contextlib.ExitStack()
            self._models[key] = _Model(stack.enter_context(load(source, dtype, device)), stack.close)
        found = self._models[key]
        found.users += 1
        try:
            yield found.model
        finally:
            found.users -= 1

    def holds(self, source: Source) -> bool:
        """Whether a model of a checkpoint is loaded."""
        return any(files == source.files for files, *_ in self._models)

    def forget(self, source: Source) -> None:
        """Free the models of a checkpoint whose weights have changed."""
        for key in [key for key in self._models if key[0] == source.files]:
            self._models.pop(key).close()

    def free(self) -> None:
        """Free the models that no block uses."""
        for key in [key for key, one in self._models.items() if not one.users]:
            self._models.pop(key).close()
