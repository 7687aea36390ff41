"""Evaluates models on a text: loads each model, scores it beside its source, measures its cache, returns a report."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from attention.caps import keep_caps
from attention.errors import Failure, GateMissed, Refusal
from attention.spec import AttentionSpec, dtype_bytes
from eval.cost import cache_figures
from eval.device import compute_device, require_device
from eval.forecast import Decoder, Work, foretell
from eval.lockstep import Job, score_all
from eval.overlap import shared_share
from eval.perplexity import Score, batches, protocol_record
from eval.probes import PROBES
from eval.progress import Progress, silent
from eval.protocol import Protocol
from eval.recall import work_of as recall_work
from eval.source import FLOATS, Source, position_limit
from eval.tasks import TaskSettings
from eval.text import Text, Tokens, reach, tokenize

_log = logging.getLogger("kvfold")
_DEFAULT_CONTEXT = 2048
_SCORED = 8  # values that scoring goes through for each logit, of a model that is compared with its source


@dataclass(frozen=True)
class EvaluationSettings:
    """How to evaluate.

    Attributes:
        protocol: One of `eval.protocol.PROTOCOLS`.
        contexts: Tokens per block; each is evaluated. Empty for min(2048, the smallest position limit of the models).
        max_tokens: How many tokens to evaluate on, from the text's start; None for all.
        dtype: Dtype of the forward passes; "auto" is float32 on a CPU, the checkpoint's own dtype elsewhere.
        device: "auto", "cpu", "cuda", "cuda:1", …; "auto" spreads a model with accelerate's device map.
        recall: Whether to measure recall over distances.
        tasks: Tasks of lm-eval to run, or None.
    """

    protocol: str = "paper"
    contexts: tuple[int, ...] = ()
    max_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    recall: bool = False
    tasks: TaskSettings | None = None


def require_ratio(report: dict[str, Any], limit: float | None) -> None:
    """Require every model's perplexity to be at most `limit` times the source's, at every context.

    Raises:
        GateMissed: A model exceeds it.
    """
    contexts = {report["protocol"]["context"]: report["models"]}
    contexts |= {other["context"]: other["models"] for other in report["other_contexts"]}
    for context, (source, *others) in contexts.items() if limit is not None else ():
        for entry in others:
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
    foretold: bool = False,
) -> dict[str, Any]:
    """Evaluate the first model as the source, and compare the others with it.

    Args:
        sources: The models; the source comes first.
        text: The text to evaluate on.
        settings: How to evaluate.
        calibrated_on: The text that the others were calibrated on, if known. Otherwise their own conversion.json tells
            whether it was this text.
        progress: Called with the progress of each stage.
        foretold: Whether the caller has said how long it takes, as part of its own work.

    Returns:
        The report, the content of report.json: `{"kvfold", "protocol", "models", "other_contexts"}` and a key for each probe.

    Raises:
        Refusal: The models' configs do not allow the comparison.
        Failure: A model cannot be loaded, or its figures cannot be trusted.
    """
    protocols, tokens = prepare(sources, text, settings)

    @cache
    def within(count: int) -> Tokens:
        return calibration_tokens(sources[0], text, count)

    models = _Models(sources, settings, tokens, lambda source: _overlap(source, tokens, within, calibrated_on), progress)
    if not foretold:
        _foretell(sources, len(tokens.ids), settings)
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
        "protocol": protocol_record(protocols[0], tokens, _compute_dtype(sources[0], settings)),
        "models": [entry | figures for entry, figures in zip(models.entries, quality[0], strict=True)],
        "other_contexts": [
            {
                "context": protocol.context,
                "stride": protocol.stride,
                "models": [{"name": source.name} | figures for source, figures in zip(sources, row, strict=True)],
            }
            for protocol, row in zip(protocols[1:], quality[1:], strict=True)
        ],
        **models.probed(),
    }


def evaluation_work(
    decoders: Sequence[Decoder], source: Source, tokens: int, contexts: Sequence[int] = (), protocol: str = "paper"
) -> Work:
    """The work of an evaluation, without probes.

    Args:
        decoders: Of the models; the source comes first.
        source: Its positions decide the default context.
        tokens: Of the text.
        contexts: As of `EvaluationSettings`.
        protocol: One of `eval.protocol.PROTOCOLS`.
    """
    total = Work()
    for one in (Protocol.named(protocol, context) for context in require_contexts([source], contexts)):
        run = math.ceil(tokens * one.context / one.stride)  # blocks may overlap
        for decoder in decoders:
            total += decoder.forward(run, min(run, one.context), tokens) + Work(values=_SCORED * tokens * decoder.vocabulary)
    return sum((decoder.load() for decoder in decoders), total)


def _foretell(sources: Sequence[Source], tokens: int, settings: EvaluationSettings) -> None:
    """Say how long an evaluation takes."""
    decoders = [Decoder.of(source.config, source.trust_remote_code) for source in sources]
    contexts = require_contexts(sources, settings.contexts)
    work = evaluation_work(decoders, sources[0], tokens, contexts, settings.protocol)
    if settings.recall:
        limit = position_limit(sources)
        work += sum((recall_work(decoder, tokens, limit) for decoder in decoders), Work())
    dtype, without = _compute_dtype(sources[0], settings), "the tasks" if settings.tasks else ""
    foretell(work, compute_device(settings.device), decoders[0].width, dtype, without)


class _Models:
    """Loads the models of an evaluation, and notes what is measured of each besides its score.

    Attributes:
        entries: The beginning of each model's entry in the report: what it is, and its cache.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        settings: EvaluationSettings,
        tokens: Tokens,
        overlap: Callable[[Source], float | None],
        progress: Progress,
    ) -> None:
        self._sources, self._settings, self._progress = sources, settings, progress
        first, *others = sources  # what their files can make fail comes before the long part
        self._known = [_identity(first) | {"calibration_overlap": None}]
        self._known += [_identity(other) | {"calibration_overlap": overlap(other)} for other in others]
        self.entries: list[dict[str, Any]] = []
        self._probes = [found for probe in PROBES if (found := probe.asked(settings, sources, tokens)) is not None]
        self._found: dict[str, dict[int, dict[str, Any]]] = {probe.name: {} for probe in self._probes}

    @contextlib.contextmanager
    def opened(self, index: int) -> Iterator[Any]:
        """The model with this index, freed when the block ends."""
        source = self._sources[index]
        with _padded(source, self._settings) as model:
            if index == len(self.entries):  # the first time
                first = self.entries[0]["kv_bytes_per_token"] if self.entries else None
                self.entries.append(self._known[index] | _cost(source, model, first))
            yield model

    def visit(self, index: int, model: Any) -> None:
        """Measure what the settings ask for besides perplexity."""
        for probe in self._probes:
            name = self._sources[index].name
            self._found[probe.name][index] = {"name": name} | probe.measure(model, name, self._progress)

    def probed(self) -> dict[str, Any]:
        """The report's part of each probe; None for those that were not asked for."""
        made = {
            p.name: p.record() | {"models": [found for _, found in sorted(self._found[p.name].items())]} for p in self._probes
        }
        return {probe.name: made.get(probe.name) for probe in PROBES}


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
    for source in sources:
        AttentionSpec.from_config(source.config).bytes_per_token(source.dtype)
    if settings.dtype != "auto":
        dtype_bytes(settings.dtype)
    if settings.max_tokens is not None and settings.max_tokens < 2:
        raise Refusal(f"perplexity needs at least 2 tokens, not {settings.max_tokens}")
    return [Protocol.named(settings.protocol, context) for context in require_contexts(sources, settings.contexts)]


def require_contexts(sources: Sequence[Source], wanted: Sequence[int]) -> tuple[int, ...]:
    """`wanted`, or min(2048, the smallest position limit of the models) if it is empty.

    Raises:
        Refusal: A context exceeds a model's positions.
    """
    limit = position_limit(sources)
    if limit is not None and max(wanted, default=0) > limit:
        raise Refusal(
            f"a context of {max(wanted)} tokens exceeds the {limit} positions of the model",
            hint=f"use --context {limit} or less",
        )
    return tuple(wanted) or (min(_DEFAULT_CONTEXT, limit or _DEFAULT_CONTEXT),)


def require_causal(source: Source) -> None:
    """Raise `Refusal` if the model is not a decoder-only language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(source.config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (source.raw.get("auto_map") or {})
    if getattr(source.config, "is_encoder_decoder", False) or not known:
        raise Refusal(
            f"{source.reference} is not a decoder-only language model (model type {source.model_type!r})",
            hint="it takes a model that AutoModelForCausalLM loads",
        )


def _compute_dtype(source: Source, settings: EvaluationSettings) -> str:
    """The dtype of the forward passes of a model."""
    import torch

    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if settings.device == "cpu" or not torch.cuda.is_available() else source.dtype


@contextlib.contextmanager
def load(source: Source, settings: EvaluationSettings) -> Iterator[Any]:
    """The model of `source` in eval mode, freed when the block ends.

    On "cpu" it is loaded into main memory. Otherwise accelerate's device map spreads it over GPUs, main memory and, if needed,
    a temporary directory.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="kvfold-offload-") as offload:
        placement = {} if settings.device == "cpu" else {"device_map": settings.device, "offload_folder": offload}
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                source.files,
                dtype=getattr(torch, _compute_dtype(source, settings)),
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
        _require_floats(source, model)
        if info["unexpected_keys"]:
            unused = sorted(map(str, info["unexpected_keys"]))
            _log.warning("%s has no use for %d tensors of %s: %s, …", type(model).__name__, len(unused), source.name, unused[0])
        yield keep_caps(model).eval()


def _require_floats(source: Source, model: Any) -> None:
    """Refuse weights of other numbers, which transformers casts to floats as they are.

    Raises:
        Failure: A parameter is stored as integers or 8-bit floats, and the config names no quantisation.
    """
    from safetensors import safe_open

    if getattr(model, "hf_quantizer", None) is not None:
        return
    parameters, base = {name for name, _ in model.named_parameters()}, f"{model.base_model_prefix}."
    parameters |= {name.removeprefix(base) for name in parameters}  # as a checkpoint of the base model has them
    for path in sorted(source.files.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(parameters.intersection(file.keys())):
                if (kind := file.get_slice(name).get_dtype()) not in FLOATS:
                    raise Failure(
                        f"{name} of {source.reference} is stored as {kind}, and its config names no quantisation",
                        hint="the checkpoint is damaged or incomplete; get it again",
                    )


@contextlib.contextmanager
def _padded(source: Source, settings: EvaluationSettings) -> Iterator[Any]:
    """As `load`; latent attention pads its values on a CPU, which is several times faster and changes no result."""
    from attention.padding import pad_values

    with load(source, settings) as model:
        yield pad_values(model)


def tokens_of(source: Source, text: Text, first: int | None = None) -> Tokens:
    """The tokens of a text, or its first ones, from a model's own tokenizer.

    Raises:
        Failure: The tokenizer cannot be loaded, or gives ids that the model does not know.
    """
    tokens = tokenize(text, source.tokenizer(), first)
    limit = source.vocabulary
    if int(tokens.ids.max()) >= limit:
        raise Failure(
            f"the tokenizer of {source.reference} makes ids up to {int(tokens.ids.max())}, its model knows {limit}",
            hint="the tokenizer's files are not this model's",
        )
    return tokens


def calibration_tokens(source: Source, text: Text, count: int) -> Tokens:
    """The tokens of a text among which `Tokens.spread` chooses `count` to calibrate on. Raises as `tokens_of`."""
    return tokens_of(source, text.all_over(reach(count)), reach(count))


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
        "calibration_context": calibration.get("max_context") or calibration.get("context"),
        "healing": _healing(source, made),
        "code": source.code_note,
    }


def _healing(source: Source, made: dict[str, Any]) -> list[dict[str, float]] | None:
    """The curve of the healing that made the model: tokens, and mean nats of text that was held out; None without one.

    Raises:
        Failure: It is not what healing writes.
    """
    if (healing := made.get("healing")) is None:
        return None
    try:
        return [{key: float(point[key]) for key in ("tokens", "kl", "loss_nats")} for point in healing["curve"]]
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


def _overlap(source: Source, tokens: Tokens, within: Callable[[int], Tokens], calibrated_on: Tokens | None) -> float | None:
    """The share of the evaluated `tokens` that calibration has seen; None without calibration or if its text is unknown."""
    made = _made(source)
    if calibrated_on is not None:
        return shared_share(tokens.ids, calibrated_on.ids)
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
            return shared_share(tokens.ids, seen.ids)
    return None


def _cost(source: Source, model: Any, source_bytes: int | None = None) -> dict[str, Any]:
    spec = AttentionSpec.from_config(source.config)
    return cache_figures(model, spec, source.dtype, source_bytes or spec.bytes_per_token(source.dtype))
