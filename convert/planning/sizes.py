"""Sizing of a latent: from what is asked for, numbers or a budget, to targets, all from the config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attention.errors import Refusal
from attention.formats import format_named
from attention.spec import RANK_STEP
from convert.hosts.engines import ENGINES, storing
from convert.planning.budget import ROTARY, ROTARY_MIXED2, LatentBounds, fold_of, format_of
from convert.planning.targets import LatentTarget

if TYPE_CHECKING:
    from attention.formats import Format
    from attention.spec import AttentionSpec
    from convert.hosts.engines import Engine
    from convert.methods.latent import LatentMethod

AUTO = "auto"


@dataclass(frozen=True)
class LatentSize:
    """The size of a latent that the user asks for: rank and rotary dims, or a budget.

    Attributes:
        kv_lora_rank: R, or None.
        qk_rope_head_dim: P, or None.
        budget: A share of the source's KV cache (a float), or bytes per token in all layers (an int); or None.
        pad_rank: Whether the rank may exceed full rank, with channels of zeros.
        portable: Whether engines' own DeepSeek classes have to run the result.
        cache_dtype: The format of the cache that the result is for; None for the dtype of its weights, and `AUTO` for the one
            of `budget.FORMATS`.
    """

    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    budget: float | None = None
    pad_rank: bool = False
    portable: bool = False
    cache_dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sizing(LatentBounds):
    """A request, and what its target depends on.

    Attributes:
        method: The conversion's method.
        engine: The engine that has to run the result, or None.
        dtype: The dtype of the result's weights.
        size: What the user asks for.
    """

    method: LatentMethod
    engine: Engine | None
    dtype: str
    size: LatentSize

    def target(self) -> LatentTarget:
        """The target of the request.

        Raises:
            Refusal: There is none, or the source has that size already.
        """
        size, by_rule = self.size, self.size.cache_dtype == AUTO
        cache_dtype = self._format() if by_rule else size.cache_dtype
        form = format_named(cache_dtype or self.dtype)
        rank, rope_dim = self._numbers(form)
        spec = self._spec(rank, rope_dim)
        padded = size.pad_rank or (size.kv_lora_rank is None and self.engine is not None and bool(self.engine.latents))
        used = self._channels(rank, rope_dim, any_rank=padded)
        if self.host.portable and form.classes:
            raise Refusal(
                f"a portable result cannot be made for {form.name}: its norm reads all channels, which need as many bits each",
                hint="use int4 or q4_0, or leave out --portable",
            )
        spec.bytes_per_token(form.name)  # refuses what the format does not take
        target = LatentTarget(
            before=self.before,
            spec=spec,
            method=self.method,
            host=self.host,
            channels=used,
            freqfold=fold_of(rope_dim, self.rotary_dim) if self.method.folds and self.rotary_dim else 1,
            pad_rank=padded,
            cache_dtype=cache_dtype,
        )
        return replace(target, notes=(*self._notes(target), *([self._format_note(target)] if by_rule else ())))

    @property
    def context(self) -> int:
        """The tokens of a sequence at which budgets count."""
        return self.source.longest_context

    @property
    def whole(self) -> float:
        """The bytes per token of the source's cache."""
        return self.before.bytes_per_token(self.source.dtype, self.context)

    def _format(self) -> str | None:
        """The format of `--cache-dtype auto`."""
        if self.size.budget is None:
            raise Refusal(
                "--cache-dtype auto chooses the format of a budget",
                hint="give --kv-budget, or name a format with --cache-dtype",
            )
        share = self._budget(self.size.budget) / self.whole if isinstance(self.size.budget, int) else self.size.budget
        stored = [cache.form for cache in (self.engine or ENGINES["transformers"]).caches if cache.tried]
        if self.host.portable:
            stored = [form for form in stored if not format_named(form).classes]
        return format_of(share, stored)

    def _format_note(self, target: LatentTarget) -> str:
        """What runs the format that `--cache-dtype auto` stands for."""
        if (form := target.cache_dtype) is None:
            return f"--cache-dtype auto is {self.dtype}: no format of fewer bits was tried with that engine"
        engines = storing(self.host, self.family, target.spec, form)
        return f"--cache-dtype auto is {form} at this budget, which runs in {' and '.join(engines)}"

    def _budget(self, asked: float) -> float:
        """The bytes per token of a budget."""
        whole, budget = self.whole, asked
        if not isinstance(asked, int):
            budget = int(asked * whole) if isinstance(whole, int) else asked * whole
        if budget > whole:
            of = f"{self.source.reference}{self.before.at_context(self.context)}"
            raise Refusal(f"a budget of {budget:.0f} bytes per token exceeds the {whole:.0f} of {of}: nothing to save")
        return budget

    def _numbers(self, form: Format) -> tuple[int, int]:
        """R and P, as given or of a budget."""
        size, rotates = self.size, self.rotary_dim > 0
        if size.budget is None:
            if size.kv_lora_rank is None or (rotates and size.qk_rope_head_dim is None):
                raise Refusal(f"give --kv-lora-rank{' and --qk-rope-head-dim' if rotates else ''}, or --kv-budget")
            return size.kv_lora_rank, size.qk_rope_head_dim or 0
        if (size.kv_lora_rank, size.qk_rope_head_dim) != (None, None):
            raise Refusal("give either --kv-budget or --kv-lora-rank and --qk-rope-head-dim, not both")
        if size.pad_rank:
            raise Refusal(
                "give either --kv-budget or --pad-rank: a budget never goes beyond full size, where there is nothing to pad",
                hint="for channels of zeros give --kv-lora-rank and --qk-rope-head-dim",
            )
        return self._of_budget(self._budget(size.budget), form)

    def _of_budget(self, budget: float, form: Format) -> tuple[int, int]:
        """R and P of a budget of bytes per token in all layers, for a cache in that format.

        P is rounded up to what the format takes, as far as there are rotary dims, and R down.
        """
        step, held = form.multiple, self.before.tokens_held(self.context)
        fewest = min(self.most_rotary_dims, max(2, step)) if self.rotary_dim else 0
        least = self._sized(-(-self.with_reserved(1) // step) * step, fewest)
        changed = sum(held[layer] for layer in least.changed)
        staying, whole = least.kept_bytes(form.name, self.context), budget * self.context
        if staying and staying >= whole:
            raise Refusal(
                f"a budget of {budget:.0f} bytes per token is too small: layers that stay take {staying / self.context:.0f}",
                hint="give a larger one, or --all-layers; or name fewer with --keep-layers",
            )
        bits = 0.9 * sum(share * own.bits for share, own in form.classes) or form.bits  # a lower bound: classes fill bytes
        values = int((whole - staying) * 8 // (changed * bits))
        if self.engine and self.engine.latents:  # it takes a few sizes only
            return self.engine.fitting(values)
        # Refuses a model whose rotary dims are too few for the format.
        least_bytes = math.ceil(least.bytes_per_token(form.name, self.context))
        try:
            while True:
                rank, rope_dim = self.for_budget(values, self.method.folds, ROTARY if form.bits > 1 else ROTARY_MIXED2)
                kept = -(-rope_dim // step) * step
                kept = kept if kept <= self.most_rotary_dims else rope_dim // step * step
                rank = (rank + rope_dim - kept) // step * step
                exists = rank > 0 and (kept > 0 or not rope_dim)
                if exists and self._sized(rank, kept).bytes_per_token(form.name, self.context) <= budget:
                    return rank, kept
                values -= 1
        except Refusal as error:
            raise Refusal(
                f"a budget of {budget:.0f} bytes per token is too small for any rank: {error}",
                hint=f"the least is {least_bytes} bytes per token{least.at_context(self.context)} in {form.name}, "
                "and little is left of a model there",
            ) from None

    def _spec(self, rank: int, rope_dim: int) -> AttentionSpec:
        """The sizes of a latent, if it has a RoPE key just where something rotates, and of frequencies that its class keeps."""
        reference, rotary, most, portable = self.source.reference, self.rotary_dim, self.most_rotary_dims, self.host.portable
        if rope_dim and not rotary:
            raise Refusal(
                f"{reference} has no RoPE, so it has no RoPE key of {rope_dim} dims: all of its keys go into the latent"
                + (", where layers do not stay as they are" if self.kept else ""),
                hint="leave out --qk-rope-head-dim",
            )
        if rotary and rope_dim < 2:
            raise Refusal(
                f"cannot keep {rope_dim} rotary dims of {reference}: where keys rotate, a RoPE key needs at least 2",
                hint="give --qk-rope-head-dim 2 or more",
            )
        spec = self._sized(rank, rope_dim)
        if rope_dim > most:
            why = f"of each key's {self.before.head_dim} dims only {rotary} have RoPE, which makes {most}"
            if portable:
                why = f"a portable result keeps each of its {most // 2} frequencies once, which makes at most {most}"
            raise Refusal(f"cannot keep {rope_dim} rotary dims of {reference}: {why}")
        if portable and self.method.folds and rotary % rope_dim:
            raise Refusal(
                f"method {self.method.name} spreads {rope_dim} rotary dims evenly over {rotary}, which is not a geometric "
                "ladder of frequencies, as a portable result needs",
                hint=f"give a --qk-rope-head-dim that divides {rotary}",
            )
        if self.engine and self.engine.query_latent(self.before):
            spec = replace(spec, q_lora_rank=self.source.decoder.hidden_size)
        return spec

    def _sized(self, rank: int, rope_dim: int) -> AttentionSpec:
        return self.before.latent(rank, rope_dim).keeping(self.kept, self.before.num_kv_heads)

    def _channels(self, rank: int, rope_dim: int, any_rank: bool) -> int:
        """The channels that carry keys and values; refused if there are none, or more than full size and not `any_rank`."""
        host, full, reference = self.host, self.full_rank(rope_dim), self.source.reference
        channels = rank - host.reserved(rank)
        if channels < 1:
            raise Refusal(
                f"a latent of rank {rank} holds nothing: {host.name} needs {host.reserved(rank)} channel(s) for itself"
            )
        if channels > full and not any_rank:
            whole = self.with_reserved(full)
            added = f"{whole - full} {'more channel' if host.portable else 'constant channel(s)'} of {host.name}"
            raise Refusal(
                f"rank {rank} exceeds full size: at {rope_dim} rotary dims, keys and values of {reference} have {full} dims, "
                f"which with {added} makes {whole}",
                hint=f"use --kv-lora-rank {whole}, or --pad-rank for channels of zeros",
            )
        return min(channels, full)

    def _notes(self, target: LatentTarget) -> Iterator[str]:
        """What the user should know of a target."""
        spec, host, source = target.spec, self.host, self.source
        rank = spec.kv_lora_rank or 0
        constant = host.reserved(rank)
        zeros = rank - target.channels - constant
        note = f"{target.channels} of {rank} latent channels carry keys and values"
        if host.portable:
            note += "; one makes the norm of latents nearly constant"
        elif constant:
            note += f"; {constant} {'holds a constant' if constant == 1 else 'hold constants'} for the norm of {host.name}"
        yield note + (f"; {zeros} are zero, as --pad-rank allows" if zeros else "")
        yield from host.notes(self.family)
        if (form := target.rounding) and form.precise and (count := spec.count_precise(form)):
            yield f"{form.name} keeps the layers that copy in {form.precise.name}: {count} of {spec.num_layers}"
        if target.freqfold > 1:
            yield f"inexact at any rank: {target.freqfold} neighbouring frequencies are taken for one"
        if rank % RANK_STEP:
            yield f"rank {rank} is not a multiple of {RANK_STEP}: on NVIDIA GPUs plain torch decodes it, not kvfold's kernel"
        held = spec.bytes_per_token(target.cache_dtype or self.dtype, self.context)
        if held >= self.before.bytes_per_token(source.dtype, self.context):
            yield "the cache is not smaller than the source's"
