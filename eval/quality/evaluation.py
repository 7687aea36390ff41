"""Evaluates models on a text: loads each model, scores it beside its source, measures its cache, returns a report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from attention.encoded_forward import read_rounded, store_encoded
from attention.errors import GateMissed, Refusal
from attention.formats import KIVI
from attention.kv_bytes import dtype_bytes
from attention.padding import pad_values
from attention.spec import AttentionSpec
from eval.inputs.loading import calibration_tokens, compute_dtype, load, require_causal, tokens_of
from eval.inputs.source import Source, require_contexts
from eval.inputs.text import Text, Tokens
from eval.machine.device import require_device
from eval.quality.cost import cache_figures
from eval.quality.lockstep import Job, score_all
from eval.quality.origin import identity, is_cached_in, remarks, seen_share
from eval.quality.perplexity import Score, batches, protocol_entry
from eval.quality.protocol import Protocol
from eval.quality.recall import Recall
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, silent

_OF_KIVI = (
    "has all full groups of keys rounded, and its bytes are by formula: a real KIVI cache keeps the keys of the newest tokens "
    "as they are, and loses less"
)


def require_ratio(report: dict[str, Any], limit: float | None) -> None:
    """Require every model's perplexity to be at most `limit` times the source's, at every context.

    Rows over caches in other formats are for comparison, and required nothing of.

    Raises:
        GateMissed: A model exceeds it.
    """
    contexts = {report["protocol"]["context"]: report["models"]}
    contexts |= {other["context"]: other["models"] for other in report["other_contexts"]}
    forms = [entry.get("cache_format") for entry in report["models"][1:]]  # in the order of the rows at every context
    for context, (source, *others) in contexts.items() if limit is not None else ():
        for entry in (other for other, form in zip(others, forms, strict=True) if form is None):
            ratio = entry["perplexity"] / source["perplexity"]
            if ratio > limit:
                where = f" at context {context}" if len(contexts) > 1 else ""
                raise GateMissed(
                    f"perplexity of {entry['name']} is {ratio:.4g} × that of {source['name']}{where}, the limit is {limit:g} ×",
                    report,
                )


def report_of(
    sources: Sequence[Source],
    text: Text,
    settings: EvaluationSettings,
    calibrated_on: Tokens | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Evaluate the first model as the source, and compare the others with it.

    Args:
        sources: The models; the source comes first.
        text: The text to evaluate on.
        settings: How to evaluate.
        calibrated_on: The text that the others were calibrated on, if known. Otherwise their own conversion.json tells
            whether it was this text.
        progress: Called with the progress of each stage.

    Returns:
        The report, the content of report.json: `{"kvfold", "protocol", "models", "other_contexts", "recall"}`.

    Raises:
        Refusal: The models' configs do not allow the comparison.
        Failure: A model cannot be loaded, or its figures cannot be trusted.
    """
    protocols, tokens = prepare(sources, text, settings)
    known = remarks(sources, text, settings.max_tokens, tokens)
    sources, forms = _with_formats(sources, settings.cache_dtypes)
    known += [[] if form not in KIVI else [_OF_KIVI] for form in forms[len(known) :]]  # what holds of a model is said once

    @cache
    def within(count: int) -> Tokens:
        return calibration_tokens(sources[0], text, count)

    overlap = partial(seen_share, tokens=tokens, within=within, calibrated_on=calibrated_on)
    models = _Models(sources, forms, settings, tokens, protocols[0].context, overlap, progress)
    scores = [[Score() for _ in sources] for _ in protocols]
    jobs = [
        Job(batch, row)
        for protocol, row in zip(protocols, scores, strict=True)
        for batch in batches(protocol.blocks(tokens), sources[0].vocabulary)
    ]
    score_all(jobs, sources, models.opened, models.visit, progress)
    quality = [[score.as_figures(tokens, row[0]) for score in row] for row in scores]
    return {
        "kvfold": version("kvfold"),
        "protocol": protocol_entry(protocols[0], tokens, compute_dtype(sources[0], settings.dtype, settings.device)),
        "models": [
            entry | {"remarks": said} | figures for entry, said, figures in zip(models.entries, known, quality[0], strict=True)
        ],
        "other_contexts": [
            {
                "context": protocol.context,
                "stride": protocol.stride,
                "models": [{"name": source.name} | figures for source, figures in zip(sources, row, strict=True)],
            }
            for protocol, row in zip(protocols[1:], quality[1:], strict=True)
        ],
        "recall": models.recall(),
    }


def _with_formats(sources: Sequence[Source], forms: Sequence[str]) -> tuple[list[Source], list[str | None]]:
    """Each model as it is, then each once for each format of the cache that its dtype is not; formats beside them."""
    rows: list[tuple[Source, str | None]] = [(source, None) for source in sources]
    rows += [(source, form) for source in sources for form in forms if form != source.dtype and is_cached_in(source, form)]
    named = [source if form is None else replace(source, label=f"{source.name} ({form} cache)") for source, form in rows]
    return named, [form for _, form in rows]


class _Models:
    """Loads the models of an evaluation, and notes what is measured of each besides its score.

    Attributes:
        entries: The beginning of each model's entry in the report: what it is, and its cache.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        forms: Sequence[str | None],
        settings: EvaluationSettings,
        tokens: Tokens,
        context: int,
        overlap: Callable[[Source], float | None],
        progress: Progress,
    ) -> None:
        self._sources, self._forms, self._settings, self._progress = sources, forms, settings, progress
        self._context = context
        first, *others = sources  # what their files can make fail comes before the long part
        self._known = [identity(first) | {"calibration_overlap": None}]
        self._known += [identity(other) | {"calibration_overlap": overlap(other)} for other in others]
        self.entries: list[dict[str, Any]] = []
        self._probe = Recall.asked(settings, sources, tokens)
        self._recalled: dict[int, dict[str, Any]] = {}

    @contextlib.contextmanager
    def opened(self, index: int) -> Iterator[Any]:
        """The model with this index, freed when the block ends."""
        source, form = self._sources[index], self._forms[index]
        with load(source, self._settings.dtype, self._settings.device) as model:
            pad_values(model)  # several times faster on a CPU, and changes no result
            if form is not None:
                (read_rounded if form in KIVI else store_encoded)(model, form)
            if index == len(self.entries):  # the first time
                spec = AttentionSpec.from_config(source.config)
                context, known = self._context, self._known[index]
                whole = self.entries[0]["kv_bytes_per_token"] if self.entries else spec.bytes_per_token(source.dtype, context)
                self.entries.append(known | cache_figures(model, spec, source.dtype, whole, form, context))
            yield model

    def visit(self, index: int, model: Any) -> None:
        """Measure recall, if it is asked for."""
        if self._probe is not None:
            name = self._sources[index].name
            self._recalled[index] = {"name": name} | self._probe.measure(model, name, self._progress)

    def recall(self) -> dict[str, Any] | None:
        """The report's part on recall; None if it was not asked for."""
        if self._probe is None:
            return None
        return self._probe.conditions() | {"models": [found for _, found in sorted(self._recalled.items())]}


def prepare(sources: Sequence[Source], text: Text, settings: EvaluationSettings) -> tuple[list[Protocol], Tokens]:
    """Check configs, tokenizer and text before models are loaded. Returns a protocol per context, and the text's tokens."""
    protocols = check(sources, settings)
    tokens = tokens_of(sources[0], text, settings.max_tokens)
    for protocol in protocols:
        protocol.blocks(tokens)
    return protocols, tokens


def check(sources: Sequence[Source], settings: EvaluationSettings) -> list[Protocol]:
    """Check everything that configs can show. Returns a protocol for each context; all models allow these."""
    require_device(settings.device)
    for source in sources:
        require_causal(source)
    if len({source.vocabulary for source in sources}) > 1:
        listed = ", ".join(f"{source.name} {source.vocabulary}" for source in sources)
        raise Refusal(
            f"models with different vocabularies cannot be compared: {listed}",
            hint="evaluate each by itself and compare bits/byte",
        )
    for form in settings.cache_dtypes:
        if not any(is_cached_in(source, form) for source in sources):
            if form in KIVI:
                raise Refusal(f"none of the models has keys of heads, which {form} groups", hint=f"choose int{KIVI[form].bits}")
            raise Refusal(
                f"none of the models was made for a cache in {form}, which takes channels in the order of their energies",
                hint=f"evaluate a result of `convert mla --cache-dtype {form}`, or choose int8, int4 or another format",
            )
    for source in sources:
        for form in (source.dtype, *(form for form in settings.cache_dtypes if is_cached_in(source, form))):
            try:
                AttentionSpec.from_config(source.config).bytes_per_token(form)
            except Refusal as refusal:
                raise Refusal(f"{source.name}: {refusal}", hint=refusal.hint) from None
    if settings.dtype != "auto":
        dtype_bytes(settings.dtype)
    if settings.max_tokens is not None and settings.max_tokens < 2:
        raise Refusal(f"perplexity needs at least 2 tokens, not {settings.max_tokens}")
    return [Protocol.named(settings.protocol, context) for context in require_contexts(sources, settings.contexts)]
