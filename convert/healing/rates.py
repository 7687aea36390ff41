"""Where the search for a learning rate begins.

Distillations of models with up to 2 billion parameters took 8e-5 where much was lost, 3e-5 and 1e-5 where little was, and those
with 7 billion a quarter (docs/healing.md). Between and below these, the rate follows 1 / width.
"""

from __future__ import annotations

_RATES = ((1.0, 8e-5), (0.2, 3e-5), (0.0, 1e-5))  # of a loss in nats upwards
_WIDTH = 2048  # of the models that these are of


def start_rate(loss: float, width: int) -> float:
    """The rate for a student of this width that loses `loss` nats per token over its teacher."""
    rate = next((rate for least, rate in _RATES if loss > least), _RATES[-1][1])
    return rate * _WIDTH / width
