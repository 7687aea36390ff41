"""Least squares on calibration text, after a method has done its part.

Methods take queries, keys, values and distances for independent. `refitted` fits each of them to the others on the text:
queries (`queries`) and keys (`keys`) by turns, as long as that helps, then values (`values`). A change is taken as far as it
brings the layer's outputs closer to the source's on blocks that it was not fitted on. `outputs` then fits W_O behind the
converted layers.
"""

from collections.abc import Callable, Sequence

import torch

from attention.forward import Block, attention_output, heads_of
from attention.record import Attention, Record
from convert.calibration.keys import fitted_gains, fitted_keys
from convert.calibration.queries import fitted_queries
from convert.calibration.values import fitted_values
from convert.methods.blocks import Blocks
from convert.methods.statistics import EXCERPT, Attended

_TOKENS, _NUMBERS = 2**14, 2**25  # of the sample at most; of one activation of all its tokens, which bounds memory
_NORMED_TOKENS = 2**16  # of the sample at most; with 2¹⁴, a small model lost 0.005 nats more
_ROUNDS, _GAIN = 3, 0.9  # of keys and queries; another one follows only if the last one left at most this share of the error
_NORMED_ROUNDS, _NORMED_GAIN = 12, 0.98  # behind a norm each is one step of Gauss and Newton
_ROUNDING = 1e-8  # of an output's energy: what does not lose more than that is left as it is
_WHOLE = 0.9  # of a change: from this share on, all of it is taken


def refitted(before: Attention, after: Record, sample: Blocks, attended: Attended) -> Record:
    """The result with queries, keys and values that fit, as far as they bring its outputs closer to the source's.

    A single row has no other one to judge by. Only queries are fitted on it, which have the fewest weights.

    Args:
        before: The source's record.
        after: The result's, whose heads are in the same order.
        sample: The layer's inputs, of which as much is used as time allows.
        attended: Moments of the text as the source's attention sees it.
    """
    attended = attended.to(sample.rows.device)
    sample = sample.spread(sample_for(sample.rows.shape[-1]))
    fitted, others = ([block.float() for block in sample.of(part).blocks] for part in sample.parted())
    search, alone = _Search(before, others), len(sample.rows) == 1
    sources = [heads_of(before, x) for x in fitted]
    after = search.closer(after, fitted_queries(before, after, fitted, sources))
    normed = isinstance(after, Attention) and after.k_norm is not None
    for _ in range(0 if alone else _NORMED_ROUNDS if normed else _ROUNDS):
        error = search.error(after)
        after = search.closer(after, fitted_keys(after, fitted, sources, attended))
        if isinstance(after, Attention) and after.k_norm is not None and not after.k_norm.form.fixed:
            after = search.closer(after, fitted_gains(after, fitted, sources, attended))
        after = search.closer(after, fitted_queries(before, after, fitted, sources))
        if search.error(after) > (_NORMED_GAIN if normed else _GAIN) * error:
            break
    if isinstance(after, Attention) and not alone:
        after = search.closer(after, fitted_values(before, after, fitted, attended.read))
    return after


def sample_for(width: int, normed: bool = False) -> int:
    """The tokens that layers of a model of that width are fitted on; `normed` with a norm (`convert.methods.portable_norm`)."""
    return max(EXCERPT, min(_NORMED_TOKENS if normed else _TOKENS, _NUMBERS // width))


class _Search:
    """Finds how much of a change brings outputs closest to the source's.

    Args:
        before: The source's record.
        blocks: What the layer reads, fp32.
    """

    def __init__(self, before: Attention, blocks: Sequence[Block]) -> None:
        self._blocks, self._expected = blocks, attention_output(before, blocks)
        self._energy = float(self._expected.double().square().sum())
        self._last: tuple[Record, torch.Tensor] | None = None

    def error(self, after: Record) -> float:
        """The squared error of the outputs."""
        return float(self._lacking(after).double().square().sum())

    def closer(self, after: Record, made: Callable[[float], Record]) -> Record:
        """`made(share)` of the best share, or `after` if no share is better."""
        tried = {0.0: after, 1.0: made(1.0)}
        lacking = {share: self._lacking(record) for share, record in tried.items()}
        error, moved = lacking[0.0].double(), (lacking[0.0] - lacking[1.0]).double()
        # If outputs were linear in the share of the change, the error would be least at this one.
        share = float((error * moved).sum() / moved.square().sum().clamp_min(torch.finfo(torch.float64).tiny))
        if 0 < share < _WHOLE:
            tried[share] = made(share)
            lacking[share] = self._lacking(tried[share])
        errors = {share: float(rows.double().square().sum()) for share, rows in lacking.items()}
        best = 0.0 if errors[0.0] <= _ROUNDING * self._energy else min(errors, key=errors.__getitem__)
        self._last = tried[best], lacking[best]
        return tried[best]

    def _lacking(self, after: Record) -> torch.Tensor:
        """`[tokens, E]`, of the outputs. The last result is cached."""
        if self._last and self._last[0] is after:
            return self._last[1]
        return self._expected - attention_output(after, self._blocks)
