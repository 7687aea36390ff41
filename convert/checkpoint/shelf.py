"""Files that an interrupted run leaves for the next one: some tensors of each layer, whole or not there."""

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
    """One file a layer. Its checksum lies in its own header: a file that has changed since it was put there does not count.

    Args:
        directory: Where they lie.
        name: What their names begin with.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._whole: set[int] = set()  # what this object has put there or checked

    def _path(self, layer: int) -> Path:
        return self._directory / f"{self._name}-{layer:05d}.safetensors"

    def has(self, layer: int) -> bool:
        """Whether a whole file lies there; one that lost its end or was damaged is to be made again."""
        if not self._path(layer).is_file():
            self._whole.discard(layer)
        elif layer not in self._whole and self._read(layer) is not None:
            self._whole.add(layer)
        return layer in self._whole

    def put(self, layer: int, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
        """Keep tensors, and what JSON can say of them."""
        tensors, text = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, json.dumps(dict(note))
        # `save_file` would hide a full disk in an error of its own.
        # One entry: safetensors writes several in no fixed order.
        noted = json.dumps({"sha256": _checksum(tensors, text), "note": text})
        write_whole(self._path(layer), save(tensors, {"noted": noted}))
        self._whole.add(layer)

    def get(self, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What was put there.

        Raises:
            Failure: It is damaged, or gone.
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
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
                noted = json.loads(file.metadata()["noted"])
            text = noted["note"]
            if layer not in self._whole and noted["sha256"] != _checksum(tensors, text):
                return None
            return tensors, dict(json.loads(text))
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError):
            return None


def _checksum(tensors: Mapping[str, torch.Tensor], note: str) -> str:
    """SHA-256 of all that `get` returns, in hexadecimal."""
    digest = hashlib.sha256(note.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
