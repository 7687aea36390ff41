"""Teachers: the interface, and the source as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from convert.healing.heads import hidden_states, logits_of
from convert.healing.loss import Expected, Prediction


class Teacher(nn.Module, ABC):
    """Predicts the tokens of blocks.

    Attributes:
        layer_classes: The names of its layers' classes.
    """

    layer_classes: tuple[str, ...] = ()

    @abstractmethod
    def predictions(self, ids: torch.Tensor, indices: torch.Tensor, count: int) -> Expected:
        """Its predictions for the first `count` of the blocks `ids [B, T]`: of their tokens that have a predecessor, in order.

        Args:
            ids: The blocks, on the device of the student.
            indices: `[B]`, their indices in the text.
            count: Of how many.
        """


class Running(Teacher):
    """The source itself.

    Args:
        model: A causal LM of transformers, without gradients.
        top_k: How many of its probabilities count; None for all.
    """

    def __init__(self, model: Any, top_k: int | None) -> None:
        super().__init__()
        self.model, self._top_k = model, top_k
        self.layer_classes = tuple(model._no_split_modules or ())

    def predictions(self, ids: torch.Tensor, indices: torch.Tensor, count: int) -> Expected:
        with torch.no_grad():
            states = hidden_states(self.model, ids)[:count, :-1].flatten(0, 1)
        targets = ids[:count, 1:].flatten()
        return lambda chunk: Prediction.of(logits_of(self.model, states[chunk]), targets[chunk], self._top_k)
