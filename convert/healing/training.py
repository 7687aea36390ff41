"""Steps of AdamW on KL to the teacher, and measurements on held-out blocks.

`Accelerator` drives it, so that one process and several run the same code. Every process takes its part of each step's
blocks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from attention.errors import Failure
from convert.healing.batches import TrainingText
from convert.healing.heads import hidden_states, logits_of
from convert.healing.loss import Sums, distance, measured
from convert.healing.sharded import like, part, reshard, whole
from convert.healing.teacher import Teacher
from convert.healing.trainable import Trainable

CLIP = 1.0  # of the norm of all gradients
_BETAS, _DECAY = (0.9, 0.95), 0.01
_WARM = 0.01  # share of all steps


@dataclass(frozen=True)
class Schedule:
    """How steps are taken.

    Attributes:
        steps: How many.
        batch: Blocks per step, over all processes.
        micro_batch: Blocks per forward pass.
        rate: The learning rate after warm-up.
        seed: For the order of blocks.
    """

    steps: int
    batch: int
    micro_batch: int
    rate: float
    seed: int

    def share(self, step: int) -> float:
        """Of the rate, at a step: linear warm-up, then half a cosine down to zero."""
        warm = max(1, round(_WARM * self.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


class Distillation(nn.Module):
    """The student, its teacher and the loss in one module, so that wrappers around it see every use of both.

    Args:
        student: A causal LM of transformers.
        teacher: What it learns from.
        ce: The weight of the cross-entropy beside the KL.
        vocabulary: Of both.
        cache: Makes the student's cache of one pass, through whose rounding it trains; None for none.
    """

    def __init__(
        self, student: Any, teacher: Teacher, ce: float, vocabulary: int, cache: Callable[[], Cache] | None = None
    ) -> None:
        super().__init__()
        self.student, self.teacher, self._cache = student, teacher, cache
        self._ce, self._vocabulary = ce, vocabulary
        # The classes of layers, which FSDP reads: it shards layer by layer.
        self._no_split_modules = sorted({*(student._no_split_modules or ()), *teacher.layer_classes})

    def forward(self, ids: torch.Tensor, indices: torch.Tensor, measured_blocks: int | None = None) -> Any:
        """The summed loss of the tokens that have a predecessor; or `Sums` of the first blocks, if so asked.

        Args:
            ids: `[B, T]`, blocks of text.
            indices: `[B]`, their indices in it.
            measured_blocks: How many of them to measure.
        """
        student, count = self.student, len(ids) if measured_blocks is None else measured_blocks
        expected = self.teacher.predictions(ids, indices, count)
        states = hidden_states(student, ids, self._cache() if self._cache else None)
        hidden, targets = states[:count, :-1].flatten(0, 1), ids[:count, 1:].flatten()
        if measured_blocks is not None:
            return measured(hidden, lambda h: logits_of(student, h), expected, targets, self._vocabulary)
        outputs = student.get_output_embeddings()
        of_head = [p for p in (outputs.parameters() if outputs else ()) if p.requires_grad]
        return distance(hidden, lambda h: logits_of(student, h), expected, targets, self._vocabulary, self._ce, of_head)


@dataclass(frozen=True)
class Point:
    """One point of the curve: what held-out blocks say after some steps.

    Attributes:
        step: Steps taken.
        tokens: Tokens seen.
        rate: The learning rate of the last step.
        train_loss: Mean loss of the steps since the last point; None before the first step.
        kl: Mean KL to the teacher on the held-out blocks; with `top_k`, as of a `Prediction` of the k largest.
        loss_nats: Mean loss over the teacher's there.
    """

    step: int
    tokens: int
    rate: float
    train_loss: float | None
    kl: float
    loss_nats: float


class NotFinite(Failure):
    """A loss is not finite."""


class State(NamedTuple):
    """Where a training is.

    Attributes:
        weights: What trains, by name.
        optimiser: Its `state_dict`.
    """

    weights: dict[str, torch.Tensor]
    optimiser: dict[str, Any]


class Trainer:
    """Trains a student in place.

    Args:
        accelerator: Of accelerate.
        distillation: The student with its loss; parameters that train require gradients.
        text: The blocks.
        schedule: How steps are taken.
        what: What trains of the student.
        autocast: Makes a context in which the student and its teacher compute.

    Attributes:
        module: The prepared module.
    """

    def __init__(
        self,
        accelerator: Any,
        distillation: Distillation,
        text: TrainingText,
        schedule: Schedule,
        what: Trainable,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.accelerator, self._text, self.schedule, self._what = accelerator, text, schedule, what
        self._autocast = autocast
        weights = {name: p for name, p in distillation.student.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in weights.values() if p.ndim > 1], "weight_decay": _DECAY},
            {"params": [p for p in weights.values() if p.ndim < 2], "weight_decay": 0.0},  # biases, gains: constants among them
        ]
        optimiser = torch.optim.AdamW([group for group in groups if group["params"]], lr=schedule.rate, betas=_BETAS)
        masks = {name: mask for name, mask in what.fixed.items() if name in weights and bool(mask.any())}
        self.module, self.optimiser = accelerator.prepare(distillation, optimiser)
        self._student = accelerator.unwrap_model(self.module).student
        self._weights = {name: p for name, p in self._student.named_parameters() if p.requires_grad}
        self._masks = {name: part(like(mask, self._weights[name])) for name, mask in masks.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of what trains, by name; of what this process holds of it."""
        return {name: p.detach().clone() for name, p in self._weights.items()}

    def restore(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Go back to such a copy, or to whole weights; forget gradients and what the optimiser knows."""
        self.optimiser.zero_grad()
        reshard(self.module)
        with torch.no_grad():
            for name, p in self._weights.items():
                p.copy_(like(weights[name], p))
        self.optimiser.optimizer.state.clear()

    def written(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of the checkpoint for whole values of what trains. Every process calls this."""
        reshard(self.module)
        return self._what.written(weights)

    def put(self, written: Mapping[str, torch.Tensor]) -> None:
        """Let the student compute with weights of the checkpoint. It does not train after that."""
        reshard(self.module)
        parameters = dict(self._student.named_parameters())
        with torch.no_grad():
            for name, weight in self._what.as_parameters(written).items():
                parameters[name].copy_(like(weight, parameters[name]))

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and reports."""
        return bool(self.accelerator.is_main_process)

    def state(self) -> State:
        """Weights that train and the optimiser's state, whole and in main memory; it may share that with what trains.

        Every process calls this, and the first one gets it.
        """
        optimiser = self.optimiser.optimizer.state_dict()
        found = {index: self._kept(values) for index, values in optimiser["state"].items()}
        return State(self._kept(self._weights), optimiser | {"state": found})

    def _kept(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors in main memory; none in processes that do not write."""
        found = {}
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if self.leads:
                found[name] = gathered.cpu()
        return found

    def load(self, state: State) -> None:
        """Go back to such a state."""
        self.restore(state.weights)
        optimiser = self.optimiser.optimizer
        parameters = [p for group in optimiser.param_groups for p in group["params"]]
        found = {
            index: {name: like(value, parameters[index]) if value.ndim else value for name, value in values.items()}
            for index, values in state.optimiser["state"].items()
        }
        optimiser.load_state_dict(state.optimiser | {"state": found})

    def step(self, step: int, schedule: Schedule) -> float:
        """Take one step.

        Returns:
            The mean loss of the step's tokens before it.

        Raises:
            NotFinite: It is not finite.
        """
        for group in self.optimiser.param_groups:
            group["lr"] = schedule.rate * schedule.share(step)
        indices = self._text.batch(step, schedule.batch, schedule.seed)
        tokens, total = len(indices) * (self._text.blocks.shape[1] - 1), torch.zeros((), dtype=torch.float64)
        world = self.accelerator.num_processes
        parts = list(self._own(indices).split(schedule.micro_batch))
        for index, some in enumerate(parts):
            # FSDP would keep whole gradients until the last part.
            together = index == len(parts) - 1 or self.accelerator.is_fsdp2
            with contextlib.nullcontext() if together else self.accelerator.no_sync(self.module):
                loss = self._forward(some)
                total += loss.detach().double().cpu()
                self.accelerator.backward(loss * (world / tokens))  # processes' gradients are averaged
        mean = float(self._summed(total)) / tokens
        if not math.isfinite(mean):
            raise NotFinite(f"the loss is {mean} at step {step + 1}", hint="begin again with a smaller --lr and --overwrite")
        self._update()
        return mean

    def _update(self) -> None:
        """Let the optimiser take a step by the gradients, and forget them."""
        for name, mask in self._masks.items():
            grad = self._weights[name].grad
            assert grad is not None
            part(grad).masked_fill_(mask, 0)
        self.accelerator.clip_grad_norm_(list(self._weights.values()), CLIP)
        self.optimiser.step()
        self.optimiser.zero_grad()

    def measure(self) -> Sums:
        """Sums over the held-out blocks.

        Raises:
            NotFinite: They are not finite.
        """
        indices, sums = self._text.held_out, Sums()
        own = self._own(indices)
        # All processes run the model equally often: one whose part is smaller takes a block that does not count.
        missing = -(-len(indices) // self.accelerator.num_processes) - len(own)
        left = len(own)
        with torch.no_grad():
            for some in torch.cat((own, indices[:missing])).split(self.schedule.micro_batch):
                sums = sums.plus(self._forward(some, min(left, len(some))))
                left -= min(left, len(some))
        values = torch.tensor((sums.kl, sums.student, sums.teacher, sums.tokens), dtype=torch.float64)
        kl, student, teacher, tokens = self._summed(values).tolist()
        if not math.isfinite(kl + student + teacher):
            raise NotFinite(
                f"on held-out blocks, KL is {kl / tokens} and the losses are {student / tokens} and {teacher / tokens}",
                hint="begin again with a smaller --lr and --overwrite; if it is so before the first step, a model is damaged",
            )
        return Sums(kl, student, teacher, int(tokens))

    def _forward(self, indices: torch.Tensor, measured_blocks: int | None = None) -> Any:
        ids = self._text.blocks[indices].to(self.accelerator.device)
        with self._autocast():  # accelerate's FSDP does not autocast
            return self.module(ids, indices, measured_blocks)

    def _own(self, indices: torch.Tensor) -> torch.Tensor:
        """This process's part of the indices `[n]` of blocks."""
        return indices[self.accelerator.process_index :: self.accelerator.num_processes]

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return values
        found: torch.Tensor = self.accelerator.reduce(values.to(self.accelerator.device)).cpu()
        return found
