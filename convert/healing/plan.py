"""The plan of a healing: every number decided, and everything refused that configs and arguments show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention.encoded_forward import require_cache
from attention.errors import Refusal
from attention.formats import Format, rounding_of
from attention.spec import AttentionSpec
from convert.checkpoint.loading import empty_model
from convert.healing.student import of_part
from convert.healing.tracking import require_tracker
from convert.healing.trainable import require_peft
from convert.healing.weights import held_parameters
from convert.output.destination import Output, check_output, read_provenance
from convert.planning.base import convertible, location_of
from convert.planning.texts import Texts, as_options
from eval.inputs.reader import Reader
from eval.inputs.source import Source, require_contexts
from eval.machine.capacity import count_parameters
from eval.machine.device import require_device
from eval.quality.origin import stated_cache

if TYPE_CHECKING:
    from convert.families import Family

EFFORTS = {
    "quick": (20, 50),
    "standard": (200, 500),
    "thorough": (2000, 3000),
}  # million tokens: up to 2B parameters, and beyond
PARTS = ("attention", "all", "lora")
_LORA_RANK, _LORA_RATE = 16, 10  # the default; times the rates of weights themselves, as LoRA wants
_LARGE = 2_000_000_000  # parameters
_STEPS = 1000  # with the default batch, if it is within these tokens
_MOST_PER_STEP = 65536
_AT_ONCE = 4096  # tokens of a forward pass
_POINTS = 10  # of the curve
_RATES, _MOST_RATES = 3, 6  # that are tried: at least, and while the best has no other ones around it
RATIO = 3  # of a rate to the one below
_TRIAL, _LEAST_TRIAL = 0.02, 10  # share of all steps that each rate is tried for; steps
_TRIALS = 0.2  # share of all steps that trials may take together
# Where the search for a rate begins. Distillations of models with up to 2 billion parameters took these where they lost so many
# nats, and those with 7 billion a quarter (docs/healing.md). Between and below, the rate follows 1 / width.
_STARTS = ((1.0, 8e-5), (0.2, 3e-5), (0.0, 1e-5))  # of a loss in nats upwards
_WIDTH = 2048  # of the models that these are of


@dataclass(frozen=True)
class HealOptions:
    """The user's options. Numbers left as None depend on the model and on each other.

    Attributes:
        texts: To train on.
        tokens: Tokens to train on; None for those of `effort`.
        effort: One of `EFFORTS`.
        context: Tokens per block.
        batch_tokens: Tokens per step, over all processes.
        micro_batch_tokens: Tokens per forward pass.
        lr: The learning rate; None to choose among several, where steps suffice to try them.
        train: One of `PARTS`.
        lora_rank: The rank of what trains beside a matrix; None where matrices themselves train.
        ce: The weight of the cross-entropy beside the KL.
        eval_every: Tokens from one point of the curve to the next.
        checkpointing: Whether layers are computed again in the backward pass, which saves memory.
        track: The tracker that figures go to; None for none.
        cache_dtype: The format of the cache that the result is for; None for the one that CONVERTED was made for.
    """

    texts: Texts
    tokens: int | None = None
    effort: str = "quick"
    context: int | None = None
    batch_tokens: int | None = None
    micro_batch_tokens: int | None = None
    lr: float | None = None
    train: str = PARTS[0]
    lora_rank: int | None = None
    ce: float = 0.0
    eval_every: int | None = None
    checkpointing: bool = False
    track: str | None = None
    cache_dtype: str | None = None


@dataclass(frozen=True)
class HealPlan:
    """A validated healing, as data.

    Attributes:
        converted: The checkpoint to heal.
        teacher: The source that it was made from.
        family: The family that reads the converted checkpoint.
        spec: Its attention.
        output: Where the result goes.
        options: As given.
        context: Tokens per block.
        batch: Blocks per step.
        micro_batch: Blocks per forward pass.
        steps: How many.
        every: Steps from one point of the curve to the next.
        device: As on the command line.
        seed: For the order of blocks.
        cache_dtype: The format of the cache that the result is for, which a dtype is, too.
    """

    converted: Source
    teacher: Source
    family: Family
    spec: AttentionSpec
    output: Output
    options: HealOptions
    context: int
    batch: int
    micro_batch: int
    steps: int
    every: int
    device: str
    seed: int
    cache_dtype: str

    @property
    def rounding(self) -> Format | None:
        """The format through whose rounding the result is trained; None for a dtype."""
        return rounding_of(self.cache_dtype)

    @property
    def teacher_spec(self) -> AttentionSpec:
        """The attention of the source."""
        return AttentionSpec.from_config(self.teacher.config)

    @property
    def tokens(self) -> int:
        """Tokens to train on: whole steps."""
        return self.steps * self.batch * self.context

    @property
    def trial_steps(self) -> int:
        """Steps that each learning rate is tried for; none if the rate is given, or if steps are too few to try any."""
        wanted = max(_LEAST_TRIAL, round(_TRIAL * self.steps))
        return wanted if self.options.lr is None and _RATES * wanted <= _TRIALS * self.steps else 0

    @property
    def most_rates(self) -> int:
        """How many learning rates may be tried, where any are."""
        return min(_MOST_RATES, int(_TRIALS * self.steps / self.trial_steps))

    @property
    def logs(self) -> Path:
        """The directory of trackers that write files."""
        return self.output.path.with_name(f"{self.output.path.name}.logs")

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""
        return (*self._of_another_teacher(), *self._of_refinement())

    def _of_another_teacher(self) -> tuple[str, ...]:
        named, location = _stated_source(self.converted), location_of(self.teacher)
        if named is None or str(Path(named).resolve()) == location or named.split("@")[0] == self.teacher.repository:
            return ()
        return (
            f"conversion.json says that it was made from {named}, and the teacher is {location}: if that is another model, "
            "the result will follow it, and not its source",
        )

    def _of_refinement(self) -> tuple[str, ...]:
        options = _stated_options(self.converted)
        if options is None or "refine" in options or "converted" in options:
            return ()
        return (
            "its layers were not refined: --refine 300 in the conversion takes half to two thirds of the loss from small "
            "models, at a lower cost; a model of 135M parameters gained more from healing in the same time",
        )

    def rates(self, loss: float) -> list[float]:
        """The learning rate to take, or those to try, for a student that loses `loss` nats over its teacher."""
        if self.options.lr is not None:
            return [self.options.lr]
        middle = start_rate(loss, self.converted.decoder.hidden_size) * (1 if self.options.lora_rank is None else _LORA_RATE)
        return [middle / RATIO, middle, RATIO * middle] if self.trial_steps else [middle]

    def recipe(self) -> dict[str, Any]:
        """The command that reproduces the result, as `convert run` reads it from any directory; OUTPUT is left out."""
        o = self.options
        every = {
            "tokens": self.tokens,
            "context": self.context,
            "batch_tokens": self.batch * self.context,
            "lr": o.lr,
            "train": o.train,
            "lora_rank": o.lora_rank,
            "ce": o.ce or None,
            "eval_every": self.every * self.batch * self.context,
            "seed": self.seed,
            "cache_dtype": o.cache_dtype if self.rounding is None else self.cache_dtype,
        }
        numbers = {name: value for name, value in every.items() if value is not None}
        trusted = {"trust_remote_code": True} if self.converted.trust_remote_code else {}
        text = as_options(o.texts, absolute=True)
        return {
            "heal": {
                "converted": location_of(self.converted),
                "teacher": location_of(self.teacher),
                **text,
                **numbers,
                **trusted,
            }
        }


def start_rate(loss: float, width: int) -> float:
    """The first learning rate for a student of this width that loses `loss` nats per token over its teacher."""
    rate = next((rate for least, rate in _STARTS if loss > least), _STARTS[-1][1])
    return rate * _WIDTH / width


def plan_heal(converted: Source, teacher: str | None, options: HealOptions, output: Output, device: str, seed: int) -> HealPlan:
    """The plan of a healing.

    Args:
        converted: The checkpoint to heal.
        teacher: The source's directory or Hub id; None for the one that conversion.json names.
        options: The user's options.
        output: Where the result goes.
        device: As on the command line.
        seed: For the order of blocks.

    Raises:
        Refusal: Configs or arguments do not allow it.
    """
    require_device(device)
    if options.track is not None:
        require_tracker(options.track)
    if options.train not in PARTS:
        raise Refusal(f"nothing trains {options.train!r} (choose {', '.join(PARTS)})")
    options = _with_rank(options)
    convertible(converted)
    source = converted.beside(teacher or _named_teacher(converted))
    source.refuse_remote_code()
    if source.vocabulary != converted.vocabulary:
        raise Refusal(
            f"the vocabularies of {converted.reference} ({converted.vocabulary} tokens) and its teacher {source.reference} "
            f"({source.vocabulary}) differ: their predictions cannot be compared",
            hint="--teacher names the model that it was converted from",
        )
    if not list(converted.files.glob("*.safetensors")):
        raise Refusal(
            f"{converted.reference} holds pickled weights, which heal does not write",
            hint="load it with transformers, and save it with save_pretrained, as safetensors",
        )
    for other in (converted, source):
        check_output(output.path, other.directory, output.overwrite, output.resume)
    return sized(converted, source, options, output, device, seed)


def sized(converted: Source, source: Source, options: HealOptions, output: Output, device: str, seed: int) -> HealPlan:
    """The plan of a healing of which nothing else has to be refused. Arguments as of `plan_heal`; `source` is the teacher.

    Raises:
        Refusal: The models do not take such a context, or a tensor cannot be written back.
    """
    family = convertible(converted)
    (context,) = require_contexts([converted, source], [] if options.context is None else [options.context])
    tokens = options.tokens or _tokens_of(options.effort, converted)
    batch = max(1, (options.batch_tokens or min(_MOST_PER_STEP, tokens // _STEPS)) // context)
    micro_batch = min(batch, max(1, (options.micro_batch_tokens or _AT_ONCE) // context))
    steps = max(1, tokens // (batch * context))
    every = options.eval_every // (batch * context) if options.eval_every else -(-steps // _POINTS)
    spec = family.spec
    model = empty_model(converted.config)
    held_parameters(model, Reader(converted.files), of_part(model, family, spec.num_layers, options.train))
    planned = HealPlan(
        converted,
        source,
        family,
        spec,
        output,
        options,
        context,
        batch,
        micro_batch,
        steps,
        max(1, every),
        device,
        seed,
        options.cache_dtype or stated_cache(read_provenance(converted.files)) or converted.dtype,
    )
    _check_rounding(planned, model)
    return planned


def _check_rounding(plan: HealPlan, model: Any) -> None:
    """Refuse a format that the cache cannot have, or that training cannot round to."""
    plan.spec.bytes_per_token(plan.cache_dtype)
    if plan.rounding is None:
        return
    require_cache(model, plan.rounding)
    if plan.options.checkpointing:
        raise Refusal(
            f"--checkpointing computes layers again without a cache, and the result is for one in {plan.cache_dtype}",
            hint="leave out --checkpointing, or give --cache-dtype " + plan.converted.dtype,
        )


def _with_rank(options: HealOptions) -> HealOptions:
    """The options, with a rank if LoRA trains."""
    if options.train == "lora":
        require_peft()
        return replace(options, lora_rank=options.lora_rank or _LORA_RANK)
    if options.lora_rank is not None:
        raise Refusal(f"--lora-rank {options.lora_rank} is for --train lora, not {options.train}")
    return options


def _tokens_of(name: str, converted: Source) -> int:
    if name not in EFFORTS:
        raise Refusal(f"no effort {name!r} (choose {', '.join(EFFORTS)})")
    parameters = count_parameters(converted.config)
    return EFFORTS[name][parameters > _LARGE] * 10**6


def _named_teacher(converted: Source) -> str:
    """The source that conversion.json names, which must be there."""
    named = _stated_source(converted)
    if named is None:
        raise Refusal(
            f"{converted.reference} has no conversion.json that names its source", hint="name the source with --teacher"
        )
    if named.startswith("/") and not Path(named).exists():
        raise Refusal(f"{converted.reference} was made from {named}, which is not there", hint="name the source with --teacher")
    return named


def _stated_source(converted: Source) -> str | None:
    """The model that conversion.json says it was made from; None if it says nothing."""
    options = _stated_options(converted) or {}
    named = options.get("teacher") or options.get("model")
    return named if isinstance(named, str) else None


def _stated_options(converted: Source) -> dict[str, Any] | None:
    """The options by which conversion.json says that it was made; None if it says nothing."""
    recipe = read_provenance(converted.files).get("recipe")
    options = next(iter(recipe.values()), None) if isinstance(recipe, dict) else None
    return options if isinstance(options, dict) else None
