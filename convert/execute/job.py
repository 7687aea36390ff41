"""A plan under way: what is read, where work lies, and where it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention.record import Attention, FactoredAttention
from convert.calibration.stream import LayerStream
from convert.checkpoint.reader import Reader, TensorInfo
from convert.checkpoint.workdir import WorkDirectory
from convert.checkpoint.writer import require_finite
from convert.methods.statistics import Statistics
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationText
from eval.progress import Progress


@dataclass(frozen=True)
class Job:
    """One conversion.

    Attributes:
        plan: What is to be done.
        reader: Of the source.
        work: The work directory.
        text: What to calibrate on, if the plan calibrates.
        device: Where layers run and are changed.
        progress: Who is told how far it is.
        statistics_in: Where statistics of the source lie.
    """

    plan: Plan
    reader: Reader
    work: WorkDirectory
    text: CalibrationText | None
    device: torch.device
    progress: Progress
    statistics_in: Path

    def assumed(self, layer: int) -> Statistics:
        """What is known of a layer's input without text: the gains of its norm."""
        plan = self.plan
        norm, found = plan.family.input_norm(layer), self.reader.infos
        if norm is None:
            return Statistics.assumed(plan.source.config.hidden_size)
        tensors = {name: self.reader[name] for kind in ("weight", "bias") if (name := f"{norm.name}.{kind}") in found}
        for name, tensor in tensors.items():
            require_finite(name, tensor)
        gain = tensors.get(f"{norm.name}.weight")
        gain = None if gain is None else gain.double() + norm.gain_offset
        return Statistics.assumed(plan.source.config.hidden_size, gain, tensors.get(f"{norm.name}.bias"))

    def read_layer(self, layer: int) -> tuple[dict[str, torch.Tensor], Attention]:
        """The tensors of a layer's attention under their names, and their record, as methods see it.

        Raises:
            Failure: One of them is not finite.
        """
        config = self.plan.source.config
        tensors = {name: self.reader[name].to(self.device) for name in self.plan.family.shapes(config, layer)}
        for name, tensor in tensors.items():
            require_finite(name, tensor)
        record = self.plan.family.split(tensors, config, layer)
        return tensors, record.expanded() if isinstance(record, FactoredAttention) else record

    def stream(
        self,
        text: CalibrationText,
        config: Any,
        module: Callable[[int], str],
        read: Callable[[str], torch.Tensor],
        infos: Mapping[str, TensorInfo],
        spool: Path,
    ) -> LayerStream:
        """Some model's layers over the calibration text.

        Args:
            text: Its blocks.
            config: Of the model.
            module: Layer → the path of its attention.
            read: Tensor name → tensor.
            infos: Of all tensors.
            spool: The beginning of the files with its inputs.
        """
        modules = [module(layer) for layer in range(self.plan.before.num_layers)]
        trusted = self.plan.source.trust_remote_code
        return LayerStream(config, modules, read, infos, text.blocks, spool, self.device, trusted)
