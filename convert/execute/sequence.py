"""Converts layers in order, each on the outputs of the converted layers before it, so that it can compensate for their losses.

Two models run side by side over the calibration text and over first tokens, one layer at a time: the source, whose outputs are
the aim, and the result so far, not sharpened yet. Finished layers and the inputs of the next one are on disk, where `--resume`
finds them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from attention.auto import config_of
from attention.encoded_forward import rounding_cache
from attention.record import Attention, Record
from attention.spread import evenly_spread
from convert.calibration.outputs import OutputFit
from convert.calibration.refit import sample_for
from convert.calibration.stream import LayerStream
from convert.calibration.survey import FIRST_TOKENS, Moments
from convert.checkpoint.loading import empty_model
from convert.execute.job import Job
from convert.methods.blocks import Blocks
from convert.methods.sharpened import sharpened
from convert.methods.statistics import Statistics
from convert.planning.calibration import CalibrationText
from eval.inputs.sealed import Content, Shelf
from eval.terminal.progress import stage

_ENDS, _BETWEEN = 384, 256  # tokens of the vocabulary
_FAR = 0.03  # of a first token's energy: a layer that lacks more of most is fitted to them, at some cost to the text

# The source's residual stream behind the attention, what the result's heads read, and what should come out of that.
_See = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def in_sequence(job: Job, text: CalibrationText) -> Callable[[int], Content]:
    """Convert all layers.

    Args:
        job: The conversion; its work directory keeps finished layers.
        text: The calibration text.

    Returns:
        Maps a layer's index to its tensors and its note.
    """
    shelf = Shelf(job.work.steps, "layer")
    missing = [layer for layer in range(job.plan.before.num_layers) if not shelf.has(layer)]
    if not missing:
        return shelf.get
    both = _Both(job, text)
    begin, end = both.begin(missing[0]), missing[-1] + 1
    with stage(job.progress, "fit", end - begin, "layer") as done:
        for layer in range(begin, end):  # layers on the shelf again, too: it has no unsharpened tensors
            content, plain = both.converted(layer)
            if layer + 1 < end:
                for pair in both.pairs:
                    pair.student.advance(layer, weights=plain)
            shelf.put(layer, *content)
            done(1)
    for stream in both.streams:
        stream.discard()
    return shelf.get


class _Pair(NamedTuple):
    """The source and the result so far, over one text."""

    teacher: LayerStream
    student: LayerStream


class _Both:
    """Both models, run over the text and over first tokens. Arguments as of `in_sequence`.

    Attributes:
        pairs: Over the text, and over texts of one token.
    """

    def __init__(self, job: Job, text: CalibrationText) -> None:
        self._job, self._layout, plan, steps = job, job.plan.layout, job.plan, job.work.steps
        config = config_of(plan.plain_config(job.choice.pairs))
        self._biased = self._layout.of(config).traits.o_bias  # which may be fitted even if the source's has none
        # No layer is precise: which ones copy is found once all are fitted.
        form = plan.target.rounding
        cache = None if form is None else rounding_cache(replace(form, precise=None), job.spec)
        source, result = empty_model(plan.source.config), empty_model(config)

        def pair(blocks: Blocks, name: str) -> _Pair:
            return _Pair(
                LayerStream(source, plan.family, job.manifest.reader, blocks, steps / f"{name}teacher", plan.runs_on),
                LayerStream(result, self._layout, job.manifest, blocks, steps / f"{name}student", plan.runs_on, cache),
            )

        self.pairs = pair(text.blocks, ""), pair(first_tokens(plan.source.vocabulary), "first-")

    @property
    def streams(self) -> list[LayerStream]:
        return [stream for pair in self.pairs for stream in pair]

    def begin(self, missing: int) -> int:
        """The last layer up to `missing` whose inputs exist everywhere; else 0, whose inputs are made anew.

        A layer may be missing although later ones exist, because its file was damaged.
        """
        if there := {layer for layer in set.intersection(*(stream.ready for stream in self.streams)) if layer <= missing}:
            return max(there)
        for stream in self.streams:
            stream.discard()
            stream.embed()
        return 0

    def converted(self, layer: int) -> tuple[Content, dict[str, torch.Tensor]]:
        """Convert a layer, and run the source past it; also return its unsharpened tensors, which later fits build on."""
        job, (text, first) = self._job, self.pairs
        if layer in job.spec.kept:
            for pair in self.pairs:
                pair.teacher.advance(layer)
            return (kept := job.kept(layer)), kept[0]
        tensors, source = job.read_layer(layer)
        sample = sample_for(text.teacher.width, normed=job.plan.target.host.portable)
        moments = Moments(layer, text.teacher, source, sample, job.shows_attention)
        text.teacher.observe(layer, moments.see)
        observed, after = self._changed(source, layer, moments)
        if far := self._lacks_first(layer, after):
            first.teacher.observe(layer, moments.see_first)
            observed, after = self._changed(source, layer, moments)
        errors, fit = job.error_of(source, after, observed), OutputFit(after)
        self._run(text, layer, after, lambda _, read, target: fit.see(read, target))
        if far:
            usual = text.teacher.select(layer, [0]).hidden.norm(dim=-1).median()
            count = FIRST_TOKENS * text.teacher.text.rows.numel() / first.teacher.text.rows.numel()

            def see(stream: torch.Tensor, read: torch.Tensor, target: torch.Tensor) -> None:
                # Tokens that are sinks already count less: much is missing in them, and matters little.
                fit.see(read, target, count * (usual / stream.norm(dim=-1)).square().clamp_max(1))

            self._run(first, layer, after, see)
        fitted = fit.record()
        last = sharpened(fitted, errors.get("output_error", 0.0), observed)
        return job.as_stored(layer, tensors, last, errors), job.as_stored(layer, tensors, fitted, errors)[0]

    def _lacks_first(self, layer: int, after: Record) -> bool:
        """Whether the layer's outputs lack much of the residual stream of most first tokens, if they go there as they are."""
        fit, lacking = OutputFit(after), list[torch.Tensor]()

        def see(stream: torch.Tensor, read: torch.Tensor, target: torch.Tensor) -> None:
            lacking.append(fit.missing(read, target).square().sum(-1) > _FAR * stream.square().sum(-1))

        self._run(self.pairs[1], layer, after, see)
        return bool(torch.cat(lacking).float().mean() > 0.5) and self._job.plan.family.traits.adds_output

    def _changed(self, source: Attention, layer: int, moments: Moments) -> tuple[Statistics, Record]:
        observed = moments.statistics()
        after = self._job.changed(source, layer, observed)
        if after.o_bias is None and self._biased:
            after = replace(after, o_bias=torch.zeros_like(after.o[:, 0, 0]))
        return observed, after

    def _run(self, pair: _Pair, layer: int, after: Record, see: _See) -> None:
        """Run the source past a layer, and the result up to what its heads read."""
        weights = {name: tensor.float() for name, tensor in self._layout.join(after, self._job.spec, layer).items()}
        adds, rest = self._job.plan.family.traits.adds_output, pair.student.rest(layer)

        def attended(batch: int, inputs: torch.Tensor, added: torch.Tensor) -> None:
            own, stream = pair.student.batch(layer, batch), inputs + added
            see(stream, pair.student.read(layer, rest, own, weights), stream - own.hidden if adds else added)

        pair.teacher.advance(layer, attended=attended)


def first_tokens(vocabulary: int) -> Blocks:
    """Texts of one token, `[n, 1]`: the lowest and the highest ids, often bytes and control tokens, and some between.

    The first token of a text reads itself alone. What early layers make of it decides whether it becomes a sink of attention
    (massive activations, arXiv 2402.17762), without which a model is lost. Calibration text has only one per block.
    """
    ids = {*range(vocabulary)[:_ENDS], *range(vocabulary)[-_ENDS:], *evenly_spread(min(_BETWEEN, vocabulary), vocabulary)}
    return Blocks.whole(torch.tensor(sorted(ids))[:, None])
