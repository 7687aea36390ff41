"""Carries out a plan: shard by shard, layer by layer, read, transform, write, verify, publish.

It knows the order of the work, but no heads, names or formulas: those belong to the family, the method and the host.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch

from attention.errors import Failure, KvfoldError
from convert.calibration.own_text import own_text
from convert.calibration.survey import survey
from convert.checkpoint.loadable import require_loadable
from convert.checkpoint.loading import class_names
from convert.checkpoint.shelf import Shelf
from convert.execute.card import model_card
from convert.execute.checking import Sample, checked
from convert.execute.conversion import Conversion, decided, splits_of
from convert.execute.deciding import Decision, StatisticsOf, decide
from convert.execute.job import Job, device_of
from convert.execute.layer import Layer
from convert.execute.manifest import Manifest, manifest_of
from convert.execute.provenance import provenance_of, with_healing
from convert.execute.sequence import in_sequence
from convert.execute.weights import MakeLayer, require_space, write_weights
from convert.launch import require_alone
from convert.output.companions import copy_code, copy_companions, write_config, write_own_text
from convert.output.destination import finished, without_text
from convert.output.life import Held, Made, Task, carry_out
from convert.output.provenance import versions
from convert.output.tokenizer import name_tokenizer_class, tokenizer_class
from convert.output.workdir import WorkDirectory
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationText, GivenTexts
from eval.inputs.overlap import warn_of_overlap
from eval.inputs.reader import Reader, TensorInfo, fingerprint
from eval.inputs.source import Source
from eval.inputs.text import Text, Tokens
from eval.machine.device import rough
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, silent

_log = logging.getLogger("kvfold")
_LESS_MEMORY = (
    "free some and repeat the command with --resume; or begin again with --overwrite and --device cpu or, with text, a shorter "
    "--calibration-context"
)
# Distils the result in a work directory on the calibration text; returns the entry `healing` of its provenance.
Heal = Callable[[Plan, WorkDirectory, Tokens, Tokens | None, torch.device, Progress], dict[str, Any] | None]


def execute(
    plan: Plan,
    evaluate_on: Text | None = None,
    progress: Progress = silent,
    statistics_in: Path | None = None,
    published: Callable[[], None] = lambda: None,
    *,
    heal: Heal,
) -> Conversion:
    """Write the plan's checkpoint.

    Args:
        plan: From `convert.planning`.
        evaluate_on: Held-out text; its perplexity goes into the model card.
        progress: Called with the progress of each stage.
        statistics_in: A directory that keeps statistics of the source for other conversions; None to keep none.
        published: As of `convert.output.life.carry_out`.
        heal: Distils the result at the end.

    Raises:
        Refusal: Several processes were launched to call this.
        KvfoldError: As of `carry_out`.
    """
    require_alone("a conversion")
    held_out = Held(evaluate_on, EvaluationSettings(device=plan.device)) if evaluate_on else None

    def begin(evaluated: Tokens | None) -> Task:
        texts = GivenTexts.read(plan.source, plan.calibration) if plan.calibration else None
        if evaluated and texts:
            warn_of_overlap(evaluated, texts.whole, "calibration")
        source = plan.source
        # Of a decoder inside another model, files and classes name what is around it differently.
        inside = source.decoder is not source.config and not plan.family.needs_code
        renamed = partial(class_names, source.config, source.trust_remote_code) if inside else plan.family.renamed
        return _Conversion(plan, Reader(source.files, renamed), texts, progress, statistics_in, heal)

    provenance = carry_out(plan.output, (plan.source,), begin, held_out, progress, published)
    return Conversion(decided(plan, provenance), provenance)


@dataclass(frozen=True)
class _Conversion(Task):
    """A conversion whose texts are read. Attributes as the arguments of `execute`, and:

    Attributes:
        reader: Reads the source.
        texts: To calibrate on; None without.
    """

    noun = "conversion"
    labels = "source", "converted"

    plan: Plan
    reader: Reader
    texts: GivenTexts | None
    progress: Progress
    statistics_in: Path | None
    heal: Heal

    def is_finished(self) -> bool:
        recipes = [one.recipe() for one in (*splits_of(self.plan), self.plan)]
        hashes = self.texts.hashes if self.texts else []
        return finished(self.plan.output.path, recipes, hashes, self.source_files()) is not None

    def check(self) -> None:
        _ = self._manifest

    def idle(self) -> None:
        """No other process waits."""

    def inputs(self) -> dict[str, Any]:
        return inputs_of(self.plan, self.texts)

    def source_files(self) -> dict[str, Any]:
        return fingerprint(self.plan.source.files)

    def make(self, work: WorkDirectory) -> Made:
        plan = self.plan
        own_texts = self._directory(work)
        text = None if self.texts is None else self.texts.with_own(self._written(own_texts))
        for remark in text.remarks(plan.channels) if text else ():
            _log.warning(remark)
        if text and (own := text.own) is not None:
            write_own_text(work.path, own)
        job = Job(plan, self.reader, work, text, device_of(plan), self.progress, self._statistics_directory(work, text))
        with work.kept_without_memory(job.device, _LESS_MEMORY):
            plan, provenance = _convert(job, self._manifest)
        unseen = self.texts.unseen if self.texts else None
        healing = self.heal(plan, work, text.tokens, unseen, job.device, self.progress) if text else None
        provenance = with_healing(provenance, healing)
        check = None if plan.target.copies else self._checked(plan, work, own_texts)
        return Made(provenance | {"check": check}, text.tokens if text else None)

    def _statistics_directory(self, work: WorkDirectory, text: CalibrationText | None) -> Path:
        """The directory of the statistics of the source on this text."""
        if text is None:
            return work.survey
        seen = text.surveyed()
        return self._directory(
            work, seen.tokens.hash, seen.blocks.lengths, *(["behind norms"] if self.plan.reads_projections else [])
        )

    def _directory(self, work: WorkDirectory, *of: Any) -> Path:
        """The directory of what is made from the source and these inputs, for this conversion or for several ones."""
        if self.statistics_in is None:
            return work.survey
        source = self.plan.source
        made_from = [str(source.files), source.raw, self.source_files(), *of, str(device_of(self.plan)), versions()]
        directory = self.statistics_in / hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _written(self, kept: Path) -> torch.Tensor | None:
        """The text that the model writes for its own calibration, `[rows, context]`; None if nothing has to be written."""
        plan = self.plan
        if plan.calibration is None or not (rows := plan.calibration.rows_to_write):
            return None
        return own_text(plan.source, rows, plan.calibration.context, plan.seed, device_of(plan), kept, self.progress)

    def _checked(self, plan: Plan, work: WorkDirectory, own_texts: Path) -> dict[str, Any] | None:
        """The result's loss on texts that were not fitted."""
        texts = self.texts
        others = [Sample.of(part, texts.calibration.context) for part in texts.others] if texts else []
        try:
            return checked(plan, work.path, others, device_of(plan), own_texts, self.progress)
        except KvfoldError:
            work.keep()  # the weights are complete
            raise

    def card(self, provenance: dict[str, Any]) -> str:
        return model_card(decided(self.plan, provenance), provenance)

    @cached_property
    def _manifest(self) -> Manifest:
        """The tensors to write. Their names and shapes are those of the class: no work starts that could not be loaded."""
        plan, source = self.plan, self.plan.source
        manifest = manifest_of(plan, self.reader)  # first, since its messages on attention are more specific
        infos = _without_computed(plan, self.reader)
        require_loadable(source.config, infos, source.reference, source.trust_remote_code)
        if not plan.target.copies:
            sized = plan.target.host.sized(source.raw, source.config, plan.target.spec)
            result = f"the {plan.target.spec.kind} of {source.reference}"
            require_loadable(sized, manifest.outputs, result, source.trust_remote_code)
        return manifest


def _check_result(plan: Plan, work: WorkDirectory) -> Source:
    """Check the written files against the class that will load them."""
    written = Source.parse(str(work.path), plan.source.trust_remote_code)
    infos = _without_computed(plan, Reader(work.path))
    require_loadable(written.config, infos, "the result", plan.source.trust_remote_code)
    return written


def _without_computed(plan: Plan, reader: Reader) -> dict[str, TensorInfo]:
    """All tensors but those of attentions that old checkpoints hold and the class computes itself."""
    inside = tuple(f"{plan.family.module(layer)}." for layer in range(plan.before.num_layers))
    computed = {name for name in reader.infos if name.startswith(inside) and name.endswith(plan.family.computed)}
    return {name: info for name, info in reader.infos.items() if name not in computed}


def _convert(job: Job, manifest: Manifest) -> tuple[Plan, dict[str, Any]]:
    """Decide, then write everything but the provenance.

    Returns:
        The plan with the choices made, and its provenance.
    """
    try:
        require_space(job, manifest)
        named = tokenizer_class(job.plan.source, job.plan.target.config(job.plan.source, None))
        surveyed = _surveyed(job, job.text) if job.text and job.plan.reads_text else None
        decision = decide(job, surveyed or job.assumed)
        manifest = manifest_of(decision.plan, job.reader) if decision.plan is not job.plan else manifest
        layers = write_weights(job, manifest, _layers(job, manifest, decision, surveyed))
        config = decision.plan.config(decision.rotary)
        write_config(job.work.path, config, job.plan.output.dtype)
        copy_companions(job.work.path, job.plan.source.files, job.plan.source.trust_remote_code)
        copy_code(job.work.path, decision.plan.target.host.code)
        if named:
            name_tokenizer_class(job.work.path, named)
        written = _check_result(decision.plan, job.work)
        return decision.plan, provenance_of(decision, job.reader, manifest, layers, job.text, written.calibrated)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # missing in torch's stubs
        raise Failure(
            f"a decomposition failed: {' '.join(str(error).split())[:120]}",
            hint="the model's weights or activations are extreme; please report it",
        ) from None


def _surveyed(job: Job, text: CalibrationText) -> StatisticsOf:
    """Maps a layer to its statistics on the text, which are surveyed when they are first asked for."""
    seen = text.surveyed()

    @cache
    def found() -> StatisticsOf:
        plan, spool, shelf = job.plan, job.statistics_in / "source-inputs", Shelf(job.statistics_in, "source")
        stream = job.stream(seen, plan.source.config, plan.family.module, job.reader.__getitem__, job.reader.infos, spool)
        return survey(stream, shelf, lambda layer: job.read_layer(layer)[1], job.shows_attention, job.progress)

    return lambda layer: replace(found()(layer), context=seen.calibration.max_context)


def inputs_of(plan: Plan, texts: GivenTexts | None) -> dict[str, Any]:
    """Everything that the result's bytes depend on, which `--resume` compares."""
    return {
        **_settings(plan),
        "splits": [_settings(split) for split in splits_of(plan)],
        "device": str(device_of(plan)),
        "rough_products_in": str(rough(device_of(plan))),
        "config": plan.source.raw,
        "files": fingerprint(plan.source.files),
        "calibration_hashes": texts.hashes if texts else [],
        "rows_to_write": plan.calibration.rows_to_write if plan.calibration else 0,
        "versions": versions(),
    }


def _settings(plan: Plan) -> dict[str, Any]:
    """The recipe without its healing, which may be left out of a run that is resumed."""
    ((command, options),) = plan.recipe().items()
    return {"command": command, **without_text(options), "heal": None}


def _layers(job: Job, manifest: Manifest, decision: Decision, surveyed: StatisticsOf | None) -> MakeLayer:
    """Maps a layer's index to the converted layer."""
    change, statistics = decision.change, surveyed or job.assumed
    if job.text and surveyed and job.text.calibration.in_sequence and change is not None:
        return in_sequence(job, job.text, manifest, decision)

    def make(index: int) -> Layer:
        assert change is not None, "where nothing changes, no unit is an attention"
        tensors, before = job.read_layer(index)
        return Layer.of(decision.plan, index, tensors, *change(before, index, statistics(index)))

    return make
