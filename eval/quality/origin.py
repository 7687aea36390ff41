"""How a model was made, and on which text, by its own conversion.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from attention.calibrated import POSITIONS
from attention.errors import Failure
from attention.formats import FORMATS, format_named
from attention.spec import AttentionSpec
from eval.inputs.overlap import overlap
from eval.inputs.source import Source
from eval.inputs.text import Tokens, reach


def identity(source: Source) -> dict[str, Any]:
    """The beginning of a model's entry in a report: its name, its attention and how it was made."""
    spec = AttentionSpec.from_config(source.config)
    made = _made(source)
    calibration = made.get("calibration") or {}
    return {
        "name": source.name,
        "path": source.reference,
        "kind": spec.kind,
        "method": made.get("method"),
        "calibration_hash": made.get("calibration_hash"),
        "calibration_context": getattr(source.decoder, POSITIONS, None)
        or calibration.get("max_context")
        or calibration.get("context"),
        "healing": _healing(source, made),
        "code": source.code_note or source.unused_code,
    }


def _healing(source: Source, made: dict[str, Any]) -> list[dict[str, float]] | None:
    """The curve of the healing that made the model: tokens, and mean nats of text that was held out; None without one.

    Raises:
        Failure: It is not what healing writes.
    """
    if (healing := made.get("healing")) is None:
        return None
    try:
        return [
            {"tokens": int(point["tokens"]), "kl": float(point["kl"]), "loss_nats": float(point["loss_nats"])}
            for point in healing["curve"]
        ]
    except (TypeError, KeyError, ValueError):
        raise Failure(
            f"conversion.json of {source.reference} is damaged: its healing has no curve",
            hint="restore it, or take it away: it only says how the model was made",
        ) from None


def _made(source: Source) -> dict[str, Any]:
    """The model's own conversion.json, or {} if no conversion of ours made it.

    Raises:
        Failure: It is ours, and a value has a type that no conversion writes.
    """
    try:
        made = json.loads((source.files / "conversion.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    if not isinstance(made, dict) or "kvfold" not in made:
        return {}  # another tool's file of that name says nothing
    calibration = made.get("calibration") or {}
    counts = (
        [calibration.get(key) for key in ("tokens", "context", "max_context")] if isinstance(calibration, dict) else ["none"]
    )
    types = {"method": made.get("method"), "calibration_hash": made.get("calibration_hash")}
    wrong = [key for key, value in types.items() if not isinstance(value, str | None)]
    if wrong or not all(isinstance(count, int | None) for count in counts):
        raise Failure(
            f"conversion.json of {source.reference} is damaged: its {(wrong or ['calibration'])[0]} is of another type",
            hint="restore it, or take it away: it only says how the model was made",
        )
    return made


def stated_cache(made: Mapping[str, Any]) -> str | None:
    """The format of the cache that conversion.json says a checkpoint was made for; None if it names none that there is."""
    found = made.get("kv_bytes_per_token")
    named = found.get("cache_dtype") if isinstance(found, dict) else None
    return named if isinstance(named, str) and named in FORMATS else None


def is_cached_in(source: Source, form: str) -> bool:
    """Whether it says something to cache a model in a format: one of classes is for the latents that were made for it."""
    return not format_named(form).classes or stated_cache(_made(source)) == form


def seen_share(source: Source, tokens: Tokens, within: Callable[[int], Tokens], calibrated_on: Tokens | None) -> float | None:
    """The share of the evaluated `tokens` that calibration has seen; None without calibration or if its text is unknown."""
    made = _made(source)
    if calibrated_on is not None:
        return overlap(tokens.ids, calibrated_on.ids)
    calibration = made.get("calibration") or {}
    context, texts = calibration.get("context"), calibration.get("texts")
    if not context or not isinstance(texts, list):
        return None
    for text in (one for one in texts if isinstance(one, dict) and isinstance(one.get("tokens"), int)):
        try:
            whole = within(reach(text["tokens"]))
        except Failure:  # damaged far behind what is evaluated
            return None
        if len(whole.ids) < context:
            return None
        seen = whole.spread(text["tokens"], context)
        if seen.hash == text.get("hash"):
            return overlap(tokens.ids, seen.ids)
    return None
