"""How a model was made, from what and on which text, by its conversion.json; whether the first one can be compared with it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attention.calibrated import POSITIONS
from attention.errors import Failure, KvfoldError
from attention.formats import format_named
from attention.spec import AttentionSpec
from eval.inputs.loading import tokens_of
from eval.inputs.sealed import checksum, read_object
from eval.inputs.source import Source
from eval.inputs.text import HEALED_ON, Text, Tokens, overlap, reach


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
        "code": source.code_note or source.unused_code,
    }


def _made(source: Source) -> dict[str, Any]:
    """The model's own conversion.json, or {} if no conversion of ours made it.

    Raises:
        Failure: It is ours, and a value has a type that no conversion writes.
    """
    made = read_object(source.files / "conversion.json") or {}
    if "kvfold" not in made:
        return {}  # another tool's file of that name says nothing
    calibration = made.get("calibration") or {}
    counts = map(calibration.get, ("tokens", "context", "max_context")) if isinstance(calibration, dict) else ["none"]
    wrong = [key for key in ("method", "calibration_hash") if not isinstance(made.get(key), str | None)]
    if wrong or not all(isinstance(count, int | None) for count in counts):
        raise Failure(
            f"conversion.json of {source.reference} is damaged: its {[*wrong, 'calibration'][0]} is of another type",
            hint="restore it, or take it away: it only says how the model was made",
        )
    return made


def remarks(sources: Sequence[Source], text: Text, first: int | None, tokens: Tokens) -> list[list[str]]:
    """What to know of each model before its figures are compared with the first one's, as what follows its name in a sentence.

    Args:
        sources: The models.
        text: The text that they are evaluated on.
        first: How many of its tokens are; None for all.
        tokens: These, by the first model's tokenizer.
    """
    of_tokenizers = (_of_tokenizer(source, sources[0], text, first, tokens) for source in sources)
    return [list(filter(None, found)) for found in zip(_of_lineages(sources), of_tokenizers, strict=True)]


def _of_lineages(sources: Sequence[Source]) -> list[str]:
    """Of each model, that the first one is not what it was made from, perhaps by way of others among them; "" if it is."""
    made, first = list(map(_made, sources)), sources[0]
    stated = list(map(_stated_source, made))
    if len(sources) == 1:
        return [stated[0] and f"is compared with nothing: give {stated[0]}, which it was made from, before it"]
    parents = [{i for i, other in enumerate(sources) if _is_source(other, one)} for one in made]
    related = {i for i, other in enumerate(sources) if other.files == first.files}
    for _ in sources:  # each time, what was made from these
        related |= {i for i, origins in enumerate(parents) if origins & related}
    wrong = "was made from {}, and {} seems to be another model: give its own source first"
    said = ["" if i in related or not one else wrong.format(one, first.name) for i, one in enumerate(stated)]
    for i in parents[0] - related:
        said[i] = f"is what {first.name} was made from, so the losses are the wrong way round: give it first"
    return said


def _stated_source(made: Mapping[str, Any]) -> str:
    """The model that conversion.json names as the source; "" without one."""
    stated = made.get("source")
    return str(stated.get("model") or "") if isinstance(stated, dict) else ""


def _is_source(source: Source, made: Mapping[str, Any]) -> bool:
    """Whether conversion.json means this model: by its weight files, else by its name and their sizes, as of a copy."""
    if not (stated := _stated_source(made)):
        return False
    run = made.get("run")
    noted = run.get("source_files") if isinstance(run, dict) else None
    noted = noted if isinstance(noted, dict) else {}
    files = {name.removeprefix("teacher/"): file for name, file in noted.items() if name.startswith("teacher/")} or noted
    try:
        now = source.fingerprint
    except (KvfoldError, OSError):  # whoever loads it says so
        return False
    if files == now:
        return True
    sizes = {name: file[0] for name, file in files.items() if isinstance(file, list) and file}
    names = [Path(reference.partition("@")[0]).name for reference in (stated, source.reference)]  # without a revision
    return names[0] == names[1] and (not files or sizes == {name: file[0] for name, file in now.items()})


def _of_tokenizer(source: Source, first: Source, text: Text, count: int | None, tokens: Tokens) -> str:
    """That a model's own tokenizer does not make these tokens, which are the first one's, of the text; "" if it does."""
    own_files, files = ({file.name: checksum(file) for file in one.tokenizer_files} for one in (source, first))
    if not own_files or own_files == files:
        return ""
    try:
        own = tokens_of(source, text, count)
    except Failure as error:
        return f"has another tokenizer than {first.name}, which makes no tokens of this text: {error}"
    if (own.hash, own.bos) == (tokens.hash, tokens.bos):
        return ""
    return f"has another tokenizer than {first.name}, which makes other tokens of this text: its figures mean nothing"


def stated_cache(made: Mapping[str, Any]) -> str | None:
    """The format of the cache that conversion.json says a checkpoint was made for; None without one. It may be unknown."""
    found = made.get("kv_bytes_per_token")
    named = found.get("cache_dtype") if isinstance(found, dict) else None
    return named if isinstance(named, str) and named else None


def is_cached_in(source: Source, form: str) -> bool:
    """Whether a cache format makes sense for a model: one of classes is for latents made for it, some of engines for heads."""
    named = format_named(form)
    if named.rule and not named.latent_group:
        return AttentionSpec.from_config(source.config).kv_lora_rank is None
    return not named.classes or stated_cache(_made(source)) == form


def seen_share(source: Source, tokens: Tokens, within: Callable[[int], Tokens], calibrated_on: Tokens | None) -> float | None:
    """The share of the evaluated `tokens` that healing or calibration has seen; None without them, or of unknown texts."""
    made = _made(source)
    if calibrated_on is not None:
        return overlap(tokens.ids, calibrated_on.ids)
    shares, damaged = list[float](), (Failure, AttributeError, KeyError, TypeError, ZeroDivisionError)
    with suppress(*damaged):  # the text, far behind what is evaluated; or conversion.json
        for text in (healing := made.get("healing") or {}).get("texts") or []:
            whole = within(max(HEALED_ON, healing["tokens"] // len(healing["texts"])))
            if whole.hash == text["hash"]:
                shares.append(min(1.0, float(healing["passes"])))  # of blocks from all over it
        for text in (calibration := made.get("calibration") or {}).get("texts") or []:
            seen = within(reach(text["tokens"])).spread(text["tokens"], calibration["context"])
            if seen.hash == text["hash"]:
                shares.append(overlap(tokens.ids, seen.ids))
    return max(shares, default=None)
