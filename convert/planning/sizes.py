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
from convert.planning.budget import LatentBounds, fold_of, format_of, layer_ranks
from convert.planning.targets import LatentTarget

if TYPE_CHECKING:
    from convert.hosts import Host
    from convert.hosts.engines import Engine
    from convert.methods.latent import LatentMethod

AUTO = "auto"


@dataclass(frozen=True)
class LatentSize:
    """The size of a latent that the user asks for: rank and rotary dims, or a budget.

    Attributes:
        kv_lora_rank: R, or None.
        qk_rope_head_dim: P, or None.
        kv_share: A share of the source's KV cache, or None.
        kv_bytes: Bytes per token in all layers, or None.
        pad_rank: Whether the rank may exceed full rank, with channels of zeros.
        portable: Whether engines' own DeepSeek classes have to run the result.
        per_layer_ranks: Whether the text chooses the rank of each layer, in the bytes of R everywhere.
        cache_dtype: The format of the cache that the result is for; None for the dtype of its weights, and `AUTO` for the one
            of `budget.FORMATS`.
    """

    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    kv_share: float | None = None
    kv_bytes: int | None = None
    pad_rank: bool = False
    portable: bool = False
    per_layer_ranks: bool = False
    cache_dtype: str | None = None


@dataclass(frozen=True)
class Sizing(LatentBounds):
    """The targets that a request allows.

    Attributes:
        method: The conversion's method.
        engine: The engine that has to run the result, or None.
        dtype: The dtype of the result's weights.
    """

    method: LatentMethod
    engine: Engine | None
    dtype: str

    def target(self, request: LatentSize) -> LatentTarget:
        """The target of a request.

        Raises:
            Refusal: There is none, or the source has that size already.
        """
        few_sizes = self.engine is not None and bool(self.engine.latents)
        padded = request.pad_rank or (few_sizes and request.kv_lora_rank is None)
        by_rule = request.cache_dtype == AUTO
        if by_rule:
            request = replace(request, cache_dtype=self._format(request))
        rank, rope_dim = self._numbers(request)
        target = self._target(replace(request, kv_lora_rank=rank, qk_rope_head_dim=rope_dim, pad_rank=padded))
        if by_rule:
            target = replace(target, notes=(*target.notes, self._format_note(target)))
        if target.spec == target.before and target.rounding is not None:
            raise Refusal(
                f"{self.source.reference} is {target.spec.kind} already: a conversion to that size copies it, for any cache",
                hint=f"train it for such a cache with `convert heal --teacher MODEL --cache-dtype {target.cache_dtype}`, or "
                "give a smaller size",
            )
        return target

    @property
    def context(self) -> int:
        """The tokens of a sequence at which budgets count."""
        return self.source.longest_context

    def _format(self, request: LatentSize) -> str | None:
        """The format of `--cache-dtype auto`."""
        if request.kv_share is None and request.kv_bytes is None:
            raise Refusal(
                "--cache-dtype auto chooses the format of a budget",
                hint="give --kv-budget, or name a format with --cache-dtype",
            )
        if request.kv_share is None:
            budget, whole = self._budget(request)
            share = budget / whole
        else:
            share = request.kv_share
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

    def _budget(self, request: LatentSize) -> tuple[float, float]:
        """The bytes per token of a budget, and those of the source's cache."""
        whole = self.before.bytes_per_token(self.source.dtype, self.context)
        budget: float = (request.kv_share or 0.0) * whole if request.kv_bytes is None else request.kv_bytes
        budget = int(budget) if isinstance(whole, int) else budget
        if budget > whole:
            of = f"{self.source.reference}{self.before.at_context(self.context)}"
            raise Refusal(f"a budget of {budget:.0f} bytes per token exceeds the {whole:.0f} of {of}: nothing to save")
        return budget, whole

    def _numbers(self, request: LatentSize) -> tuple[int, int]:
        """R and P, as given or of a budget."""
        given = (request.kv_lora_rank, request.qk_rope_head_dim)
        rotates = self.rotary_dim > 0
        if request.kv_share is None and request.kv_bytes is None:
            if request.kv_lora_rank is None or (rotates and request.qk_rope_head_dim is None):
                raise Refusal(f"give --kv-lora-rank{' and --qk-rope-head-dim' if rotates else ''}, or --kv-budget")
            return request.kv_lora_rank, request.qk_rope_head_dim or 0
        if given != (None, None):
            raise Refusal("give either --kv-budget or --kv-lora-rank and --qk-rope-head-dim, not both")
        if request.pad_rank:
            raise Refusal(
                "give either --kv-budget or --pad-rank: a budget never goes beyond full size, where there is nothing to pad",
                hint="for channels of zeros give --kv-lora-rank and --qk-rope-head-dim",
            )
        budget, _ = self._budget(request)
        return self._of_budget(budget, request.cache_dtype or self.dtype)

    def _of_budget(self, budget: float, form: str) -> tuple[int, int]:
        """R and P of a budget of bytes per token in all layers, for a cache in that format."""
        step, held = format_named(form).multiple, sum(self.before.tokens_held(self.context))
        values = int(budget * 8 * self.context // (held * format_named(form).bits))
        if self.engine and self.engine.latents:  # it takes a few sizes only
            return self.engine.fitting(values)
        fewest = min(self.most_rotary_dims, max(2, step)) if self.rotary_dim else 0
        least = self.before.latent(-(-self.with_reserved(1) // step) * step, fewest)
        # Refuses a model whose rotary dims are too few for the format.
        least_bytes = math.ceil(least.bytes_per_token(form, self.context))
        try:
            while True:
                if found := self._within(*self.for_budget(values, self.method.folds), budget, form):
                    return found
                values -= 1
        except Refusal as error:
            raise Refusal(
                f"a budget of {budget:.0f} bytes per token is too small for any rank: {error}",
                hint=f"the least is {least_bytes} bytes per token{least.at_context(self.context)} in {form}, "
                "and little is left of a model there",
            ) from None

    def _within(self, rank: int, rope_dim: int, budget: float, form: str) -> tuple[int, int] | None:
        """R and P of as many numbers or less that the format takes, if their cache keeps to a budget of bytes per token.

        P is rounded up, as far as there are rotary dims.
        """
        step = format_named(form).multiple
        kept = -(-rope_dim // step) * step
        kept = kept if kept <= self.most_rotary_dims else rope_dim // step * step
        rank = (rank + rope_dim - kept) // step * step
        if rank < 1 or (rope_dim and not kept):
            return None
        held = self.before.latent(rank, kept).bytes_per_token(form, self.context)
        return (rank, kept) if held <= budget else None

    def _target(self, request: LatentSize) -> LatentTarget:
        """The target of a request that has both numbers."""
        host, before = self.host, self.before
        rank, rope_dim = request.kv_lora_rank or 0, request.qk_rope_head_dim or 0
        self._check_rotary(rope_dim)
        spec = before.latent(rank, rope_dim)
        if self.engine and self.engine.query_latent(before):
            spec = replace(spec, q_lora_rank=self.source.decoder.hidden_size)
        self._check_kept(rope_dim)
        if request.per_layer_ranks:
            spec = replace(spec, layer_ranks=(rank,) * before.num_layers)
        full = self.full_rank(rope_dim)
        used = self._channels(rank, rope_dim, any_rank=request.pad_rank or spec == before)
        fold = fold_of(rope_dim, self.rotary_dim) if self.method.folds and self.rotary_dim else 1
        form = request.cache_dtype or self.dtype
        if host.portable and format_named(form).classes:
            raise Refusal(
                f"a portable result cannot be made for {form}: its norm reads all channels, so that none may have fewer bits",
                hint="use int4 or q4_0, or leave out --portable",
            )
        ranks = layer_ranks(rank, full, format_named(form).multiple) if request.per_layer_ranks else ()
        spec.bytes_per_token(form)  # refuses what the format does not take
        format_named(form).require("latent", *ranks)
        target = LatentTarget(
            before=before,
            spec=spec,
            method=self.method,
            host=host,
            channels=used,
            freqfold=fold,
            pad_rank=request.pad_rank,
            ranks=ranks,
            cache_dtype=request.cache_dtype,
        )
        return replace(target, notes=tuple(self._notes(target)))

    def _check_rotary(self, rope_dim: int) -> None:
        """Refuse a RoPE key where nothing rotates, and none where something does."""
        reference, rotates = self.source.reference, self.rotary_dim > 0
        if rope_dim and not rotates:
            raise Refusal(
                f"{reference} has no RoPE, so it has no RoPE key of {rope_dim} dims: all of its keys go into the latent",
                hint="leave out --qk-rope-head-dim",
            )
        if rotates and rope_dim < 2:
            raise Refusal(
                f"cannot keep {rope_dim} rotary dims of {reference}: where keys rotate, a RoPE key needs at least 2",
                hint="give --qk-rope-head-dim 2 or more",
            )

    def _check_kept(self, rope_dim: int) -> None:
        """Refuse more dims than rotate, and frequencies that the output class cannot keep."""
        rotary, most = self.rotary_dim, self.most_rotary_dims
        if rope_dim > most:
            why = f"of each key's {self.before.head_dim} dims only {rotary} have RoPE, which makes {most}"
            if self.host.portable:
                why = f"a portable result keeps each of its {most // 2} frequencies once, which makes at most {most}"
            raise Refusal(f"cannot keep {rope_dim} rotary dims of {self.source.reference}: {why}")
        if self.host.portable and self.method.folds and rotary % rope_dim:
            raise Refusal(
                f"method {self.method.name} spreads {rope_dim} rotary dims evenly over {rotary}, which is not a geometric "
                "ladder of frequencies, as a portable result needs",
                hint=f"give a --qk-rope-head-dim that divides {rotary}",
            )

    def _channels(self, rank: int, rope_dim: int, any_rank: bool) -> int:
        """The channels that carry keys and values; refused if there are none, or more than full size.

        Args:
            rank: R.
            rope_dim: P.
            any_rank: Whether it may exceed full size, because it is padded, or the source's own.
        """
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
        spec, ranks, host, source = target.spec, target.ranks, self.host, self.source
        if target.copies:
            copied = "every tensor is copied bit for bit, unchanged"
            yield f"{spec.kind} is what the source has" + (f": {copied}" if self.dtype == source.dtype else "")
            return
        rank = spec.kv_lora_rank or 0
        if ranks:
            yield f"the text chooses the rank of each layer, {ranks[0]} to {ranks[-1]}, in the bytes of {rank} everywhere"
        else:
            yield _channels_note(rank, target.channels, host)
            yield from host.notes(self.family)
        if target.freqfold > 1:
            yield f"inexact at any rank: {target.freqfold} neighbouring frequencies are taken for one"
        if odd := [each for each in ranks or (rank,) if each % RANK_STEP]:
            which = f"rank {rank} is not a multiple" if odd == [rank] else "some of these ranks are not multiples"
            yield f"{which} of {RANK_STEP}: on NVIDIA GPUs plain torch decodes such layers, not kvfold's kernel"
        held = spec.bytes_per_token(target.cache_dtype or self.dtype, self.context)
        if held >= self.before.bytes_per_token(source.dtype, self.context):
            yield "the cache is not smaller than the source's"


def _channels_note(rank: int, used: int, host: Host) -> str:
    constant = host.reserved(rank)
    zeros = rank - used - constant
    note = f"{used} of {rank} latent channels carry keys and values"
    if host.portable:
        note += "; one makes the norm of latents nearly constant"
    elif constant:
        note += f"; {constant} {'holds a constant' if constant == 1 else 'hold constants'} for the norm of {host.name}"
    return note + (f"; {zeros} are zero, as --pad-rank allows" if zeros else "")
