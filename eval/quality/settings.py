"""How to evaluate."""

from dataclasses import dataclass

PROTOCOLS = ("paper", "bos", "sliding")


@dataclass(frozen=True)
class EvaluationSettings:
    """How to evaluate.

    Attributes:
        protocol: One of `PROTOCOLS`, see `eval.quality.perplexity`.
        contexts: Tokens per block; each is evaluated. Empty for min(2048, the smallest position limit of the models).
        max_tokens: How many tokens to evaluate on, from the text's start; None for all.
        dtype: Dtype of the forward passes; "auto" is float32 on a CPU, the checkpoint's own dtype elsewhere.
        device: "auto", "cpu", "cuda", "cuda:1", …; "auto" spreads a model with accelerate's device map.
        probes: Whether to measure loss by position, copying and retrieval (`eval.quality.probes`).
        cache_dtypes: Formats of the cache, see `attention.formats`: each model is evaluated with each, too.
    """

    protocol: str = "paper"
    contexts: tuple[int, ...] = ()
    max_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    probes: bool = True
    cache_dtypes: tuple[str, ...] = ()
