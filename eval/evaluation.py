"""Evaluates models on a text: loads each model, scores it beside its source, measures its cache, returns a report."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from attention.errors import Failure, GateMissed, Refusal
from attention.spec import AttentionSpec, dtype_bytes
from eval.cost import cache_figures
from eval.device import memory_for, require_device
from eval.overlap import shared_share
from eval.perplexity import compare, protocol_record
from eval.progress import Progress, silent, stage
from eval.protocol import Protocol
from eval.source import Source
from eval.text import Text, Tokens, tokenize

_log = logging.getLogger("kvfold")
_DEFAULT_CONTEXT = 2048
_SMALL = 250 * 10**6  # bytes of weights that fit beside the source on any machine


@dataclass(frozen=True)
class EvaluationSettings:
    """How to evaluate.

    Attributes:
        protocol: One of `eval.protocol.PROTOCOLS`.
        context: Tokens per block; None for min(2048, the smallest position limit of the models).
        max_tokens: How many tokens to evaluate on, from the text's start; None for all.
        dtype: Dtype of the forward passes; "auto" is float32 on a CPU, the checkpoint's own dtype elsewhere.
        device: "auto", "cpu", "cuda", "cuda:1", …; "auto" spreads a model with accelerate's device map.
    """

    protocol: str = "paper"
    context: int | None = None
    max_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"


def require_ratio(report: dict[str, Any], limit: float | None) -> None:
    """Require every model's perplexity to be at most `limit` times the source's.

    Raises:
        GateMissed: A model exceeds it.
    """
    source, *others = report["models"]
    for entry in others if limit is not None else []:
        ratio = entry["perplexity"] / source["perplexity"]
        if ratio > limit:
            raise GateMissed(
                f"perplexity of {entry['name']} is {ratio:.4g} × that of {source['name']}, the limit is {limit:g} ×", report
            )


def report_of(
    sources: Sequence[Source],
    text: Text,
    settings: EvaluationSettings,
    calibrated_on: Tokens | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Evaluate the first model as the source, and compare the others with it.

    Memory holds the source and one other model at a time, or several if they are small; the source runs once for
    each group.

    Args:
        sources: The models; the source comes first.
        text: The text to evaluate on.
        settings: How to evaluate.
        calibrated_on: The text that the others were calibrated on, if known. Otherwise their own conversion.json tells
            whether it was the start of this text.
        progress: Called with the number of scored tokens.

    Returns:
        The report: `{"kvfold", "protocol", "models"}`, the content of report.json.

    Raises:
        Refusal: The models' configs do not allow the comparison.
        Failure: A model cannot be loaded, or its figures cannot be trusted.
    """
    protocol, whole = prepare(sources, text, settings)
    tokens = replace(whole, ids=whole.ids[: settings.max_tokens])
    blocks = protocol.blocks(tokens)
    total = sum(len(block.ids) - block.first for block in blocks)
    first, *others = sources
    entries: list[dict[str, Any]] = []
    with _padded(first, settings) as source:
        record = protocol_record(protocol, tokens, str(source.dtype).removeprefix("torch."))
        # Do everything that a model's config or files can make fail before the long part.
        fixed = [{**_identity(first), **_cost(first, source)}]
        for group in _groups(others) or [[]]:
            with contextlib.ExitStack() as stack:
                models = [stack.enter_context(_padded(other, settings)) for other in group]
                byte_count = fixed[0]["kv_bytes_per_token"]
                fixed += [{**_identity(o), **_cost(o, m, byte_count)} for o, m in zip(group, models, strict=True)]
                for other, entry in zip(group, fixed[len(fixed) - len(group) :], strict=True):
                    entry["calibration_overlap"] = _overlap(other, tokens, whole, calibrated_on)
                name = ", ".join(other.name for other in group or [first])
                room = memory_for("the evaluation", "free some, or give --device cpu, or a shorter --context")
                with stage(progress, f"evaluate {name}", total, "token") as done, room:
                    scores = compare(source, models, blocks, done)
                del models  # or they would stay in memory while the next ones are loaded
            new = scores if not entries else scores[1:]
            entries += [fixed[len(entries) + i] | score.as_figures(tokens, scores[0]) for i, score in enumerate(new)]
    return {"kvfold": version("kvfold"), "protocol": record, "models": entries}


def _groups(others: Sequence[Source]) -> list[list[Source]]:
    """The models in order, grouped: as many as have weight files of `_SMALL` bytes together, or a single one."""
    groups: list[list[Source]] = []
    room = 0
    for other in others:
        size = sum(file.stat().st_size for file in (*other.files.glob("*.safetensors"), *other.files.glob("*.bin")))
        if not groups or size > room:
            groups.append([])
            room = _SMALL
        groups[-1].append(other)
        room -= size
    return groups


def prepare(sources: Sequence[Source], text: Text, settings: EvaluationSettings) -> tuple[Protocol, Tokens]:
    """Check configs, tokenizer and text before a model is loaded. Returns the protocol and the whole text's tokens."""
    protocol = check(sources, settings)
    tokens = tokens_of(sources[0], text)
    protocol.blocks(tokens)
    return protocol, tokens


def check(sources: Sequence[Source], settings: EvaluationSettings) -> Protocol:
    """Check everything that configs can show. Returns the protocol at a context that all models allow."""
    require_device(settings.device)
    for source in sources:
        require_causal(source)
    vocabularies = {source.config.get_text_config(decoder=True).vocab_size for source in sources}
    if len(vocabularies) > 1:
        listed = ", ".join(f"{s.name} {s.config.get_text_config(decoder=True).vocab_size}" for s in sources)
        raise Refusal(
            f"models with different vocabularies cannot be compared: {listed}",
            hint="evaluate each by itself and compare bits/byte",
        )
    for source in sources:
        AttentionSpec.from_config(source.config).bytes_per_token(source.dtype)
    if settings.dtype != "auto":
        dtype_bytes(settings.dtype)
    if settings.max_tokens is not None and settings.max_tokens < 2:
        raise Refusal(f"perplexity needs at least 2 tokens, not {settings.max_tokens}")
    (context,) = require_contexts(sources, () if settings.context is None else (settings.context,))
    return Protocol.named(settings.protocol, context)


def require_contexts(sources: Sequence[Source], wanted: Sequence[int]) -> tuple[int, ...]:
    """`wanted`, or min(2048, the smallest position limit of the models) if it is empty.

    Raises:
        Refusal: A context exceeds a model's positions.
    """
    limits = [limit for source in sources if (limit := source.max_positions)]
    if limits and max(wanted, default=0) > min(limits):
        raise Refusal(
            f"a context of {max(wanted)} tokens exceeds the {min(limits)} positions of the model",
            hint=f"use --context {min(limits)} or less",
        )
    return tuple(wanted) or (min([_DEFAULT_CONTEXT, *limits]),)


def require_causal(source: Source) -> None:
    """Raise `Refusal` if the model is not a decoder-only language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(source.config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (source.raw.get("auto_map") or {})
    if getattr(source.config, "is_encoder_decoder", False) or not known:
        raise Refusal(
            f"{source.reference} is no decoder-only language model (model type {source.model_type!r})",
            hint="it takes a model that AutoModelForCausalLM loads",
        )


@contextlib.contextmanager
def load(source: Source, settings: EvaluationSettings) -> Iterator[Any]:
    """The model of `source` in eval mode, freed when the block ends.

    On "cpu" it is loaded into main memory. Otherwise accelerate's device map spreads it over GPUs, main memory and, if needed,
    a temporary directory.
    """
    import torch
    from transformers import AutoModelForCausalLM

    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    dtype = settings.dtype if settings.dtype != "auto" else ("float32" if on_cpu else source.dtype)
    with tempfile.TemporaryDirectory(prefix="kvfold-offload-") as offload:
        placement = {} if settings.device == "cpu" else {"device_map": settings.device, "offload_folder": offload}
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                source.files,
                dtype=getattr(torch, dtype),
                trust_remote_code=source.trust_remote_code,
                output_loading_info=True,
                **placement,
            )
        except Failure:
            raise
        except Exception as error:  # safetensors, torch, transformers and the file system raise different classes
            reason = " ".join(str(error).split())[:300]
            raise Failure(
                f"cannot load {source.reference}: {type(error).__name__}: {reason}", hint="is it whole? -v shows more"
            ) from error
        if info["missing_keys"] or info["mismatched_keys"]:
            bad = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
            # transformers fills such weights with random numbers and continues, so figures would be wrong.
            raise Failure(
                f"{source.reference} lacks {len(bad)} of its model's weights or has them in other shapes: {bad[0]}, …",
                hint="config.json and the weights are not of the same model",
            )
        if info["unexpected_keys"]:
            unused = sorted(map(str, info["unexpected_keys"]))
            _log.warning("%s has no use for %d tensors of %s: %s, …", type(model).__name__, len(unused), source.name, unused[0])
        yield model.eval()


@contextlib.contextmanager
def _padded(source: Source, settings: EvaluationSettings) -> Iterator[Any]:
    """As `load`; stock latent attention pads its values on a CPU, which is several times faster and changes no result."""
    from attention.padding import pad_values

    with load(source, settings) as model:
        yield pad_values(model)


def tokens_of(source: Source, text: Text, first: int | None = None) -> Tokens:
    """The tokens of a text, or its first ones, from a model's own tokenizer.

    Raises:
        Failure: The tokenizer cannot be loaded, or gives ids that the model does not know.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.files, trust_remote_code=source.trust_remote_code)
    except Failure:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise Failure(
            f"cannot load the tokenizer of {source.reference}: {reason}", hint="copy the tokenizer's files beside the weights"
        ) from error
    tokens = tokenize(text, tokenizer, first)
    limit = source.config.get_text_config(decoder=True).vocab_size
    if int(tokens.ids.max()) >= limit:
        raise Failure(
            f"the tokenizer of {source.reference} makes ids up to {int(tokens.ids.max())}, its model knows {limit}",
            hint="the tokenizer's files are not this model's",
        )
    return tokens


def _identity(source: Source) -> dict[str, Any]:
    spec = AttentionSpec.from_config(source.config)
    made = _made(source)
    calibration = made.get("calibration") or {}
    return {
        "name": source.name,
        "path": source.reference,
        "kind": spec.kind,
        "method": made.get("method"),
        "calibration_hash": made.get("calibration_hash"),
        "calibration_context": calibration.get("context"),
        "calibration_overlap": None,
    }


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
    counts = [calibration.get(key) for key in ("tokens", "context")] if isinstance(calibration, dict) else ["none"]
    types = {"method": made.get("method"), "calibration_hash": made.get("calibration_hash")}
    wrong = [key for key, value in types.items() if not isinstance(value, str | None)]
    if wrong or not all(isinstance(count, int | None) for count in counts):
        raise Failure(
            f"conversion.json of {source.reference} is damaged: its {(wrong or ['calibration'])[0]} is of another type",
            hint="restore it, or take it away: it only says how the model was made",
        )
    return made


def _overlap(source: Source, tokens: Tokens, whole: Tokens, calibrated_on: Tokens | None) -> float | None:
    """The share of the evaluated `tokens` that calibration has seen; None without calibration or if its text is unknown."""
    made = _made(source)
    if calibrated_on is not None:
        return shared_share(tokens.ids, calibrated_on.ids)
    count = (made.get("calibration") or {}).get("tokens")
    if count is None or replace(whole, ids=whole.ids[:count]).hash != made.get("calibration_hash"):
        return None
    return shared_share(tokens.ids, whole.ids[:count])


def _cost(source: Source, model: Any, source_bytes: int | None = None) -> dict[str, Any]:
    spec = AttentionSpec.from_config(source.config)
    return cache_figures(model, spec, source.dtype, source_bytes or spec.bytes_per_token(source.dtype))
