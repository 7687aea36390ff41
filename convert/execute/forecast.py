"""How long a conversion takes: the work of its stages, from sizes alone.

Passes over the text and the fits are most of it. What is counted here is what the stages of `convert.execute` and
`convert.calibration` do; the constants below are all that has to change with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attention.spec import AttentionSpec
from convert.calibration.least_squares import SPAN, TOKENS
from convert.calibration.own_text import ROUGH, writing_work
from convert.calibration.refit import sample_for
from convert.execute.checking import OWN_LENGTH, OWN_ROWS
from convert.execute.job import device_of
from convert.methods.blocks import Blocks
from convert.methods.latent import LatentMethod
from convert.methods.ranks import measured_ranks
from convert.methods.statistics import EXCERPT
from convert.methods.text import TextUse
from convert.planning.base import Plan
from convert.planning.calibration import Calibration, surveyed_tokens
from convert.planning.targets import GroupedTarget, LatentTarget
from eval.machine.device import rough
from eval.machine.forecast import Decoder, Work, expected_seconds, foretell
from eval.quality.evaluation import evaluation_work

# Passes of a layer over the text.
_SURVEYED = 1.0  # by the source
_IN_SEQUENCE = 2.4  # by the source, by the result, and by the result's attention alone
_QUERIES = 64  # of each block, whose attention is measured
# The refit of one layer: fits of queries, keys and values, each of passes over the logits of its tokens.
# As many as made forecasts of a real model hold; what fits do besides is in them.
_FITS = {GroupedTarget: 12, LatentTarget: 8}
_FITS_THROUGH_NORM = 28  # of heads whose QK-norm stays behind them: more rounds, and gains
_EXACT_PASSES, _ROUGH_PASSES = 2, 7  # of a fit: the logits that it begins with, and the steps of conjugate gradients
_PASS_VALUES = 3  # of elementwise operations, for each logit
_PASS_CALLS = 25  # of operators, for each span of tokens
_JUDGEMENTS = 3  # attention outputs of the rows to judge by, of each fit
# The choice of a latent's layout.
_OFFERS, _TRIED_LAYERS = 2, 4
_TRIED_TOKENS = EXCERPT // 2
# Refinement: a trial and the steps themselves, each with a backward pass.
_DESCENTS, _PASSES_OF_STEP, _STEP_TOKENS = 2, 3, 2048
_MUON = 30  # flops of a matrix's step, for each of its values and the shorter side
_CHECKED_TOKENS = 1024  # of each text
# Decompositions and solutions in fp64.
_DECOMPOSED = 25  # flops in fp32 that take as long, for n³
_DECOMPOSITIONS = {GroupedTarget: 2, LatentTarget: 4}  # of the method, of size E


@dataclass(frozen=True)
class _Layer:
    """The sizes of one layer, and what it does to `tokens` in blocks of `context`."""

    plan: Plan
    decoder: Decoder
    tokens: int
    context: int

    @property
    def spec(self) -> AttentionSpec:
        return self.plan.before

    @property
    def width(self) -> int:
        return self.decoder.width

    @property
    def heads_width(self) -> int:
        """H D, what the output projection reads."""
        return self.spec.num_heads * self.spec.head_dim

    def passes(self, count: float, tokens: int, context: int) -> Work:
        """Forward passes of the layer."""
        return count / self.decoder.layers * self.decoder.forward(tokens, context, logits=0)

    def moments(self) -> Work:
        """The moments of the layer's inputs, also as attention sees them."""
        spec, width, queries = self.spec, self.width, min(_QUERIES, self.context)
        projected = 2 * width * spec.key_dim * (spec.num_heads + spec.num_kv_heads)
        attended = 2 * queries * spec.num_heads * (spec.key_dim + width * (1 + width / self.context))
        values = 4 * queries * spec.num_heads
        return self.tokens * Work(4 * width**2 + projected + attended, values)

    def decomposed(self, count: float, size: int) -> Work:
        return Work(flops=count * _DECOMPOSED * size**3)

    def method(self) -> Work:
        """The method's change of the layer's weights."""
        size = min(self.width, self.heads_width)
        return self.decomposed(_DECOMPOSITIONS[type(self.plan.target)], size)

    def refit(self, tokens: int) -> Work:
        """The fits of queries, keys and values on a sample of so many tokens."""
        fitted, judged = self._parted(max(1, tokens // self.context))
        count, pairs = sum(fitted), sum(length**2 for length in fitted) / 2
        logits = self.spec.num_heads * pairs * min(1, TOKENS / count)
        exact = _EXACT_PASSES + _ROUGH_PASSES * ROUGH[rough(device_of(self.plan))]
        one_fit = logits * Work(exact * 4 * self._fitted_dims, (_EXACT_PASSES + _ROUGH_PASSES) * _PASS_VALUES)
        one_fit += Work(calls=(_EXACT_PASSES + _ROUGH_PASSES) * _PASS_CALLS * min(count, TOKENS) / SPAN)
        return self._fits * (one_fit + _JUDGEMENTS * self._attention(judged))

    @property
    def _fits(self) -> int:
        """How many fits the refit takes, about."""
        plan = self.plan
        if plan.family.traits(plan.source.config).qk_norm and not plan.reads_projections:
            return _FITS_THROUGH_NORM
        return _FITS[type(plan.target)]

    def _attention(self, lengths: list[int]) -> Work:
        """The attention's outputs of blocks of these lengths."""
        spec, pairs = self.spec, sum(length**2 for length in lengths) / 2
        weights = self.width * (spec.key_dim + spec.head_dim) * (spec.num_heads + spec.num_kv_heads)
        scored = spec.num_heads * pairs * Work(2 * (spec.key_dim + spec.head_dim), 1)
        return scored + Work(2 * weights * sum(lengths))

    @property
    def _fitted_dims(self) -> float:
        """Of what queries and keys meet, on average over the fits."""
        target = self.plan.target.spec
        return self.spec.key_dim if target.kv_lora_rank is None else target.kv_lora_rank / 2 + target.qk_rope_head_dim

    def _parted(self, rows: int) -> tuple[list[int], list[int]]:
        """The lengths of the blocks of a sample of so many rows: those to fit, and those to judge by."""
        blocks = Blocks.mixed(torch.empty(rows, self.context, device="meta"))
        fitted, others = ([blocks.cuts[row] for row in part] for part in blocks.parted())
        return self._lengths(fitted), self._lengths(others)

    def _lengths(self, cuts: list[int]) -> list[int]:
        return [self.context // parts for parts in cuts for _ in range(parts)]

    def fit(self, calibration: Calibration) -> Work:
        """Everything that is done to the layer in sequence."""
        work = self.passes(_IN_SEQUENCE, self.tokens, self.context) + self.moments()
        if calibration.refit:
            work += self.refit(min(self.tokens, sample_for(self.width)))
            work += self.tokens * Work(2 * self.heads_width * (self.heads_width + self.width))
            work += self.decomposed(1, self.heads_width)
        if calibration.refine:
            rows = max(1, _STEP_TOKENS // self.context) * self.context
            step = self.passes(_PASSES_OF_STEP, rows, self.context)
            step += Work(_MUON * 4 * self.width * self.heads_width * min(self.width, self.heads_width))
            work += _DESCENTS * calibration.refine * step
        return work


def work_of(
    plan: Plan, decoder: Decoder, tokens: int = 0, evaluated: int = 0, surveyed: bool = False, written: bool = False
) -> Work:
    """The work of a conversion.

    Args:
        plan: The conversion.
        decoder: The source's.
        tokens: Of the calibration text; 0 without.
        evaluated: Tokens of held-out text, for source and result, also with their caches in the format of a plan; 0 without.
        surveyed: Whether statistics of the source are there already.
        written: Whether the calibration text that the source writes is there already.
    """
    target, text, layers = plan.target, plan.calibration, plan.before.num_layers
    work = 2 * decoder.load()  # and writing
    if evaluated:
        work += evaluation_work([decoder, decoder] * (1 if plan.rounding is None else 2), plan.source, evaluated)
    if target.copies:
        return work
    layer = _Layer(plan, decoder, tokens, min(text.context, tokens) if text and tokens else 1)
    work += layers * layer.method() + _check(plan, decoder)
    if text is None or not tokens:
        return work
    if text.rows_to_write and not written:
        work += _writing(plan, decoder, text.rows_to_write, text.context)
    if needs_survey(plan) and not surveyed:
        seen = replace(layer, tokens=surveyed_tokens(text, tokens))
        work += layers * (seen.passes(_SURVEYED, seen.tokens, layer.context) + seen.moments())
    if text.heal:
        work += _healing(plan, decoder, text.heal, text.heal_context)
    if isinstance(target, LatentTarget):
        work += _decision(target, layer)
    return work + layers * layer.fit(text) if text.in_sequence else work


def _writing(plan: Plan, decoder: Decoder, rows: int, length: int) -> Work:
    return writing_work(decoder, plan.before, rows, length, device_of(plan))


def _healing(plan: Plan, decoder: Decoder, tokens: int, context: int) -> Work:
    """Distilling the source into the result, whose queries and outputs train, and a few keys and values."""
    trained = 2 * plan.before.num_layers * decoder.width * plan.before.num_heads * plan.before.head_dim
    steps = math.ceil(tokens / context)
    return 2 * decoder.load() + decoder.forward(tokens, context) + decoder.distilled(tokens, context, trained, steps)


def _check(plan: Plan, decoder: Decoder) -> Work:
    """The comparison of source and result at the end."""
    files = sum(not text.own for text in plan.calibration.texts) if plan.calibration else 0
    compared = decoder.load() + decoder.forward((1 + files) * _CHECKED_TOKENS, OWN_LENGTH)
    return _writing(plan, decoder, OWN_ROWS, OWN_LENGTH) + 2 * compared


def reads_text(plan: Plan) -> bool:
    """Whether layers are converted by the calibration text: not if it is only there to heal the result."""
    text = plan.calibration
    return text is not None and (text.in_sequence or plan.target.method.text is not TextUse.IGNORED)


def needs_survey(plan: Plan) -> bool:
    """Whether the source's statistics are needed before layers are converted."""
    text = plan.calibration
    return text is not None and reads_text(plan) and (isinstance(plan.target.method, LatentMethod) or not text.in_sequence)


def _decision(target: LatentTarget, layer: _Layer) -> Work:
    """Work for all layers together: frequencies, sizes and ranks."""
    measured = target.method.measure is not None and target.spec.qk_rope_head_dim > 0
    work = layer.decoder.layers * layer.method() if measured else Work()
    offers = _OFFERS * len(target.splits or (target,)) if measured else 1
    if offers > 1:
        sample = min(_TRIED_TOKENS, math.ceil(layer.tokens / 2))
        one = layer.method() + (layer.refit(sample) if layer.plan.calibration and layer.plan.calibration.refit else Work())
        work += offers * min(_TRIED_LAYERS, layer.decoder.layers) * one
    if target.ranks:
        one = layer.method() + layer.passes(1, min(EXCERPT, layer.tokens), layer.context)
        work += layer.decoder.layers * len(measured_ranks(target.ranks)) * one
    return work


def works_of(plans: Sequence[Plan], tokens: int, evaluated: int = 0) -> list[Work]:
    """The work of conversions of one source, which is surveyed once.

    Args:
        plans: From `convert.planning`.
        tokens: Of the calibration text.
        evaluated: Tokens of held-out text that each is evaluated on, beside the source; 0 for none.
    """
    decoder = Decoder.of(plans[0].source.config, plans[0].source.trust_remote_code)
    works: list[Work] = []
    surveyed, written = set[bool](), False
    for plan in plans:
        known = plan.reads_projections in surveyed
        works.append(work_of(plan, decoder, tokens, evaluated, surveyed=known, written=written))
        written = written or bool(plan.calibration and plan.calibration.rows_to_write)
        if needs_survey(plan):
            surveyed.add(plan.reads_projections)
    return works


def expected_duration(plan: Plan, work: Work) -> float:
    """The seconds that the work takes on the plan's device."""
    return expected_seconds(work, device_of(plan), plan.source.decoder.hidden_size)


def foretell_conversion(plan: Plan, tokens: int, evaluated: int) -> float | None:
    """Say how long a conversion takes, with an evaluation on so many tokens. Returns the seconds, if it is long."""
    decoder = Decoder.of(plan.source.config, plan.source.trust_remote_code)
    return foretell(work_of(plan, decoder, tokens, evaluated), device_of(plan), decoder.width)
