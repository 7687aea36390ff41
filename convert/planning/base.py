"""From arguments to a Plan: data that says what will be done. Whatever can be refused without weights is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.errors import Refusal
from attention.spec import AttentionSpec
from convert.families import Family, family_of
from convert.families.base import Traits, hides_logits
from convert.hosts import HOSTS, Host
from convert.methods.grouped import GroupedMethod
from convert.methods.latent import LatentMethod
from convert.methods.text import TextUse
from convert.planning.calibration import Calibration
from eval.source import Source


@dataclass(frozen=True)
class Output:
    """Where and how the result is written.

    Attributes:
        path: OUTPUT.
        dtype: What floats are stored in; None keeps each tensor's own.
        max_shard_size: Bytes.
        overwrite: Replace a checkpoint at `path`.
        resume: Continue an unfinished conversion to `path`.
    """

    path: Path
    dtype: str | None = None
    max_shard_size: int = 5 * 10**9
    overwrite: bool = False
    resume: bool = False


@dataclass(frozen=True)
class Plan:
    """A conversion, decided.

    Attributes:
        command: The kind of target: "gqa", "mqa" or "mla".
        source: What is converted.
        family: How its attention is read.
        before: Its numbers.
        target: Those of the result.
        method: What changes a layer.
        host: What carries the result.
        output: Where it goes.
        seed: For methods that draw numbers, and for the order in which refinement takes blocks of text.
        device: Where layers run and are changed.
        notes: What the user should know.
        rank: Channels of the latent that carry something (MLA).
        freqfold: Neighbouring frequencies that count as one (MLA).
        pad_rank: Whether channels beyond full rank were asked for (MLA).
        calibration: Text for the method, if there is any.
        splits: Plans that spend the same cache, among which the text decides (MLA within a budget).
        grouping: Which KV heads share a group (GQA): "contiguous" or "similar".
    """

    command: str
    source: Source
    family: Family
    before: AttentionSpec
    target: AttentionSpec
    method: GroupedMethod | LatentMethod
    host: Host
    output: Output
    seed: int
    device: str
    notes: tuple[str, ...]
    rank: int = 0
    freqfold: int = 1
    pad_rank: bool = False
    calibration: Calibration | None = None
    splits: tuple[Plan, ...] = ()
    grouping: str = "contiguous"

    @property
    def cache_dtype(self) -> str:
        """The dtype that the result's cache is counted in."""
        return self.output.dtype or self.source.dtype

    @property
    def applied_method(self) -> str | None:
        """The method's name, or None where there is nothing to change."""
        return self.method.name if self.target != self.before else None

    def recipe(self) -> dict[str, Any]:
        """What the bytes depend on, as `convert run` takes it back from any directory; OUTPUT is not part of it."""
        directory = self.source.directory
        return {
            self.command: {
                "model": str(directory.resolve()) if directory else f"{self.source.repository}@{self.source.commit}",
                **self._size(),
                "method": self.method.name,
                "seed": self.seed,
                **({"dtype": self.output.dtype} if self.output.dtype else {}),
                "max_shard_size": _with_unit(self.output.max_shard_size),
                **(self.calibration.as_recipe() if self.calibration else {}),
                **({"trust_remote_code": True} if self.source.trust_remote_code else {}),
            }
        }

    def _size(self) -> dict[str, Any]:
        if self.command == "gqa":
            grouping = {"grouping": self.grouping} if self.grouping != "contiguous" else {}
            return {"groups": self.target.num_kv_heads, **grouping}
        if self.target.kv_lora_rank is None:
            return {}
        return {
            "kv_lora_rank": self.target.kv_lora_rank,
            "qk_rope_head_dim": self.target.qk_rope_head_dim,
            **({"freqfold": self.freqfold} if self.freqfold > 1 else {}),
            **({"pad_rank": True} if self.pad_rank else {}),
        }

    def as_dict(self) -> dict[str, Any]:
        """For `--json` and people: numbers as numbers."""
        return {
            "command": self.command,
            "model": self.source.reference,
            "family": self.family.model_type,
            "source": self.before.kind,
            "target": self.target.kind,
            "query_heads": self.before.num_heads,
            "kv_heads_before": self.before.num_kv_heads,
            **(
                {"kv_heads_after": self.target.num_kv_heads}
                if self.target.kv_lora_rank is None
                else {**self._size(), "latent_channels": self.rank}
            ),
            "method": self.applied_method,
            "calibration": self.calibration.as_options() if self.calibration else None,
            "host": self.host.name,
            "loads_in": self.host.loads_in,
            "model_type": self.host.model_type(self.family),
            "cache_dtype": self.cache_dtype,
            "kv_bytes_per_token_before": self.before.bytes_per_token(self.source.dtype),
            "kv_bytes_per_token_after": self.target.bytes_per_token(self.cache_dtype),
            "output": str(self.output.path),
            "notes": list(self.notes),
        }


def _with_unit(size: int) -> str:
    """5000000000 as "5GB", exactly: in the largest unit that divides it."""
    unit, name = next((u, n) for u, n in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"), (1, "B")) if size % u == 0)
    return f"{size // unit}{name}"


def readable(source: Source) -> Family:
    """The family of a source that can be converted at all.

    Raises:
        Refusal: It wants to run code, is quantised, is MLA already, or is of no known family.
    """
    source.refuse_remote_code()
    if source.raw.get("quantization_config"):
        quantisation = source.raw["quantization_config"]
        kind = quantisation.get("quant_method", "unknown method") if isinstance(quantisation, dict) else quantisation
        raise Refusal(f"{source.reference} is quantised ({kind})", hint="convert the original checkpoint, then quantise")
    if rank := source.raw.get("kv_lora_rank"):
        raise Refusal(
            f"model type {source.model_type!r} is multi-head latent attention already (kv_lora_rank {rank})",
            hint="kvfold converts MHA and GQA sources; `convert eval` measures this one",
        )
    return family_of(source.model_type)


def stored_dtype(source: Source, output: Output) -> str:
    """The dtype of a result's weights, which its cache is kept in, too.

    Raises:
        Refusal: It would be float64, which no engine serves.
    """
    dtype = output.dtype or source.dtype
    if dtype == "float64":
        raise Refusal(
            f"{source.reference} is stored in float64, which no engine serves a model in",
            hint="give --dtype float32, bfloat16 or float16",
        )
    return dtype


def host_of(command: str, family: Family, source: Source, target: AttentionSpec, dtype: str) -> Host:
    """The first host that carries a target.

    Raises:
        Refusal: None does; the reasons.
    """
    refusals = []
    for host in HOSTS[command]:
        reason = host.refuses(family, source.config, target, dtype)
        if reason is None:
            return host
        refusals.append(f"{host.name}: {reason}")
    kind = "MLA" if target.kv_lora_rank else target.kind
    raise Refusal(f"no host carries {kind} of {source.reference}: {'; '.join(refusals)}")


def text_notes(method: GroupedMethod | LatentMethod, text: Calibration | None, traits: Traits) -> Sequence[str]:
    """What there is to say of text that a method could use and has not got, and of a step that the source rules out."""
    if text is None and method.text is TextUse.USED:
        return [f"without calibration text, which {method.name} is better with: it goes by weights and norm gains alone"]
    hiding = hides_logits(traits, text.context or 0) if text else []
    reasons = [f"{' and '.join(hiding)} changes what heads attend to"] if hiding else []
    reasons += ["they are normalised behind their projection"] if traits.qk_norm else []
    if text and text.refit and reasons:
        return [f"queries are not refitted, outputs are: {', and '.join(reasons)}"]
    return []
