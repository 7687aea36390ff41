"""Evaluates models on a text: loads each model, scores it beside its source, measures its cache, returns a report."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from attention.errors import Refusal
from attention.formats import SERVED
from attention.spec import AttentionSpec, dtype_bytes
from eval.inputs.loading import compute_dtype, load, require_causal, tokens_of
from eval.inputs.source import Source, require_contexts
from eval.inputs.text import Text, Tokens
from eval.machine.device import compute_device
from eval.quality.lockstep import Row, measure
from eval.quality.opened import Opening
from eval.quality.origin import identity, is_cached_in, remarks, seen_share
from eval.quality.perplexity import Protocol, batches
from eval.quality.probes import figures, probes_for
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, silent

_SERVED = "rounds as {} does with --kv-cache-dtype {}, also within a prompt; its bytes are by formula"


def report_of(
    sources: Sequence[Source],
    text: Text,
    settings: EvaluationSettings,
    calibrated_on: Tokens | None = None,
    progress: Progress = silent,
    opening: Opening = load,
) -> dict[str, Any]:
    """Evaluate the first model as the source, and compare the others with it.

    Args:
        sources: The models; the source comes first.
        text: The text to evaluate on.
        settings: How to evaluate.
        calibrated_on: The text that the others were calibrated on, if known. Otherwise their own conversion.json tells
            whether it was this text.
        progress: Called with the progress of each stage.
        opening: Loads the models.

    Returns:
        The report, the content of report.json: `{"kvfold", "protocol", "models", "other_contexts", "probes"}`.

    Raises:
        Refusal: The models' configs do not allow the comparison.
        Failure: A model cannot be loaded, or its figures cannot be trusted.
    """
    protocols, tokens = prepare(sources, text, settings)
    said = remarks(sources, text, settings.max_tokens, tokens)
    within = cache(partial(tokens_of, sources[0], text))
    rows = _rows(sources, settings.cache_dtypes)
    said += [[_SERVED.format(SERVED[row.form].engine, row.form)] if row.form in SERVED else [] for row in rows[len(sources) :]]
    for row in rows:  # what files can make fail comes before the long part
        share = None if row is rows[0] else seen_share(row.source, tokens, within, calibrated_on)
        row.entry = identity(row.source) | {"calibration_overlap": share}
    probes = probes_for(settings, sources, tokens)
    vocabulary = sources[0].vocabulary
    scored = [list(batches(protocol.blocks(tokens), vocabulary)) for protocol in protocols]
    measure(rows, scored, protocols[0].context, settings, probes, progress, opening)
    quality = [[row.scores[i].as_figures(tokens, rows[0].scores[i]) for row in rows] for i in range(len(protocols))]
    return {
        "kvfold": version("kvfold"),
        "protocol": {  # all that a figure depends on besides the model
            **asdict(protocols[0]),
            "dtype": compute_dtype(sources[0], settings.dtype, settings.device),
            "text": tokens.name,
            "text_hash": tokens.hash,
            "tokens": len(tokens.ids),
            "bytes_in_text": tokens.text_bytes,
        },
        "models": [row.entry | {"remarks": known} | one for row, known, one in zip(rows, said, quality[0], strict=True)],
        "other_contexts": [
            {
                "context": protocol.context,
                "stride": protocol.stride,
                "models": [{"name": row.source.name} | one for row, one in zip(rows, scores, strict=True)],
            }
            for protocol, scores in zip(protocols[1:], quality[1:], strict=True)
        ],
        "probes": probes and [{"name": row.source.name, "found": figures(row.found, rows[0].found)} for row in rows],
    }


def _rows(sources: Sequence[Source], forms: Sequence[str]) -> list[Row]:
    """Each model as it is, then each once for each format of the cache that its dtype is not."""
    rows = [Row(source, None) for source in sources]
    rows += [
        Row(replace(source, label=f"{source.name} ({form} cache)"), form)
        for source in sources
        for form in forms
        if form != source.dtype and is_cached_in(source, form)
    ]
    return rows


def prepare(sources: Sequence[Source], text: Text, settings: EvaluationSettings) -> tuple[list[Protocol], Tokens]:
    """Check configs, tokenizer and text before models are loaded. Returns a protocol per context, and the text's tokens."""
    protocols = check(sources, settings)
    tokens = tokens_of(sources[0], text, settings.max_tokens)
    for protocol in protocols:
        protocol.blocks(tokens)
    return protocols, tokens


def check(sources: Sequence[Source], settings: EvaluationSettings) -> list[Protocol]:
    """Check everything that configs can show. Returns a protocol for each context; all models allow these."""
    compute_device(settings.device)
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
            if form in SERVED:
                raise Refusal(
                    f"{form} is for heads, and all of these models cache latents", hint="choose int4 or another format"
                )
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
    return [Protocol.named(settings.protocol, context) for context in require_contexts(sources, settings.contexts)]
