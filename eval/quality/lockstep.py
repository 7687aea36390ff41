"""Measures models beside their source: their caches, and scores batch by batch, so that the logits of two are in memory.

The source stays loaded. The others are loaded beside it: several together while they are small, larger ones one after another,
for each of which the source runs again. The size of a cache is predicted by the one formula, and measured on a live one.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attention.encoded_forward import store_encoded
from attention.errors import Failure
from attention.formats import SERVED
from attention.patch import pad_values
from attention.spec import AttentionSpec, dtype_bytes
from attention.versions import CACHE, logits_kept
from eval.inputs.loading import load
from eval.inputs.source import Source
from eval.machine.device import input_device, memory_for
from eval.quality.opened import Opening
from eval.quality.perplexity import Batch, Score, logits_of
from eval.quality.probes import Cell, Found, Reading, probed
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, silent, stage

_PROMPT = 16  # tokens of a cache that is measured, where bytes per token do not depend on them
_SMALL = 250 * 10**6  # bytes of weights that fit beside the source on any machine


@dataclass
class Row:
    """A model over one format of its cache: a row of a report, and what is measured of it.

    Attributes:
        source: The checkpoint, labelled with the format.
        form: The format that its cache is stored in or rounded to; None for its own dtype.
        scores: One for each context.
        entry: What the report says of it before its scores: what it is, and its cache.
        found: Its scores in the probes.
    """

    source: Source
    form: str | None
    scores: list[Score] = field(default_factory=list)
    entry: dict[str, Any] = field(default_factory=dict)
    found: dict[Cell, Found] = field(default_factory=dict)


def measure(
    rows: Sequence[Row],
    batches: Sequence[Sequence[Batch]],
    context: int,
    settings: EvaluationSettings,
    probes: Sequence[Reading] | None = None,
    progress: Progress = silent,
    opening: Opening = load,
) -> None:
    """Fill in scores, caches and probes.

    Args:
        rows: The models; the source comes first.
        batches: What to score, for each context.
        context: Tokens of the cache that is measured.
        settings: How to load the models.
        probes: What else to read, or None.
        progress: Called with the number of scored tokens.
        opening: Loads a model that is read as it is.

    Raises:
        Failure: A model cannot be loaded, its figures cannot be trusted, or memory does not suffice.
    """
    first, *others = rows
    for row in rows:
        row.scores = [Score() for _ in batches]
    total = sum(len(batch.targets) for part in batches for batch in part)

    def measure_group(source: Any, group: Sequence[Row], again: bool) -> None:  # whose end frees the models of a group
        with contextlib.ExitStack() as stack:
            models = [(row, stack.enter_context(_opened(row, first, context, settings, opening))) for row in group]
            name = ", ".join(row.source.name for row in group or [first])
            room = memory_for("the evaluation", "free some, or give --device cpu, or a shorter --context")
            with stage(progress, f"evaluate {name}", total, "token") as done, room:
                scored = [(model, row.scores) for row, model in models]
                score_group(batches, source, None if again else first.scores, scored, done)
            for row, model in models if again else [(first, source), *models]:
                if probes is not None:
                    row.found = probed(probes, model, row.source.name, progress)

    with _opened(first, first, context, settings, opening) as source:
        for number, group in enumerate(_groups(others)):
            measure_group(source, group, again=number > 0)


@contextlib.contextmanager
def _opened(row: Row, first: Row, context: int, settings: EvaluationSettings, opening: Opening) -> Iterator[Any]:
    """The model of a row, freed when the block ends, its cache measured. `first` is the source's row."""
    source, form = row.source, row.form
    with (opening if form is None else load)(source, settings.dtype, settings.device) as model:  # a format changes the model
        pad_values(model)  # several times faster on a CPU, and changes no result
        if form is not None:
            store_encoded(model, form)
        spec = AttentionSpec.from_config(source.config)
        whole = spec.bytes_per_token(source.dtype, context) if row is first else first.entry["kv_bytes_per_token"]
        row.entry |= cache_figures(model, spec, source.dtype, whole, form, context)
        yield model


def score_group(
    batches: Sequence[Sequence[Batch]],
    source: Any,
    source_scores: Sequence[Score] | None,
    others: Sequence[tuple[Any, Sequence[Score]]],
    progress: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Score some models beside their source.

    Args:
        batches: What to score, for each context.
        source: The source, loaded.
        source_scores: Its scores, one for each context; None if it has been scored already.
        others: The other models, loaded, each with its scores.
        progress: Called with the number of tokens newly scored.

    Raises:
        Failure: A model's logits are not finite.
    """
    with torch.inference_mode():
        for context, part in enumerate(batches):
            for batch in part:
                expected = logits_of(source, batch)
                if source_scores is not None:
                    source_scores[context].add(batch, expected)
                for model, scores in others:  # hold one model's logits at a time
                    scores[context].add(batch, logits_of(model, batch), expected)
                progress(len(batch.targets))


def _groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows in order, as many together as have weight files of `_SMALL` bytes, or a single one; one empty group of none."""
    group, room = list[Row](), _SMALL
    for row in rows:
        files = row.source.files
        size = sum(file.stat().st_size for file in (*files.glob("*.safetensors"), *files.glob("*.bin")))
        if group and size > room:
            yield group
            group, room = [], _SMALL
        group.append(row)
        room -= size
    yield group


def measured_bytes_per_token(model: Any, dtype: str, context: int = _PROMPT) -> float:
    """Bytes per token of the cache that `model` fills over so many tokens, converted to storage in `dtype`.

    The model may run in another dtype than its checkpoint's (fp32 on a CPU): values are counted, and converted to bytes
    in `dtype`.
    """
    kept = [layer for layer in _filled(model, context).layers if getattr(layer, "keys", None) is not None]
    values = sum(layer.keys.numel() + layer.values.numel() for layer in kept)  # linear attention has no keys
    return values * dtype_bytes(dtype) / context


def _filled(model: Any, tokens: int) -> Any:
    ids = torch.zeros(1, tokens, dtype=torch.long, device=input_device(model))
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True, **logits_kept(model, 1)).get(CACHE)
    if cache is None:
        raise Failure(
            f"{type(model).__name__} keeps no KV cache", hint="kvfold evaluates decoder-only models; is this an encoder?"
        )
    return cache


def cache_figures(
    model: Any, spec: AttentionSpec, dtype: str, source_bytes: float, form: str | None = None, context: int = _PROMPT
) -> dict[str, Any]:
    """The cost part of one report entry.

    Args:
        model: The model, loaded.
        spec: Its attention.
        dtype: The checkpoint's own dtype, in which a cache without a format is counted.
        source_bytes: The source's KV bytes per token, at this context.
        form: The format of the model's cache; None for none.
        context: Tokens of the cache that is reported; with windows, bytes per token depend on it.

    Returns:
        `{"cache_dtype", "cache_format", "kv_bytes_per_token", "kv_bytes_measured", "cache_ratio"}`, and "kv_context" where
        windows are shorter than it. "kv_bytes_measured" is None for a format that only engines store.

    Raises:
        Failure: Prediction and measurement differ, so neither can be reported.
    """
    cut = spec.is_cut(context)
    predicted = spec.bytes_per_token(form or dtype, context if cut or form else None)
    if form in SERVED:
        measured = None
    elif form is None:
        measured = measured_bytes_per_token(model, dtype, context if cut else min(context, _PROMPT))
    else:
        measured = sum(layer.nbytes for layer in _filled(model, context).layers) / context
    if measured is not None and measured != predicted:
        raise Failure(
            f"the live cache of {type(model).__name__} holds {measured:g} bytes per token, its config predicts {predicted:g}",
            hint="this class caches something that kvfold does not know; please report the model type",
        )
    return {
        "cache_dtype": form or dtype,
        "cache_format": form,
        "kv_bytes_per_token": int(predicted) if predicted == int(predicted) else predicted,
        "kv_bytes_measured": measured,
        "cache_ratio": predicted / source_bytes,
        **({"kv_context": context} if cut else {}),
    }
