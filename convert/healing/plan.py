"""The plan of a healing: every number decided, and everything refused that configs and arguments show."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from attention.encoded_forward import require_cache
from attention.errors import Refusal
from attention.formats import KNOWN_FORMATS, Format, rounding_of
from attention.spec import AttentionSpec, dtype_bytes
from convert.checkpoint.loading import empty_model
from convert.families import Family
from convert.healing.weights import held_parameters
from convert.output.destination import Output, read_provenance
from convert.planning.allowed import trainable
from convert.planning.base import location_of
from convert.planning.texts import Texts, as_options
from eval.inputs.reader import Reader
from eval.inputs.source import Source, require_contexts
from eval.machine.capacity import count_parameters
from eval.machine.device import compute_device
from eval.quality.origin import stated_cache

_TOKENS = 20_000_000  # to train on
PARTS = ("attention", "all", "lora")
_LORA_RANK, _LORA_RATE = 16, 10  # the default; times the rates of weights themselves
_STEPS = 1000  # with the default batch, if it is within these tokens
_LEAST_BLOCK, _MOST_PER_STEP = 512, 65536  # tokens; shorter blocks give few tokens more steps
_AT_ONCE = 4096  # tokens of a forward pass
_TRIAL, _TRIALS = 0.02, 0.25  # shares of all steps that a rate is tried for, and all rates together
_LEAST_TRIAL = 10  # steps that a rate is tried for
_MOST_RATES = 6  # that are tried, while the best has no other ones around it
# Tried first (docs/notes/fits.md). With too few steps: the last where more than `_LOSING` nats are lost, else the first.
_START, _LOSING = (3e-6, 1e-5, 3e-5), 0.2
_FP32 = 4
_PER_WEIGHT = 5  # fp32 numbers for each that trains: its gradient, two moments of AdamW, and two copies while a step is taken
_KEPT = 9  # fp32 numbers on disk for each: it and its moments in the last checkpoint, in the best, and in the one being written


@dataclass(frozen=True)
class HealOptions:
    """The user's options, as `convert.arguments.options` declares them.

    Numbers left as None depend on the model and on each other. The learning rate is then chosen among several, where steps
    suffice to try them, the format of the cache is the one that CONVERTED was made for, and `points` of the curve are measured.
    """

    texts: Texts
    tokens: int | None = None
    context: int | None = None
    batch_tokens: int | None = None
    micro_batch_tokens: int | None = None
    lr: float | None = None
    train: str = PARTS[0]
    lora_rank: int | None = None
    eval_every: int | None = None
    checkpointing: bool = False
    track: str | None = None
    cache_dtype: str | None = None
    points: int = 10


@dataclass(frozen=True)
class HealPlan:
    """A validated healing, as data.

    Attributes:
        converted: The checkpoint to heal.
        teacher: The source that it was made from.
        spec: The attention of the converted checkpoint.
        output: Where the result goes.
        options: As given.
        context: Tokens per block.
        asked: Tokens to train on, of which whole steps are taken.
        device: As on the command line.
        seed: For the order of blocks.
        cache_dtype: The format of the cache that the result is for, which a dtype is, too.
        retrieval_limit: Positions of blocks that retrieve stay below it: all that the result is for, where they can skip.
        model: The converted model without weights: its parameters are on the meta device.
        names: The parameters to train, with those few of which nothing may change.
        tensors: That one of these which each tensor of the checkpoint holds, from `held_parameters`.
    """

    converted: Source
    teacher: Source
    spec: AttentionSpec
    output: Output
    options: HealOptions
    context: int
    asked: int
    device: str
    seed: int
    cache_dtype: str
    retrieval_limit: int
    model: Any = field(repr=False, compare=False)
    names: tuple[str, ...] = field(repr=False)
    tensors: dict[str, str] = field(repr=False)

    @property
    def batch(self) -> int:
        """Blocks per step."""
        tokens = self.options.batch_tokens or min(_MOST_PER_STEP, self.asked // _STEPS)
        return max(1, tokens // self.context)

    @property
    def micro_batch(self) -> int:
        """Blocks per forward pass."""
        return min(self.batch, max(1, (self.options.micro_batch_tokens or _AT_ONCE) // self.context))

    @property
    def steps(self) -> int:
        """How many steps are taken."""
        return max(1, self.asked // (self.batch * self.context))

    @property
    def every(self) -> int:
        """Steps from one point of the curve to the next."""
        tokens = self.options.eval_every
        return max(1, tokens // (self.batch * self.context) if tokens else -(-self.steps // self.options.points))

    @property
    def tokens(self) -> int:
        """Tokens to train on: whole steps."""
        return self.steps * self.batch * self.context

    @property
    def lora_rank(self) -> int | None:
        """The rank of what trains beside a matrix; None where matrices themselves train."""
        return self.options.lora_rank or _LORA_RANK if self.options.train == "lora" else None

    @property
    def rounding(self) -> Format | None:
        """The format through whose rounding the result is trained; None for a dtype."""
        return rounding_of(self.cache_dtype)

    @property
    def trial_steps(self) -> int:
        """Steps that each learning rate is tried for; none if the rate is given, or if steps are too few to try any."""
        wanted = max(_LEAST_TRIAL, round(_TRIAL * self.steps))
        return wanted if self.options.lr is None and len(_START) * wanted <= _TRIALS * self.steps else 0

    @property
    def most_rates(self) -> int:
        """How many learning rates may be tried, where any are."""
        return min(_MOST_RATES, int(_TRIALS * self.steps / self.trial_steps))

    def rates(self, loss: float) -> list[float]:
        """The learning rate to take, or those to try, for a student that loses `loss` nats over its teacher."""
        scale = 1 if self.lora_rank is None else _LORA_RATE
        rates = _START if self.trial_steps else [_START[-1] if loss > _LOSING else _START[0]]
        return [scale * rate for rate in rates] if self.options.lr is None else [self.options.lr]

    def memory(self, parts: int = 1) -> dict[str, int]:
        """Bytes of what each of `parts` processes holds all the time; what autograd keeps of a forward pass comes on top."""
        kept = "float32" if compute_device(self.device).type == "cpu" else self.teacher.dtype
        return {
            "student": _FP32 * sum(parameter.numel() for parameter in self.model.parameters()) // parts,
            "teacher": dtype_bytes(kept) * count_parameters(self.teacher.config) // parts,
            "training": _FP32 * _PER_WEIGHT * self._trained // parts,
        }

    @property
    def disk(self) -> int:
        """Bytes on disk while it runs, besides the result."""
        return _FP32 * _KEPT * self._trained

    @property
    def _trained(self) -> int:
        """How many numbers train."""
        rank, shapes = self.lora_rank, {name: self.model.get_parameter(name).shape for name in self.names}
        return sum(
            rank * sum(shape) if rank is not None and is_matrix(self.model, name) else shape.numel()
            for name, shape in shapes.items()
        )

    def recipe(self) -> dict[str, Any]:
        """The options by which `convert run` repeats it in any directory; OUTPUT is left out."""
        o = self.options
        numbers = {
            "tokens": self.tokens,
            "context": self.context,
            "batch_tokens": self.batch * self.context,
            "lr": o.lr,
            "train": o.train,
            "lora_rank": self.lora_rank,
            "eval_every": self.every * self.batch * self.context,
            "seed": self.seed,
            "cache_dtype": o.cache_dtype if self.rounding is None else self.cache_dtype,
            "trust_remote_code": self.converted.trust_remote_code or None,
        }
        models = {"converted": location_of(self.converted), "teacher": location_of(self.teacher)}
        given = {name: value for name, value in numbers.items() if value is not None}
        return models | as_options(o.texts, absolute=True) | given


def plan_heal(
    converted: Source, teacher: Source | None, options: HealOptions, output: Output, device: str, seed: int
) -> HealPlan:
    """The plan of a healing.

    Args:
        converted: The checkpoint to heal.
        teacher: The source; None for the one that conversion.json names.
        options: The user's options.
        output: Where the result goes.
        device: As on the command line.
        seed: For the order of blocks.

    Raises:
        Refusal: Configs or arguments do not allow it.
    """
    compute_device(device)
    if options.track is not None:
        from transformers.integrations import get_available_reporting_integrations

        if options.track not in (there := get_available_reporting_integrations()):
            said = f"no tracker {options.track!r} is installed, but {', '.join(there) or 'none'}"
            raise Refusal(said, hint="install its package")
    if options.train not in PARTS:
        raise Refusal(f"nothing trains {options.train!r} (choose {', '.join(PARTS)})")
    if options.train == "lora":
        if find_spec("peft") is None:
            raise Refusal("--train lora needs peft, which is not installed", hint="pip install 'kvfold[lora]'")
    elif options.lora_rank is not None:
        raise Refusal(f"--lora-rank {options.lora_rank} is for --train lora, not {options.train}")
    family = trainable(converted)
    source = teacher or converted.beside(_named_teacher(converted))
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
    (context,) = require_contexts([converted, source], [] if options.context is None else [options.context])
    tokens = options.tokens or _TOKENS
    if options.context is None and family.skips:
        context = min(context, max(_LEAST_BLOCK, tokens // _STEPS))
    spec, model = family.spec, empty_model(converted.config)
    names = named(model, family, spec.changed, options.train)
    held = held_parameters(model, Reader(converted.files), names)
    cache = options.cache_dtype or stated_cache(read_provenance(converted.files)) or converted.dtype
    if options.cache_dtype is None and cache not in KNOWN_FORMATS:
        hint = "convert its source again, or give --cache-dtype"
        raise Refusal(f"{converted.reference} was made for caches in {cache!r}, which this version does not know", hint=hint)
    limit = before.positions if (before := converted.calibrated) else source.max_positions
    within = max(limit or 0, context) if family.skips else context
    plan = HealPlan(converted, source, spec, output, options, context, tokens, device, seed, cache, within, model, names, held)
    spec.bytes_per_token(cache)  # refuses what the format does not take
    if plan.rounding is not None:
        require_cache(model, plan.rounding)
        if options.checkpointing:
            raise Refusal(
                f"--checkpointing computes layers again without a cache, and the result is for one in {cache}",
                hint="leave out --checkpointing, or give --cache-dtype " + converted.dtype,
            )
    return plan


def named(model: Any, family: Family, layers: Sequence[int], part: str) -> tuple[str, ...]:
    """The names of the parameters of a part: "attention" of these layers, with the norms before it; "lora", too; or "all"."""
    norms = [norm.name.removesuffix(".weight") for layer in layers if (norm := family.input_norm(layer)) is not None]
    inside = tuple(f"{module}." for module in (*map(family.module, layers), *norms))
    return tuple(name for name, _ in model.named_parameters() if part == "all" or name.startswith(inside))


def is_matrix(model: Any, name: str) -> bool:
    """Whether a parameter is the matrix of a linear module."""
    module, _, part = name.rpartition(".")
    return part == "weight" and isinstance(model.get_submodule(module), nn.Linear | Conv1D)


def _named_teacher(converted: Source) -> str:
    """The source that conversion.json names, which must be there."""
    recipe = read_provenance(converted.files).get("recipe")
    options = next(iter(recipe.values()), None) if isinstance(recipe, dict) else None
    named = options.get("teacher") or options.get("model") if isinstance(options, dict) else None
    if not isinstance(named, str):
        raise Refusal(
            f"{converted.reference} has no conversion.json that names its source", hint="name the source with --teacher"
        )
    if named.startswith("/") and not Path(named).exists():
        raise Refusal(f"{converted.reference} was made from {named}, which is not there", hint="name the source with --teacher")
    return named
