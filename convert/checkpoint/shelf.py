"""Files that an interrupted run leaves for the next one: some tensors per layer, complete or absent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attention.errors import Failure
from eval.inputs.sealed import Content, seal_tensors, unsealed_tensors


class Shelf:
    """One file per layer: a file that has changed since it was written does not count.

    Args:
        directory: The directory of the files.
        name: The start of their names.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._whole: set[int] = set()  # layers that this object has written or checked

    def _path(self, layer: int) -> Path:
        return self._directory / f"{self._name}-{layer:05d}.safetensors"

    def has(self, layer: int) -> bool:
        """Whether the layer's file exists and is undamaged."""
        if not self._path(layer).is_file():
            self._whole.discard(layer)
        elif layer not in self._whole and unsealed_tensors(self._path(layer)) is not None:
            self._whole.add(layer)
        return layer in self._whole

    def put(self, layer: int, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
        """Write a layer's tensors and a JSON note."""
        seal_tensors(self._path(layer), tensors, note)
        self._whole.add(layer)

    def get(self, layer: int) -> Content:
        """The tensors and the note of a layer.

        Raises:
            Failure: The file is damaged or missing.
        """
        found = unsealed_tensors(self._path(layer), known=layer in self._whole)
        if found is None:
            raise Failure(
                f"{self._path(layer)} is damaged, or was removed while it was in use",
                hint="the same command with --resume makes it again",
            )
        return found
