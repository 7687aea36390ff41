"""A plan in progress, and what it does to one layer: the steps from the source's record to the result's, tensors and a note."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from attention.errors import Failure
from attention.formats import rounding_of
from attention.forward import output_error
from attention.record import Attention, FactoredAttention, Record
from attention.spec import AttentionSpec
from convert.calibration.refit import refitted
from convert.checkpoint.writer import require_finite
from convert.execute.manifest import Manifest
from convert.methods.balanced import balanced, balanced_heads
from convert.methods.blocks import Blocks
from convert.methods.latent import sized
from convert.methods.portable_norm import behind_norm, with_constant_norm
from convert.methods.statistics import Attended, Statistics
from convert.output.writing import Work
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationText
from convert.planning.targets import Choice, GroupedTarget
from eval.inputs.sealed import Content
from eval.terminal.progress import Progress

_MEASURED = 1024  # tokens, on which the error of a layer's attention is measured
_UNEVEN = 0.02  # of the size of inputs behind their norm, which were one size but for its epsilon
_EXACT = 4  # bits: queries are fitted to latents of so many or more without their rounding


@dataclass(frozen=True)
class Job:
    """One conversion in progress.

    Attributes:
        plan: The plan to carry out.
        manifest: The tensors to write, from those of the source.
        work: The work directory.
        text: The calibration text, if the plan calibrates.
        progress: Called with the progress of each stage.
        statistics_in: The directory for statistics of the source.
        choice: What the text has chosen for all layers, once it has.
    """

    plan: Plan
    manifest: Manifest
    work: Work
    text: CalibrationText | None
    progress: Progress
    statistics_in: Path
    choice: Choice = field(default_factory=Choice)

    @property
    def spec(self) -> AttentionSpec:
        """The sizes of the result."""
        return self.plan.target.spec

    def assumed(self, layer: int) -> Statistics:
        """The statistics of a layer's input that are assumed without text, from the gains of its norm."""
        assumed = Statistics.assumed(self.plan.source.decoder.hidden_size, *self._input_norm(layer))
        if not self.plan.reads_projections:
            return assumed
        projections = self.read_layer(layer)[1].projections
        assert projections is not None
        return assumed.to(self.plan.runs_on).behind(projections)

    def _input_norm(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gain and bias of the norm of a layer's input, `[E]` each, fp64; None for what it lacks."""
        norm, found = self.plan.family.input_norm(layer), self.manifest.reader.infos
        if norm is None:
            return None, None
        names = (norm.name, f"{norm.name.removesuffix('.weight')}.bias")
        tensors = {name: self.manifest.reader[name] for name in names if name in found}
        for name, tensor in tensors.items():
            require_finite(name, tensor)
        gain, bias = map(tensors.get, names)
        return None if gain is None else gain.double() + norm.offset, bias

    def read_layer(self, layer: int, as_stored: bool = False) -> tuple[dict[str, torch.Tensor], Attention]:
        """The tensors of a layer's attention by name, and their record in the form that methods take, or as it is stored.

        Raises:
            Failure: One of them is not finite.
        """
        tensors = {name: self.manifest.reader[name].to(self.plan.runs_on) for name in self.plan.family.shapes(layer)}
        for name, tensor in tensors.items():
            require_finite(name, tensor)
        record = self.plan.family.split(tensors, layer)
        assert isinstance(record, Attention), "a source has heads"
        behind = self.plan.reads_projections and not as_stored
        return tensors, record.on_projected_inputs(self.plan.family.traits.clip) if behind else record

    def kept(self, layer: int) -> Content:
        """A layer that stays as it is, as of `as_stored`; its tensors may have other names."""
        source, record = self.read_layer(layer, as_stored=True)
        # By the result's config: what fields of the source's do may be in weights already.
        config = self.plan.target.host.sized(self.plan.source.raw, self.plan.family, self.spec)
        tensors = self.plan.layout.of(config).join(record, self.spec, layer)
        copies = {
            old: new for new, tensor in tensors.items() for old in source if new.endswith(old) and _is_copy(tensor, source[old])
        }
        note = {"layer": layer, "kept": True, "renamed": copies, "converted": sorted(tensors.keys() - {*copies.values()})}
        return {name: tensor.cpu() for name, tensor in tensors.items()}, note

    @property
    def shows_attention(self) -> bool:
        """Whether the source's attention over the calibration text is the softmax of its records' logits."""
        return self.text is not None and not self.plan.unmodelled

    def converted(self, layer: int, statistics: Callable[[int], Statistics]) -> Content:
        """A layer after all steps, by itself, as of `as_stored`; `statistics` gives those of its inputs."""
        if layer in self.spec.kept:
            return self.kept(layer)
        tensors, before = self.read_layer(layer)
        seen = statistics(layer)
        after = self.changed(before, layer, seen)
        return self.as_stored(layer, tensors, after, self.error_of(before, after, seen))

    def changed(self, before: Attention, layer: int, seen: Statistics) -> Record:
        """A layer's record after all steps that need no other layer.

        Args:
            before: The source's layer.
            layer: Its index.
            seen: The statistics of its inputs.
        """
        target, after = self.plan.target, before
        if isinstance(target, GroupedTarget):
            if target.spec.num_kv_heads != before.num_kv_heads:
                after = target.method.merge(before, target.spec.num_kv_heads, seen)
            return self.adapted(before, after, layer, seen)
        assert before.sinks is None, "no output class has a latent and sinks"
        allocation = replace(target.allocation(self.plan.rotary), pairs=self.choice.pairs)
        latent = target.method.factor(before, allocation, seen)
        if target.host.portable:
            assert seen.sample is not None, "the norm of a latent is fitted to text"
            latent = with_constant_norm(before, latent, seen.sample.to(before.k.device))
        fitted = self.adapted(before, latent, layer, seen)
        assert isinstance(fitted, FactoredAttention)
        if target.spec.q_lora_rank is not None:
            fitted = self._behind_norm(fitted, layer, seen)
        latent, size = balanced(fitted, seen), target.host.latent_size(target.spec.kv_lora_rank or 0)
        # A norm that divides it by its size lets scales cancel.
        return latent if size is None or latent.normalised else sized(latent, seen.second, size)

    def _behind_norm(self, after: FactoredAttention, layer: int, seen: Statistics) -> FactoredAttention:
        """Queries that read the input without the gains of its norm."""
        assert seen.sample is not None, "portable results need text"
        gain, _ = self._input_norm(layer)
        if gain is None:
            gain = torch.ones(self.plan.source.decoder.hidden_size, dtype=torch.float64)
        after, spread = behind_norm(after, gain, seen.sample)
        if spread > _UNEVEN:
            raise Failure(
                f"behind the norm of layer {layer}'s input, tokens differ in size by {spread:.1%} (root mean square), and "
                f"another norm of queries would undo that; at most {_UNEVEN:.0%} is allowed",
                hint="leave out --engine llama.cpp: embeddings are so small that the norm's epsilon matters, or gains are zero",
            )
        return after

    def adapted(self, before: Attention, after: Record, layer: int, seen: Statistics) -> Record:
        """A layer's record that is fit for the format of its cache, and fitted to the source's.

        From here on its keys and values, in balanced coordinates, are rounded as the target's cache rounds them. Where the
        class does more with those of heads than records say, or nothing shows their sizes, they are only rounded.
        """
        form, text, sample = self.plan.target.rounding, self.plan.calibration, seen.sample if self.shows_attention else None
        if form is not None and form.edges:
            form = rounding_of(self.spec.format_of(layer, form).name)
        if form is not None:
            if isinstance(after, FactoredAttention):
                after = balanced(replace(after.paired("half"), rounding=form), seen)
            elif sample is not None:
                after = balanced_heads(after, sample.to(after.k.device))
            after = replace(after, rounding=form)
        return _refitted(before, after, sample, seen.attended) if text and text.refit and sample is not None else after

    def error_of(self, before: Attention, after: Record, seen: Statistics) -> dict[str, float]:
        """Measure the error of the attention's output on a part of the text; {} without one, or where it is not finite."""
        if seen.sample is None or not self.shows_attention:
            return {}
        error = output_error(before, after, seen.sample.spread(_MEASURED).to(before.k.device).blocks)
        return {"output_error": error} if math.isfinite(error) else {}

    def as_stored(self, layer: int, source: dict[str, torch.Tensor], after: Record, errors: dict[str, float]) -> Content:
        """A converted layer's tensors, by the names of the output class, and its note for conversion.json.

        The note has its index, its errors on the text, and the tensors that differ from those of the source.
        """
        tensors = self.plan.layout.join(after, self.spec, layer)
        converted = [name for name, tensor in tensors.items() if not _is_copy(tensor, source.get(name))]
        return {name: tensor.cpu() for name, tensor in tensors.items()}, {"layer": layer, **errors, "converted": converted}


def _refitted(before: Attention, after: Record, sample: Blocks, attended: Attended) -> Record:
    """Queries, keys and values, fitted to the source's.

    They are fitted to keys and values as the cache rounds them. Latents in four bits or more, or in bits that differ, are not
    rounded for this: layers would err less, and whole models more (docs/notes/fits.md).
    """
    form = after.rounding
    exact = form is not None and isinstance(after, FactoredAttention) and (form.bits >= _EXACT or bool(form.classes))
    start = replace(after, rounding=None) if exact else after
    return replace(refitted(before, start, sample.to(before.k.device), attended), rounding=form)


def _is_copy(tensor: torch.Tensor, source: torch.Tensor | None) -> bool:
    if source is None or tensor.shape != source.shape:
        return False
    return tensor.data_ptr() == source.data_ptr() or torch.equal(tensor, source)
