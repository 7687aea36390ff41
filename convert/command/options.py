"""Options that several commands share, and their value types. It imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import click

from attention.errors import Refusal
from convert.hosts.engines import ENGINES
from convert.planning.sizes import parse_budget, parse_bytes, parse_count, parse_latent, parse_time, parse_tokens
from eval.inputs.text import DATASETS, SELF
from eval.quality.protocol import PROTOCOLS

DTYPES = ("float32", "bfloat16", "float16")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A number of bytes with a unit: 5GB, 500MB, 1.5GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else _parsed(self, parse_bytes, value, param, ctx)


class Checked(click.ParamType):  # type: ignore[type-arg]
    """A value that stays the string that it is, once `parse` has not refused it."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        _parsed(self, self._parse, value, param, ctx)
        return str(value)


BUDGET, LATENT, _TIME = Checked("budget", parse_budget), Checked("latent", parse_latent), Checked("time", parse_time)


def _parsed(
    kind: click.ParamType,  # type: ignore[type-arg]
    parse: Callable[[str], Any],
    value: Any,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> Any:
    """The value that `parse` returns; its refusal becomes a click error."""
    try:
        return parse(str(value))
    except Refusal as refusal:
        kind.fail(str(refusal), param, ctx)


class Count(click.ParamType):  # type: ignore[type-arg]
    """A number of tokens: 20M, 300k, 4096."""

    name = "count"

    def __init__(self, parse: Callable[[str], int] = parse_count) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else _parsed(self, self._parse, value, param, ctx)


class Rate(click.ParamType):  # type: ignore[type-arg]
    """A learning rate: "auto", or a number above 0 and up to 1."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        try:
            rate = 0.5 if value == "auto" else float(value)
        except ValueError:
            rate = 0.0
        if not 0 < rate <= 1:
            self.fail(f"invalid learning rate {value!r}: give auto, or a number above 0 and up to 1, as in 1e-4", param, ctx)
        return "auto" if value == "auto" else rate


class TextFile(click.Path):
    """A file, or the word "self", which stays a string."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, str) and value == SELF else super().convert(value, param, ctx)


class Shares(click.ParamType):  # type: ignore[type-arg]
    """Comma-separated numbers above 0."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            shares = tuple(map(float, str(value).split(",")))
        except ValueError:
            shares = ()
        if not shares or not all(0 < share < math.inf for share in shares):
            self.fail(f"{value!r} is not a list of shares: give a number above 0 for each text, as in 1,2", param, ctx)
        return shares


def texts(given: dict[str, Any]) -> None:
    """Replace the options `text` and `text_shares` by the one argument `text` of the API.

    Raises:
        click.UsageError: A text has no share, or there are more shares than texts.
    """
    files, shares = given.pop("text"), given.pop("text_shares")
    if shares is not None and len(shares) != len(files):
        raise click.UsageError(f"{len(shares)} --text-shares for {len(files)} --text: give one for each, in their order")
    if len(set(files)) < len(files):
        raise click.UsageError("the same --text is given twice: give it once, with a larger share")
    plain = len(files) < 2 and shares is None
    given["text"] = (files[0] if files else None) if plain else dict(zip(files, shares or [1.0] * len(files), strict=True))


class Gpu(click.ParamType):  # type: ignore[type-arg]
    """NAME=GB."""

    name = "gpu"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        name, _, size = str(value).rpartition("=")
        try:
            gigabytes = float(size)
        except ValueError:
            gigabytes = 0.0
        if not name or not 0 < gigabytes < math.inf:
            self.fail(f"{value!r} is not a GPU: give a name and its memory in GB, as in A6000=48", param, ctx)
        return name, gigabytes


class Listed(click.ParamType):  # type: ignore[type-arg]
    """Comma-separated values of one type."""

    name = "list"

    def __init__(self, each: click.ParamType | type) -> None:  # type: ignore[type-arg]
        self._each = click.types.convert_type(each)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(dict.fromkeys(self._each.convert(item.strip(), param, ctx) for item in str(value).split(",")))


def listed(name: str, each: click.IntRange, help_text: str) -> Decorator:
    """An option with comma-separated values that may be repeated; its value is a tuple of all of them without duplicates."""

    def flat(ctx: click.Context, param: click.Parameter, value: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(itertools.chain(*value)))

    return click.option(name, type=Listed(each), multiple=True, callback=flat, metavar="N,…", help=help_text)


def _all(*decorators: Decorator) -> Decorator:
    return lambda command: reduce(lambda f, decorate: decorate(f), reversed(decorators), command)


model = click.argument("model")
json_output = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
remote_code = click.option(
    "--trust-remote-code", is_flag=True, help="Run Python code that comes with the checkpoint. Read it first."
)
_verbosity = _all(
    click.option("-v", "--verbose", is_flag=True, help="Show warnings of libraries, and tracebacks of known errors."),
    click.option("-q", "--quiet", is_flag=True, help="Show no progress and no warnings."),
)
common = _all(json_output, remote_code, _verbosity)
plain = _all(json_output, _verbosity)


def engine(help_text: str) -> Decorator:
    """The option that names an engine."""
    return click.option("--engine", type=click.Choice(tuple(ENGINES)), help=help_text)


arithmetic = click.option(
    "--dtype", type=click.Choice(("auto", *DTYPES)), default="auto", show_default=True, help="Compute in this dtype."
)
device = click.option("--device", default="auto", show_default=True, help="Where to compute: auto, cpu, cuda, cuda:1, …")


def _texts(use: str, writer: str) -> Decorator:
    """The options of the texts to use, of which one may be what a model writes."""
    return _all(
        click.option(
            "--text",
            type=TextFile(exists=True, dir_okay=False, path_type=Path),
            multiple=True,
            metavar="FILE",
            help=f"UTF-8 text to {use} on, or self for what {writer} writes itself, or its own-text.safetensors of an earlier "
            "run; repeatable. Never use the text that you evaluate on.  [default: self]",
        ),
        click.option(
            "--text-shares",
            type=Shares(),
            metavar="N,…",
            help="Shares of the tokens, in the order of --text; that of a dataset is 1.  [default: equal]",
        ),
        click.option(
            "--dataset",
            type=click.Choice(DATASETS),
            help=f"{use.capitalize()} on the training split of this dataset, too. Needs pip install 'kvfold[data]'.",
        ),
    )


calibration = _all(
    _texts("calibrate", "MODEL"),
    click.option("--no-text", is_flag=True, help="Calibrate on no text: convert from weights alone, which ruins most models."),
    click.option(
        "--calibration-tokens",
        type=click.IntRange(1),
        metavar="N",
        help="Calibrate on N tokens from all over the text.  [default: 32768; of MODEL's own text alone 65536]",
    ),
    click.option(
        "--calibration-context",
        type=click.IntRange(2),
        metavar="N",
        help="Tokens per calibration block; of fewer than 16 blocks of 1024 or more, every other one is cut into four.  "
        "[default: 2048, of MODEL's own text alone 512, or MODEL's limit]",
    ),
    click.option(
        "--max-context",
        type=click.IntRange(2),
        metavar="N",
        help="Tokens of the longest context that the result is for: rotary keys serve distances up to N.  "
        "[default: --calibration-context, or 2048, or MODEL's limit]",
    ),
    click.option(
        "--refit/--no-refit",
        default=None,
        help="Fit queries, keys, outputs and, for GQA, values by least squares.  [default: with text, for methods that use it]",
    ),
    click.option(
        "--refine",
        type=click.IntRange(1),
        metavar="STEPS",
        help="Train each converted layer for STEPS steps to match the source's layer.",
    ),
    click.option(
        "--heal",
        type=Count(parse_tokens),
        metavar="N",
        help="At the end, distil the source into the result on N tokens of the text, such as 64k; 0 for none.  [default: "
        "as many as are calibrated on, up to 65536, where the model trains in memory, for methods that use text; 0 in sweeps]",
    ),
)

measuring = _all(
    click.option(
        "--protocol", type=click.Choice(PROTOCOLS), default=PROTOCOLS[0], show_default=True, help="How to cut the text."
    ),
    listed("--context", click.IntRange(2), "Tokens per block; each is evaluated.  [default: 2048, or the models' limit]"),
    click.option("--max-tokens", type=click.IntRange(2), metavar="N", help="Use only the first N tokens of the text."),
)

_seed = click.IntRange(0, 2**32 - 1)
_begun = _all(
    click.option("--overwrite", is_flag=True, help="Replace an existing result, once the new one is complete."),
    click.option(
        "--resume",
        is_flag=True,
        help="Finish an interrupted run of the same command. With --overwrite, start again if it was another command.",
    ),
)

healing = _all(
    click.argument("converted"),
    click.argument("output", type=click.Path(path_type=Path)),
    click.option("--teacher", metavar="MODEL", help="The model that CONVERTED was made from.  [default: as it records]"),
    _texts("train", "the teacher"),
    click.option("--tokens", type=Count(), metavar="N", help="Train on N tokens, such as 20M.  [default: those of --effort]"),
    click.option(
        "--time", type=_TIME, metavar="TIME", help="Train on as many tokens as take TIME here, such as 90min, 1h or 2d."
    ),
    click.option(
        "--effort",
        type=click.Choice(("quick", "standard", "thorough")),
        default="quick",
        show_default=True,
        help="20M, 200M or 2B tokens; for more than 2 billion parameters, 50M, 500M or 3B.",
    ),
    click.option(
        "--context", type=click.IntRange(2), metavar="N", help="Tokens per block.  [default: 2048, or the models' limit]"
    ),
    click.option(
        "--batch-tokens",
        type=Count(),
        metavar="N",
        help="Tokens per step.  [default: a thousandth of all, at least a block, at most 65536]",
    ),
    click.option("--micro-batch-tokens", type=Count(), metavar="N", help="Tokens per forward pass.  [default: 4096]"),
    click.option(
        "--lr",
        type=Rate(),
        default="auto",
        show_default=True,
        help="The learning rate. auto tries three or more of them first, if there are 150 steps or more.",
    ),
    click.option(
        "--train",
        type=click.Choice(("attention", "all", "lora")),
        default="attention",
        show_default=True,
        help="Which weights to train: those of attention and the norms before it, all, or LoRA beside those of attention.",
    ),
    click.option("--lora-rank", type=click.IntRange(1), metavar="N", help="The rank of --train lora.  [default: 16]"),
    click.option(
        "--ce",
        type=click.FloatRange(0),
        default=0.0,
        show_default=True,
        metavar="WEIGHT",
        help="Add the cross-entropy of the text, times WEIGHT, to the KL.",
    ),
    click.option("--top-k", type=click.IntRange(1), metavar="K", help="Use only the K largest probabilities of the teacher."),
    click.option(
        "--teacher-cache",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Keep these in DIR, for all steps and later runs, so that the teacher is not in memory beside the student.",
    ),
    click.option(
        "--track",
        metavar="NAME",
        help="Send figures to tensorboard, wandb or another tracker of accelerate; files go to OUTPUT.logs.",
    ),
    click.option("--eval-every", type=Count(), metavar="N", help="Measure every N tokens.  [default: ten times]"),
    click.option("--checkpointing", is_flag=True, help="Compute layers again in the backward pass: slower, with less memory."),
    click.option(
        "--evaluate",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Measure perplexity on this held-out text, and add it to the model card.",
    ),
    device,
    click.option("--seed", type=_seed, default=0, show_default=True, help="For the order of blocks."),
    _begun,
    click.option(
        "--dry-run", is_flag=True, help="Print the plan and how long it takes here, and stop. Reads the text, but no weights."
    ),
    common,
)

writing = _all(
    click.option("--dtype", type=click.Choice(DTYPES), help="Store floats in this dtype.  [default: as in MODEL]"),
    engine("Make what this engine runs, and refuse what it does not."),
    device,
    click.option(
        "--seed",
        type=_seed,
        default=0,
        show_default=True,
        help="For methods that draw random numbers, and for the order in which --refine reads blocks of text.",
    ),
    click.option(
        "--max-shard-size", type=ByteSize(), default="5GB", show_default=True, help="Start a new weight file beyond this size."
    ),
    _begun,
    click.option("--dry-run", is_flag=True, help="Print the plan and how long it takes here, and stop. Reads no weights."),
)

conversion = _all(
    click.argument("model"),
    click.argument("output", type=click.Path(path_type=Path)),
    writing,
    click.option("--force", is_flag=True, help="Publish the result, however much it loses."),
    click.option(
        "--evaluate",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Measure perplexity on this held-out text, and add it to the model card.",
    ),
    common,
)
