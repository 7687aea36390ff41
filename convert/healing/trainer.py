"""Steps of AdamW on KL to the teacher, by `transformers.Trainer`: in one process, or in several by DDP or FSDP 2.

What is healing's own: which blocks a step sees, the schedule, the values that must stay, and that a checkpoint holds what
trains and nothing else, whole, so that a healing may be resumed under another launch.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, StackDataset, Subset
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainingArguments, integrations

from attention.errors import Failure, Refusal, one_line
from convert.checkpoint.writer import write_shard
from convert.healing.loss import Distillation
from convert.healing.plan import HealPlan
from convert.healing.team import like, part, shards, whole
from convert.healing.texts import TrainingText
from convert.healing.trainable import Trainable
from eval.machine.device import compute_device

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"  # in a checkpoint, as the Trainer names them
CLIP = 1.0  # of the norm of all gradients
_BETA, _DECAY = 0.95, 0.01
_WARM = 0.01  # share of all steps
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")  # accelerate's kinds of launches that were tried


class NotFinite(Failure):
    """A loss or a gradient is not finite."""


class HealingTrainer(Trainer):  # type: ignore[misc]
    """Trains a student in place.

    Args:
        plan: The plan.
        text: The blocks.
        distillation: The student with its loss; parameters that train require gradients.
        what: What trains of the student.
        directory: Where checkpoints go.

    Attributes:
        plan: The plan.
    """

    loss_is_scaled_for_ga = True  # by the tokens of a step

    def __init__(
        self, plan: HealPlan, text: TrainingText, distillation: Distillation, what: Trainable, directory: Path
    ) -> None:
        blocks = StackDataset(ids=text.blocks, positions=text.positions)  # type: ignore[arg-type]  # tensors are indexed alike
        held_out = Subset(blocks, text.held_out.tolist())
        arguments = _arguments(plan, directory)
        super().__init__(distillation, arguments, train_dataset=blocks, eval_dataset=held_out, compute_metrics=_means)
        if (kind := self.accelerator.distributed_type.value) not in _KINDS:
            raise Refusal(
                f"healing under {kind} was not tried, and could change constants of latents without an error",
                hint="launch it with one process, with several that hold a whole model each (DDP), or with FSDP 2",
            )
        self.plan, self._text, self._what = plan, text, what
        self._done: Callable[[int], object] = lambda tokens: None
        self.remove_callback(PrinterCallback)
        optimizer = self.create_optimizer()
        names = {weight: name for name, weight in distillation.student.named_parameters()}
        optimizer.param_groups[:] = [  # norms and biases, which do not decay, take the rate as it is
            {**group, "params": [weight], "scale": what.scales[names[weight]] if group["weight_decay"] else 1.0}
            for group in optimizer.param_groups
            for weight in group["params"]
        ]
        optimizer.register_step_pre_hook(lambda *_: self._clip())
        optimizer.register_step_post_hook(lambda *_: self._done(self.plan.batch * self.plan.context))
        self.model_wrapped, self.optimizer = self.accelerator.prepare(distillation, optimizer)
        if self.is_fsdp_enabled:
            self.model = self.model_wrapped
            self.model.set_reshard_after_forward(True)  # the root, too: it would not see what is written into parts
        self._parameters = dict(self.accelerator.unwrap_model(self.model_wrapped).student.named_parameters())
        self._weights = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._masks = {name: part(like(mask, self._weights[name])) for name, mask in what.fixed.items()}

    def run(self, steps: int, rate: float, done: Callable[[int], object], begun: int = 0) -> None:
        """Take steps from the weights as they are, or from a checkpoint on.

        Args:
            steps: How many, over which the schedule goes.
            rate: The learning rate after warm-up.
            done: Called with the tokens of each step.
            begun: Those of them that a checkpoint has, to go on from.

        Raises:
            NotFinite: Gradients are not finite.
        """
        self.args.max_steps, self.args.learning_rate, self._done = steps, rate, done
        self.args.gradient_accumulation_steps = -(-self.plan.batch // self.args.world_size // self.plan.micro_batch)
        self.train(resume_from_checkpoint=str(checkpoint_in(self.args.output_dir, begun)) if begun else None)

    def measure(self) -> tuple[float, float]:
        """Mean KL to the teacher and mean loss over the teacher's on the held-out blocks.

        Raises:
            NotFinite: They are not finite.
        """
        metrics = self.evaluate(metric_key_prefix="measured")
        return metrics["measured_kl"], metrics["measured_loss_nats"]

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This process's parts of the blocks of each step, whose order follows from the seed alone."""
        plan, first, world = self.plan, self.args.process_index, self.args.world_size
        steps = self._text.order(self.args.max_steps * plan.batch, plan.seed).split(plan.batch)
        parts = [some.tolist() for step in steps for some in step[first::world].split(plan.micro_batch)]
        return DataLoader(self.train_dataset, batch_sampler=parts)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """A part's share of the mean loss of a step's tokens; gradients of processes are averaged."""
        return model(**inputs) * (self.args.world_size / (self.plan.batch * (self.plan.context - 1)))

    def prediction_step(self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Nothing for a loss; `[B, 3]` from `Distillation` for predictions, and for labels, without which nothing counts."""
        with torch.no_grad():
            means = model(**self._prepare_inputs(inputs), measures=True)
        return None, means, means

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Linear warm-up, then half a cosine down to zero; a resumed run goes on in it."""
        begun = self.state.global_step
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self.args.learning_rate * group["scale"]
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: share(begun + step, num_training_steps))
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        """The rate that trackers are told, without the scale of any weight."""
        return float(super()._get_learning_rate() / self.optimizer.param_groups[0]["scale"])

    def _clip(self) -> None:
        """Clip the gradients of all processes together, without those of values that must stay.

        Raises:
            NotFinite: They are not finite.
        """
        for name, mask in self._masks.items():
            part(self._weights[name].grad).masked_fill_(mask, 0)
        norm = float(whole(self.accelerator.clip_grad_norm_(list(self._weights.values()), CLIP)))
        if not math.isfinite(norm):
            raise NotFinite(
                f"the norm of the gradients is {norm} at step {self.state.global_step + 1}",
                hint="begin again with a smaller --lr and --overwrite",
            )

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of what trains, by name; of what this process holds of it."""
        return {name: p.detach().clone() for name, p in self._weights.items()}

    def restore(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Go back to such a copy, or to whole weights; forget gradients and what the optimizer knows."""
        self.optimizer.zero_grad()
        self._copy(weights)
        self.optimizer.optimizer.state.clear()

    def written(self, step: int) -> dict[str, torch.Tensor]:
        """The weights of the checkpoint to write, by its class's names, as they were after a step; fp32 in main memory."""
        self.accelerator.wait_for_everyone()  # the first process has saved them
        return self._what.written(load_file(checkpoint_in(self.args.output_dir, step) / WEIGHTS))

    def put(self, written: Mapping[str, torch.Tensor]) -> None:
        """Let the student compute with weights of the checkpoint. It does not train after that."""
        self._copy(self._what.as_parameters(written))

    def _copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, weight in weights.items():
                self._parameters[name].copy_(like(weight, self._parameters[name]))

    def _save_checkpoint(self, *given: Any) -> None:
        try:
            super()._save_checkpoint(*given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # as which torch reports a full disk, in many words
            raise OSError(f"cannot write to {self.args.output_dir}: {str(error).splitlines()[0][:160]}") from error

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what trains."""
        weights = self._whole(self._weights)
        if self.args.should_save:
            directory = Path(output_dir or self.args.output_dir)
            directory.mkdir(parents=True, exist_ok=True)
            write_shard(directory / WEIGHTS, weights, {name: weight.dtype for name, weight in weights.items()})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.restore(load_file(Path(resume_from_checkpoint, WEIGHTS)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        states = self.optimizer.optimizer.state_dict()["state"]
        whole_states = {index: self._whole(values) for index, values in states.items()}
        if self.args.should_save:
            torch.save(whole_states, Path(output_dir, OPTIMIZER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer = self.optimizer.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = torch.load(Path(str(checkpoint), OPTIMIZER), map_location="cpu", weights_only=True)
        parts = {
            index: {name: like(value, parameters[index]) if value.ndim else value for name, value in values.items()}
            for index, values in states.items()
        }
        optimizer.load_state_dict(optimizer.state_dict() | {"state": parts})

    def _whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors in main memory; none in processes that do not write."""
        kept = {}
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if self.args.should_save:
                kept[name] = gathered.cpu()
        return kept


class _Arguments(TrainingArguments):  # type: ignore[misc]
    """Arguments for one device in each process; transformers' own take the first GPU, or all of them."""

    @property
    def device(self) -> torch.device:
        device: torch.device = super().device
        return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device

    @property
    def n_gpu(self) -> int:
        return min(1, super().n_gpu)


def _arguments(plan: HealPlan, directory: Path) -> _Arguments:
    """The Trainer's arguments. Points of the curve, and with them logs and checkpoints, are asked for by callbacks."""
    device = compute_device(plan.device)
    arguments = _Arguments(
        output_dir=str(directory),
        run_name=plan.output.path.name,
        use_cpu=device.type == "cpu",
        seed=plan.seed,
        per_device_train_batch_size=plan.micro_batch,
        per_device_eval_batch_size=plan.micro_batch,
        optim="adamw_torch",
        adam_beta2=_BETA,
        weight_decay=_DECAY,
        max_grad_norm=0.0,  # `_clip` does it
        logging_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        fsdp=shards(),
        fsdp_config={"version": 2} if shards() else None,
        # FSDP would keep whole gradients until the last part of a step.
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": shards()}},
    )
    if arguments.device.type != device.type:
        raise Refusal(
            f"accelerate computes on {arguments.device}, not on {device}",
            hint=f"give --device {arguments.device.type}"
            + (", or set CUDA_VISIBLE_DEVICES to nothing" if device.type == "cpu" else ", or unset ACCELERATE_USE_CPU"),
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    arguments.mixed_precision = "no"  # `Distillation` does it, in all kinds of launches alike
    return arguments


def tracker(plan: HealPlan) -> Any:
    """The callback of the tracker that the user names, such as tensorboard (files in OUTPUT.logs) or wandb, as a class."""
    assert plan.options.track
    logs = plan.output.path.with_name(f"{plan.output.path.name}.logs")
    os.environ |= {"TENSORBOARD_LOGGING_DIR": str(logs), "WANDB_PROJECT": os.environ.get("WANDB_PROJECT", "kvfold")}
    (callback,) = integrations.get_reporting_integration_callbacks([plan.options.track])

    class Tracker(callback):  # type: ignore[misc, valid-type]
        def on_train_begin(self, *given: Any, **named: Any) -> Any:
            try:
                return super().on_train_begin(*given, **named)
            except Exception as error:  # trackers raise what they like
                reason = f"{type(error).__name__}: {one_line(error, 160)}"
                raise Failure(
                    f"the tracker {plan.options.track} does not start: {reason}", hint="or heal without --track"
                ) from error

    return Tracker


def checkpoint_in(directory: str | Path, step: int) -> Path:
    """The checkpoint after a step, as the Trainer names it."""
    return Path(directory, f"checkpoint-{step}")


def share(step: int, steps: int) -> float:
    """Of the learning rate, at a step: linear warm-up, then half a cosine down to zero."""
    warm = max(1, round(_WARM * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _means(blocks: EvalPrediction) -> dict[str, float]:
    """KL and loss over the teacher's, of the means of blocks `[n, 3]`."""
    kl, student, teacher = map(float, blocks.predictions.mean(0))
    if not math.isfinite(kl + student + teacher):
        raise NotFinite(
            f"on held-out blocks, KL is {kl} and the losses are {student} and {teacher}",
            hint="begin again with a smaller --lr and --overwrite; if it is so before the first step, a model is damaged",
        )
    return {"kl": kl, "loss_nats": student - teacher}
