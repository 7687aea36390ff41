"""Converts layers in order, each on the outputs of the converted layers before it, so that it can compensate for their losses.

Two models run side by side over the calibration text, one layer at a time: the source, whose outputs are the aim, and the
result so far, not sharpened yet. Finished layers and the inputs of the next one are on disk, where `--resume` finds them.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from attention.auto import config_of
from attention.encoded_forward import rounding_cache
from attention.record import Record
from convert.calibration.outputs import OutputFit
from convert.calibration.refit import sample_for
from convert.calibration.stream import LayerStream
from convert.calibration.survey import Moments
from convert.checkpoint.loading import empty_model
from convert.execute.job import Job
from convert.methods.sharpened import sharpened
from convert.planning.calibration import CalibrationText
from eval.inputs.sealed import Content, Shelf
from eval.terminal.progress import stage


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
    pair = _Pair(job, text)
    begin, end = pair.begin(missing[0]), missing[-1] + 1
    with stage(job.progress, "fit", end - begin, "layer") as done:
        for layer in range(begin, end):  # layers on the shelf again, too: it has no unsharpened tensors
            content, plain = pair.converted(layer)
            if layer + 1 < end:
                pair.student.advance(layer, weights=plain)
            shelf.put(layer, *content)
            done(1)
    for stream in (pair.teacher, pair.student):
        stream.discard()
    return shelf.get


class _Pair:
    """The source (`teacher`) and the result (`student`), run over the same text. Arguments as of `in_sequence`."""

    def __init__(self, job: Job, text: CalibrationText) -> None:
        self._job, self._layout, plan, steps = job, job.plan.layout, job.plan, job.work.steps
        config = config_of(plan.plain_config(job.choice.pairs))
        self._biased = self._layout.of(config).traits.o_bias  # which may be fitted even if the source's has none
        # No layer is precise: which ones copy is found once all are fitted.
        form = plan.target.rounding
        cache = None if form is None else rounding_cache(replace(form, precise=None), job.spec)
        model, reader, blocks, device = empty_model(plan.source.config), job.manifest.reader, text.blocks, job.plan.runs_on
        self.teacher = LayerStream(model, plan.family, reader, blocks, steps / "teacher", device)
        made = empty_model(config)
        self.student = LayerStream(made, self._layout, job.manifest, blocks, steps / "student", device, cache)

    def begin(self, missing: int) -> int:
        """The last layer up to `missing` whose inputs exist for both models; else 0, whose inputs are made anew.

        A layer may be missing although later ones exist, because its file was damaged.
        """
        if there := {layer for layer in self.teacher.ready & self.student.ready if layer <= missing}:
            return max(there)
        for stream in (self.teacher, self.student):
            stream.discard()
            stream.embed()
        return 0

    def converted(self, layer: int) -> tuple[Content, dict[str, torch.Tensor]]:
        """Convert a layer, and run the source past it; also return its unsharpened tensors, which later fits build on."""
        job = self._job
        if layer in job.spec.kept:
            self.teacher.advance(layer)
            return (kept := job.kept(layer)), kept[0]
        tensors, source = job.read_layer(layer)
        sample = sample_for(self.teacher.width, normed=job.plan.target.host.portable)
        moments = Moments(layer, self.teacher, source, sample, job.shows_attention)
        self.teacher.observe(layer, moments.see)
        observed = moments.statistics()
        after = job.changed(source, layer, observed)
        errors = job.error_of(source, after, observed)
        if after.o_bias is None and self._biased:
            after = replace(after, o_bias=torch.zeros_like(after.o[:, 0, 0]))
        fitted = self._refitted(layer, after)
        last = sharpened(fitted, errors.get("output_error", 0.0), observed)
        return job.as_stored(layer, tensors, last, errors), job.as_stored(layer, tensors, fitted, errors)[0]

    def _refitted(self, layer: int, after: Record) -> Record:
        fit = OutputFit(after)
        weights = {name: tensor.float() for name, tensor in self._layout.join(after, self._job.spec, layer).items()}
        lacking = self._job.plan.family.traits.adds_output
        rest = self.student.rest(layer)

        def attended(batch: int, inputs: torch.Tensor, added: torch.Tensor) -> None:
            own = self.student.batch(layer, batch)
            fit.see(self.student.read(layer, rest, own, weights), added + inputs - own.hidden if lacking else added)

        self.teacher.advance(layer, attended=attended)
        return fit.record()
