"""One converted layer: what is written of it, and what is noted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from convert.fidelity import layer_errors
from convert.job import Job
from convert.record import Attention, Record


@dataclass(frozen=True)
class Layer:
    """A layer under the names that the host's class expects.

    Attributes:
        tensors: Of its attention.
        note: For conversion.json: its index, its errors, and which tensors differ from the source's of that name.
    """

    tensors: dict[str, torch.Tensor]
    note: dict[str, Any]

    @classmethod
    def of(
        cls,
        job: Job,
        index: int,
        source: dict[str, torch.Tensor],
        before: Attention,
        after: Record,
        **more: Any,
    ) -> Layer:
        """Of a layer's source tensors, their record, and the record of the result; `more` is noted as well."""
        plan = job.plan
        tensors = plan.host.tensors(plan.family, after, plan.target, index)
        converted = [name for name, tensor in tensors.items() if not _is_copy(tensor, source.get(name))]
        note = {"layer": index, **layer_errors(before, after), **more, "converted": converted}
        return cls({name: tensor.cpu() for name, tensor in tensors.items()}, note)


class LayerShelf:
    """Where converted layers lie until they are written, one file each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, index: int) -> Path:
        return self._directory / f"layer-{index:05d}.safetensors"

    def has(self, index: int) -> bool:
        """Whether a whole file lies there; one that lost its end with the power is made again."""
        try:
            with safe_open(self._path(index), "pt"):
                return True
        except (FileNotFoundError, SafetensorError):
            return False

    def put(self, layer: Layer) -> None:
        path, tensors = self._path(layer.note["layer"]), {name: t.contiguous() for name, t in layer.tensors.items()}
        path.with_suffix(".tmp").write_bytes(save(tensors, {"note": json.dumps(layer.note)}))
        path.with_suffix(".tmp").replace(path)

    def get(self, index: int) -> Layer:
        with safe_open(self._path(index), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            return Layer(tensors, json.loads(file.metadata()["note"]))


def _is_copy(tensor: torch.Tensor, source: torch.Tensor | None) -> bool:
    if source is None or tensor.shape != source.shape:
        return False
    return tensor.data_ptr() == source.data_ptr() or torch.equal(tensor, source)
