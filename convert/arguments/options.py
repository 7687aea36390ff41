"""The options of the API and of the commands, by what they are about; those of each function are at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Generic, Required, TypedDict, TypeVar

from attention.formats import KNOWN_FORMATS
from convert.arguments.sizes import parse_budget, parse_bytes, parse_latent, parse_rate, parse_time, parse_tokens
from convert.hosts.base import CLASSES
from convert.hosts.engines import ENGINES
from convert.methods import GROUPED, LATENT
from eval.arguments import Option, parse_count
from eval.inputs.text import DATASETS, OneText, TextGiven
from eval.options import DEVICE, DTYPES, Measuring, Reading, Working

Dry = TypeVar("Dry", bound=bool)  # what `dry_run` may be; overloads of functions differ by it
_NAMED = "A named one may lose any amount."
_METHOD = Option("How to merge KV heads.", unset=GROUPED[0], choices=GROUPED, python=_NAMED)
_CLASS = Option(
    "The class of the result: a stock class of transformers, or kvfold's own, which shares keys behind QK-norm and loses less.",
    unset="a stock class, if one can hold it and no layer stays as it is",
    choices=CLASSES,
    flag="--class",
)
_FORMAT = "Make the result for a KV cache in this format: sizes count in it, and every step fits through its rounding."
_CACHE = Option(_FORMAT, unset="--dtype", choices=tuple(KNOWN_FORMATS))
_OVERWRITE = Option("Replace an existing result, once the new one is complete.", consent=True)
_RESUME = Option(
    "Finish an interrupted run of the same command. With --overwrite, start again if it was another command.", consent=True
)
_EVALUATE = Option("Measure perplexity on this held-out text, and add it to the model card.", file=True)


def _text(use: str, writer: str) -> Option:
    """A text, or several, of which one may be what a model writes."""
    return Option(
        f"UTF-8 text to {use} on, or self for what {writer} writes itself, or its own-text.safetensors of an earlier run; "
        "repeatable, each for as many tokens. Never use the text that you evaluate on.",
        unset="self",
        file=True,
        python='Several with a path among them, as in `["self", Path("code.txt")]`, each for as many tokens.',
    )


def _dataset(use: str) -> Option:
    return Option(f"{use} on the training split of this dataset, too. Needs pip install 'kvfold[data]'.", choices=DATASETS)


def _count(use: str, unset: str, least: int = 1) -> Option:
    """A number of tokens."""
    return Option(use, unset=unset, least=least, parse=parse_count)


def _seed(use: str) -> Option:
    return Option(use, default=0, least=0, most=2**32 - 1)


class Merging(TypedDict, total=False):
    """How to merge KV heads."""

    method: Annotated[str | None, _METHOD]
    output_class: Annotated[str | None, _CLASS]
    cache_dtype: Annotated[str | None, _CACHE]


class Grouping(TypedDict, total=False):
    """How many KV heads to keep."""

    groups: Required[Annotated[int, Option("KV heads of the result. Must divide those of MODEL.")]]


class Factoring(TypedDict, total=False):
    """The size of a latent, and how to make it."""

    kv_lora_rank: Annotated[
        int | None, Option("Rank of the latent. Includes the constant channel of the output class.", metavar="R")
    ]
    qk_rope_head_dim: Annotated[int | None, Option("Dims of the RoPE key that all heads share.", metavar="P")]
    kv_budget: Annotated[
        str | int | float | None,
        Option(
            "Choose both: from a share of MODEL's cache (12.5%), or bytes per token (4KB).",
            unset="50%, where neither R nor P is given",
            parse=parse_budget,
            metavar="SIZE",
            python="A float is a share, an int are bytes.",
        ),
    ]
    cache_dtype: Annotated[
        str | None,
        Option(
            f"{_FORMAT} With --kv-budget, auto takes one by the budget (`convert plan`).",
            unset="--dtype",
            choices=(*KNOWN_FORMATS, "auto"),
        ),
    ]
    method: Annotated[str | None, Option("How to factor keys and values.", unset=LATENT[0], choices=LATENT, python=_NAMED)]
    pad_rank: Annotated[bool, Option("Allow a rank beyond full size, and fill it with zeros.")]
    portable: Annotated[bool, Option("No biases and no list of frequencies, for engines' own DeepSeek classes. Needs text.")]


class Calibrating(TypedDict, total=False):
    """The text of a conversion, and the steps that use it."""

    text: Annotated[TextGiven | None, _text("calibrate", "MODEL")]
    dataset: Annotated[str | None, _dataset("Calibrate")]
    no_text: Annotated[bool, Option("Calibrate on no text: convert from weights alone, which ruins most models.")]
    calibration_tokens: Annotated[
        int | str | None,
        _count("Calibrate on N tokens of the text's first 524288 (or N).", "32768; 65536 where MODEL writes a part of it"),
    ]
    calibration_context: Annotated[
        int | str | None,
        _count("Tokens per calibration block.", "2048; 512 where MODEL writes a part of it; at most MODEL's limit", least=2),
    ]
    max_context: Annotated[
        int | str | None,
        _count(
            "Tokens of the longest context that the result is for: it is fitted to distances up to N.",
            "all positions of MODEL; --calibration-context where positions cannot skip",
            least=2,
        ),
    ]
    refit: Annotated[
        bool | None,
        Option("Fit queries, keys, outputs and, for GQA, values by least squares.", unset="with text, for methods that use it"),
    ]
    heal: Annotated[
        int | str | None,
        Option(
            "At the end, distil the source into the result on N tokens of the text that nothing was fitted to; 0 for none.",
            unset="as many as are calibrated on, up to 65536, where the model trains in memory, for methods that use text; 0 in"
            " sweeps",
            least=0,
            parse=parse_tokens,
        ),
    ]


class Writing(TypedDict, Generic[Dry], total=False):
    """The result of a conversion, and how it comes about."""

    keep_layers: Annotated[
        Sequence[int] | None,
        Option("Leave these layers as they are, such as 0,19. The result has kvfold's class.", metavar="N,…"),
    ]
    all_layers: Annotated[bool, Option("Convert layers with a window, too, whose cache does not grow.")]
    dtype: Annotated[str | None, Option("Store floats in this dtype.", unset="as in MODEL", choices=DTYPES)]
    engine: Annotated[str | None, Option("Make what this engine runs, and refuse what it does not.", choices=tuple(ENGINES))]
    device: Annotated[str, DEVICE]
    seed: Annotated[int, _seed("For the text that MODEL writes.")]
    max_shard_size: Annotated[
        int | str,
        Option(
            "Start a new weight file beyond this size.",
            default="5GB",
            least=1,
            parse=parse_bytes,
            metavar="SIZE",
            python="A plain number means bytes.",
        ),
    ]
    overwrite: Annotated[bool, _OVERWRITE]
    resume: Annotated[bool, _RESUME]
    dry_run: Annotated[Dry, Option("Only plan. Reads no weights.")]


class Publishing(TypedDict, total=False):
    """Whether the result is of use."""

    force: Annotated[bool, Option("Publish the result, however much it loses, or if it only copies MODEL.", consent=True)]
    evaluate: Annotated[OneText | None, _EVALUATE]


class Training(TypedDict, Generic[Dry], total=False):
    """How to heal."""

    teacher: Annotated[
        str | Path | None, Option("The model that CONVERTED was made from.", unset="as it records", metavar="MODEL")
    ]
    text: Annotated[TextGiven | None, _text("train", "the teacher")]
    dataset: Annotated[str | None, _dataset("Train")]
    tokens: Annotated[int | str | None, _count("Train on N tokens, such as 200M.", "20M")]
    time: Annotated[
        float | str | None,
        Option(
            "Train on as many tokens as take TIME here, such as 90min, 1h or 2d, by a few timed steps.",
            least=1e-3,
            parse=parse_time,
            metavar="TIME",
            python="A plain number means seconds; give this or `tokens`.",
        ),
    ]
    context: Annotated[int | str | None, _count("Tokens per block.", "a thousandth of all, 512 to 2048; or the limit", least=2)]
    batch_tokens: Annotated[
        int | str | None, _count("Tokens per step.", "a thousandth of all, at least a block, at most 65536")
    ]
    micro_batch_tokens: Annotated[int | str | None, _count("Tokens per forward pass.", "4096")]
    lr: Annotated[
        float | str,
        Option(
            "The learning rate; matrices with a root mean square above 0.02 take more. auto tries some, from 120 steps on.",
            default="auto",
            least=1e-12,
            most=1,
            parse=parse_rate,
            metavar="RATE",
        ),
    ]
    train: Annotated[
        str,
        Option(
            "Which weights to train: those of attention and the norms before it, all, or LoRA beside those of attention.",
            default="attention",
            choices=("attention", "all", "lora"),
        ),
    ]
    lora_rank: Annotated[int | None, Option("The rank of --train lora.", unset="16", least=1)]
    track: Annotated[
        str | None,
        Option(
            "Send figures to tensorboard (files in OUTPUT.logs), wandb or another tracker of transformers.",
            metavar="NAME",
            consent=True,
        ),
    ]
    eval_every: Annotated[int | str | None, _count("Measure every N tokens.", "ten times")]
    cache_dtype: Annotated[
        str | None,
        Option(
            "Train for a KV cache in this format, through its rounding.",
            unset="the format that CONVERTED was made for",
            choices=tuple(KNOWN_FORMATS),
        ),
    ]
    checkpointing: Annotated[bool, Option("Compute layers again in the backward pass: slower, with less memory.")]
    evaluate: Annotated[OneText | None, _EVALUATE]
    device: Annotated[str, DEVICE]
    seed: Annotated[int, _seed("For the order of blocks.")]
    overwrite: Annotated[bool, _OVERWRITE]
    resume: Annotated[bool, _RESUME]
    dry_run: Annotated[Dry, Option("Only plan, with the memory that it takes. Reads the text, but no weights.")]


class Comparing(TypedDict, total=False):
    """What a sweep makes and measures."""

    groups: Annotated[Sequence[int] | None, Option("KV heads of the GQA targets, such as 8,4,2,1.")]
    mla: Annotated[
        Sequence[str | tuple[int, int]] | None,
        Option(
            "Sizes of the MLA targets, such as 512+64 or 12.5%.",
            parse=parse_latent,
            metavar="R+P,…",
            python="Or pairs: (512, 64). With no groups either: halves of the KV heads, and 25 % and 12.5 % of the cache.",
        ),
    ]
    methods: Annotated[
        Sequence[str] | None,
        Option("Methods to compare.", unset="all", choices=(*GROUPED, *LATENT), metavar="NAME,…"),
    ]
    evaluate: Required[Annotated[OneText, Option("Held-out text to evaluate all results on.", file=True)]]


class Fitting(TypedDict, total=False):
    """What has to fit into memory."""

    batch: Annotated[int, Option("Batch size.", default=1, least=1)]
    context: Annotated[int | str | None, _count("Tokens per sequence.", "the model's limit")]
    dtype: Annotated[str | None, Option("Dtype of weights and cache.", unset="as in MODEL", choices=DTYPES)]
    cache_dtype: Annotated[str | None, Option("Format of the cache.", unset="--dtype", choices=tuple(KNOWN_FORMATS))]
    gpus: Annotated[
        Mapping[str, float] | None,
        Option(
            "A GPU with its memory, such as A6000=48, instead of the usual ones; repeatable.",
            metavar="NAME=GB",
            flag="--gpu",
            python="Several, by name, in gigabytes.",
        ),
    ]
    engine: Annotated[str | None, Option("Show only what this engine runs.", choices=tuple(ENGINES))]


class Gqa(Grouping, Merging, Calibrating, Writing[Dry], Publishing, Working, Generic[Dry]):
    """The options of `gqa`."""


class Mqa(Merging, Calibrating, Writing[Dry], Publishing, Working, Generic[Dry]):
    """The options of `mqa`."""


class Mla(Factoring, Calibrating, Writing[Dry], Publishing, Working, Generic[Dry]):
    """The options of `mla`."""


class Heal(Training[Dry], Working, Generic[Dry]):
    """The options of `heal`."""


class Sweep(Comparing, Measuring, Calibrating, Writing[Dry], Working, Generic[Dry]):
    """The options of `sweep`."""


class Plan(Fitting, Reading):
    """The options of `plan`."""


class Inspect(Reading):
    """The options of `inspect`."""
