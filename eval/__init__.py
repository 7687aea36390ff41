"""Measures the quality and the cost of converted models: perplexity, KL, live cache bytes, speed, memory; writes reports.

`from eval import evaluate, bench`. Import names, never the package: `eval` is a builtin.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.api import bench, evaluate

__all__ = ["bench", "evaluate"]


def __getattr__(name: str) -> Any:
    """Import the public functions on first use: parsing options needs neither torch nor transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eval import api

    return getattr(api, name)
