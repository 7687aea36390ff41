"""What a converted model loses and costs: perplexity, KL and live cache bytes; speed and memory; the reports.

`from eval import evaluate, bench`. Import names, never the package: `eval` is a builtin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.api import bench, evaluate

__all__ = ["bench", "evaluate"]


def __getattr__(name: str) -> Any:
    """They are imported when first asked for: neither torch nor transformers is needed to read an option."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eval import api

    return getattr(api, name)
