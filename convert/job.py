"""A plan under way: what is read, where work lies, and where it is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from convert.checkpoint import Reader, require_finite
from convert.plan import Plan
from convert.record import Attention
from convert.workdir import WorkDirectory
from eval.text import Tokens


@dataclass(frozen=True)
class Job:
    """One conversion.

    Attributes:
        plan: What is to be done.
        reader: Of the source.
        work: The work directory.
        tokens: What to calibrate on, whole blocks, if the plan calibrates.
        device: Where layers run and are changed.
        quiet: No progress bars.
    """

    plan: Plan
    reader: Reader
    work: WorkDirectory
    tokens: Tokens | None
    device: torch.device
    quiet: bool

    @property
    def blocks(self) -> torch.Tensor | None:
        """`[n, T]` token ids to calibrate on."""
        calibration = self.plan.calibration
        return self.tokens.ids.view(-1, calibration.context or 1) if self.tokens and calibration else None

    def read_layer(self, layer: int) -> tuple[dict[str, torch.Tensor], Attention]:
        """The tensors of a layer's attention under their names, and their record.

        Raises:
            Failure: One of them is not finite.
        """
        config = self.plan.source.config
        tensors = {name: self.reader[name].to(self.device) for name in self.plan.family.shapes(config, layer)}
        for name, tensor in tensors.items():
            require_finite(name, tensor)
        return tensors, self.plan.family.split(tensors, config, layer)
