"""The options of `evaluate` and `bench`, by what they are about, and those that other functions take alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

from attention.formats import KNOWN_FORMATS
from eval.arguments import Option, parse_count
from eval.inputs.text import DATASETS, OneText
from eval.quality.settings import PROTOCOLS
from eval.terminal.progress import Progress, silent

DTYPES = ("float32", "bfloat16", "float16")
DEVICE = Option("Where to compute: auto, cpu, cuda, cuda:1, …", default="auto")


class Reading(TypedDict, total=False):
    """What may be done with a checkpoint."""

    trust_remote_code: Annotated[bool, Option("Run Python code that comes with the checkpoint. Read it first.", consent=True)]


class Working(Reading, total=False):
    """The same for work that takes a while."""

    progress: Annotated[Progress, Option("Called as `progress(stage, done, total, unit)`.", default=silent, flag="")]


class HeldOut(TypedDict, total=False):
    """The text to evaluate on."""

    text: Annotated[OneText | None, Option("UTF-8 text to evaluate on.", file=True)]
    dataset: Annotated[
        str | None, Option("Evaluate on the test split of this dataset. Needs pip install 'kvfold[data]'.", choices=DATASETS)
    ]


class Measuring(TypedDict, total=False):
    """How to measure perplexity."""

    protocol: Annotated[str, Option("How to cut the text.", default=PROTOCOLS[0], choices=PROTOCOLS)]
    context: Annotated[
        int | str | Sequence[int | str] | None,
        Option(
            "Tokens per block; each is evaluated.", default=(), unset="2048, or the models' limit", least=2, parse=parse_count
        ),
    ]
    max_tokens: Annotated[int | None, Option("Use only the first N tokens of the text.", least=2)]
    cache_dtype: Annotated[
        str | Sequence[str],
        Option(
            "Also evaluate each model with its KV cache in these formats: fp8, int8, int4, int3, int2, q8_0, q4_0, mixed (of "
            "latents), a dtype, or what only engines store, such as turboquant_4bit_nc.",
            default=(),
            choices=tuple(KNOWN_FORMATS),
            metavar="NAME,…",
            python="One name, or several.",
        ),
    ]


class Probing(TypedDict, total=False):
    """What else to measure, and where the report goes."""

    no_probes: Annotated[bool, Option("Leave out the probes: loss by position, copying, key–value retrieval.")]
    output: Annotated[str | Path | None, Option("Write report.json, .md and .html to DIR.", directory="new")]
    overwrite: Annotated[bool, Option("Replace an earlier report in DIR.", consent=True)]


class Timing(TypedDict, total=False):
    """What to measure the speed of, and where the figures go."""

    batch: Annotated[Sequence[int], Option("Batch sizes to measure.", default=(1,), unset="1", least=1)]
    context: Annotated[
        Sequence[int | str],
        Option("Context lengths to measure.", default=(), unset="2048, or the models' limit", least=2, parse=parse_count),
    ]
    steps: Annotated[int, Option("Decode steps per round.", default=20, least=1)]
    rounds: Annotated[int, Option("Rounds of each model, batch and context.", default=5, least=1)]
    stock: Annotated[bool, Option("Also measure MLA and GQA models as stock transformers runs them.")]
    output: Annotated[str | Path | None, Option("Write bench.json to DIR.", directory="new")]
    overwrite: Annotated[bool, Option("Replace an earlier benchmark in DIR.", consent=True)]


class Computing(TypedDict, total=False):
    """In which dtype to compute, and where."""

    dtype: Annotated[
        str,
        Option(
            "Compute in this dtype.",
            default="auto",
            choices=("auto", *DTYPES),
            python="auto is float32 on a CPU, the checkpoint's own dtype elsewhere.",
        ),
    ]
    device: Annotated[str, DEVICE]


class Evaluate(HeldOut, Measuring, Probing, Computing, Working):
    """The options of `evaluate`."""


class Bench(Timing, Computing, Working):
    """The options of `bench`."""
