"""Keeps models loaded from one part of a command to the next, so that each is loaded once."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eval.inputs.loading import compute_dtype, load
from eval.inputs.source import Source
from eval.machine.capacity import count_parameters
from eval.machine.device import compute_device, free_memory

_BYTES = 4  # of a weight: models run in fp32 on some devices

Opening = Callable[[Source, str, str], AbstractContextManager[Any]]


class Opened(AbstractContextManager["Opened"]):
    """Loads models as `eval.inputs.loading.load` does, and frees them when the block of this object ends.

    One that no block uses is freed before that, where memory does not suffice for the next one.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[Path, str, str], tuple[Any, contextlib.ExitStack]] = {}  # each with what frees it
        self._users = Counter[tuple[Path, str, str]]()

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
            self._models[key] = stack.enter_context(load(source, dtype, device)), stack
        self._users[key] += 1
        try:
            yield self._models[key][0]
        finally:
            self._users[key] -= 1

    def holds(self, source: Source) -> bool:
        """Whether a model of a checkpoint is loaded."""
        return any(files == source.files for files, *_ in self._models)

    def forget(self, source: Source) -> None:
        """Free the models of a checkpoint whose weights have changed."""
        self._free(key for key in self._models if key[0] == source.files)

    def free(self) -> None:
        """Free the models that no block uses."""
        self._free(key for key in self._models if not self._users[key])

    def _free(self, keys: Iterable[tuple[Path, str, str]]) -> None:
        for key in list(keys):
            self._models.pop(key)[1].close()
