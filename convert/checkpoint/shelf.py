"""Files that an interrupted run leaves for the next one: some tensors of each layer, whole or not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save


class Shelf:
    """One file a layer.

    Args:
        directory: Where they lie.
        name: What their names begin with.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name

    def _path(self, layer: int) -> Path:
        return self._directory / f"{self._name}-{layer:05d}.safetensors"

    def has(self, layer: int) -> bool:
        """Whether a whole file lies there; one that lost its end with the power is made again."""
        try:
            with safe_open(self._path(layer), "pt"):
                return True
        except (FileNotFoundError, SafetensorError):
            return False

    def put(self, layer: int, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
        """Keep tensors, and what JSON can say of them."""
        path, tensors = self._path(layer), {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        # `save_file` would hide a full disk in an error of its own.
        path.with_suffix(".tmp").write_bytes(save(tensors, {"note": json.dumps(dict(note))}))
        path.with_suffix(".tmp").replace(path)

    def get(self, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What was put there."""
        with safe_open(self._path(layer), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            return tensors, json.loads(file.metadata()["note"])
