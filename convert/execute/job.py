"""A plan in progress: its source, its work directory and its device."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from attention.record import Attention, FactoredAttention
from attention.spec import AttentionSpec
from convert.checkpoint.writer import require_finite
from convert.execute.manifest import Manifest
from convert.methods.statistics import Statistics
from convert.output.writing import Work
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationText
from convert.planning.targets import Choice
from eval.terminal.progress import Progress


@dataclass(frozen=True)
class Job:
    """One conversion in progress.

    Attributes:
        plan: The plan to carry out.
        manifest: The tensors to write, from those of the source.
        work: The work directory.
        text: The calibration text, if the plan calibrates.
        progress: Called with the progress of each stage.
        statistics_in: The directory for statistics of the source.
        choice: What the text has chosen for all layers, once it has.
    """

    plan: Plan
    manifest: Manifest
    work: Work
    text: CalibrationText | None
    progress: Progress
    statistics_in: Path
    choice: Choice = field(default_factory=Choice)

    @property
    def spec(self) -> AttentionSpec:
        """The sizes of the result."""
        return self.plan.sized(self.choice.ranks)

    def assumed(self, layer: int) -> Statistics:
        """The statistics of a layer's input that are assumed without text, from the gains of its norm."""
        assumed = Statistics.assumed(self.plan.source.decoder.hidden_size, *self._input_norm(layer))
        if not self.plan.reads_projections:
            return assumed
        projections = self.read_layer(layer)[1].projections
        assert projections is not None
        return assumed.to(self.plan.runs_on).behind(projections)

    def input_gain(self, layer: int) -> torch.Tensor:
        """`[E]`, the gains of the norm of a layer's input; ones without."""
        gain, _ = self._input_norm(layer)
        return torch.ones(self.plan.source.decoder.hidden_size, dtype=torch.float64) if gain is None else gain

    def _input_norm(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gain and bias of the norm of a layer's input, `[E]` each, fp64; None for what it lacks."""
        norm, found = self.plan.family.input_norm(layer), self.manifest.reader.infos
        if norm is None:
            return None, None
        names = (norm.name, f"{norm.name.removesuffix('.weight')}.bias")
        tensors = {name: self.manifest.reader[name] for name in names if name in found}
        for name, tensor in tensors.items():
            require_finite(name, tensor)
        gain, bias = map(tensors.get, names)
        return None if gain is None else gain.double() + norm.offset, bias

    def read_layer(self, layer: int) -> tuple[dict[str, torch.Tensor], Attention]:
        """The tensors of a layer's attention by name, and their record in the form that methods take.

        Raises:
            Failure: One of them is not finite.
        """
        tensors = {name: self.manifest.reader[name].to(self.plan.runs_on) for name in self.plan.family.shapes(layer)}
        for name, tensor in tensors.items():
            require_finite(name, tensor)
        record = self.plan.family.split(tensors, layer)
        record = record.expanded() if isinstance(record, FactoredAttention) else record
        return tensors, record.on_projected_inputs(self.plan.family.traits.clip) if self.plan.reads_projections else record

    @property
    def shows_attention(self) -> bool:
        """Whether the source's attention over the calibration text is the softmax of its records' logits."""
        return self.text is not None and not self.plan.unmodelled
