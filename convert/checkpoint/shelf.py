"""Files that an interrupted run leaves for the next one: some tensors per layer, complete or absent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from attention.errors import Failure
from convert.checkpoint.writer import write_whole

_Content = tuple[dict[str, torch.Tensor], dict[str, Any]]


class Shelf:
    """One file per layer, with its checksum in its header: a file that has changed since it was written does not count.

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
        elif layer not in self._whole and self._read(layer) is not None:
            self._whole.add(layer)
        return layer in self._whole

    def put(self, layer: int, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
        """Write a layer's tensors and a JSON note."""
        tensors, text = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, json.dumps(dict(note))
        # `save_file` would hide a full disk behind its own error.
        # One metadata entry, because safetensors writes several in no fixed order.
        noted = json.dumps({"sha256": _checksum(tensors, text), "note": text})
        write_whole(self._path(layer), save(tensors, {"noted": noted}))
        self._whole.add(layer)

    def get(self, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors and the note of a layer.

        Raises:
            Failure: The file is damaged or missing.
        """
        found = self._read(layer)
        if found is None:
            raise Failure(
                f"{self._path(layer)} is damaged, or was removed while it was in use",
                hint="the same command with --resume makes it again",
            )
        return found

    def _read(self, layer: int) -> _Content | None:
        try:
            with safe_open(self._path(layer), "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
                noted = json.loads(file.metadata()["noted"])
            text = noted["note"]
            if layer not in self._whole and noted["sha256"] != _checksum(tensors, text):
                return None
            return tensors, dict(json.loads(text))
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError):
            return None


def _checksum(tensors: Mapping[str, torch.Tensor], note: str) -> str:
    """SHA-256 of everything that `get` returns, in hexadecimal."""
    digest = hashlib.sha256(note.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
