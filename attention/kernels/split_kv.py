"""Split-KV decoding: one new query per request; all heads of a request share one read of its cache.

It serves two cache layouts. A latent (MLA) is the key and value of all heads, beside a rotary key: `mla_decode`. Keys and
values of a KV head (GQA, MQA) are separate, and serve the query heads of one group: `gqa_decode`. Either way a decode step
reads S (R + P) values per request and multiplies each by the query or the weight of every head. Below about 100 heads, a
GPU waits for memory, so the design minimises reads: each tile of a latent is loaded once and used for scores and for
outputs; the rank is split into chunks of powers of two from 64 on, so that 320 is 256 + 64 and not 512; the tokens that any
request sees, and no others, are divided evenly among as many programs as the GPU runs at once.

Hopper's wgmma reads tiles directly from shared memory and needs 64 rows in the first factor of a product. With fewer
heads, queries and probabilities have too few rows. Both products are then transposed (`Tiling.swap`): the rows are
64 tokens of a tile in the first, and 64 of its channels in the second.

Three launches: `_bounds` finds the first and the last token that a request sees; in `_attend` each program walks its
share of all tiles of all requests and writes one partial softmax for each request that it meets; `_combine`
merges the partials of a request. Nothing is copied to the CPU and no shape depends on a value, so the three can be
captured in a CUDA graph, and the same graph serves a static cache as it fills. The method is Flash-Decoding's
(https://pytorch.org/blog/flash-decoding); sharing one latent among all heads is DeepSeek-V2's (arXiv 2405.04434); dividing
tiles across request boundaries follows the tile schedulers of FlashMLA and stream-K (arXiv 2301.03598).

Importing this module imports Triton. Its interpreter runs the same kernels on CPU tensors if the environment has
TRITON_INTERPRET=1 before that; its sums are right, bf16 is not (products of bf16 are done in fp32, but rounded
wrongly). Letters as in `attention`; R is the rank of the latent, P its rotary dims; with separate keys and values, Dv and D.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from attention.kernels.tiling import Tiling, choose, machine, padded, power_of_two

_LOG2E = 1.4426950408889634
# The fewest mask rows per program of `_bounds`: as many rows as a warp has lanes cost as much as one row, and up to so
# many rows share one compiled kernel.
_ROWS = 32
_FEW = 8  # with so few requests each has a dozen partials or more


@triton.constexpr_function
def _chunks(padded):
    """How many powers of two add up to the padded rank."""
    return padded.bit_count()


@triton.constexpr_function
def _start(padded, chunk):
    """Where chunk number `chunk` begins: the widest come first, so that starts are multiples of their widths."""
    start = 0
    for _ in range(chunk):
        start += 1 << ((padded - start).bit_length() - 1)
    return start


@triton.constexpr_function
def _width(padded, chunk):
    for _ in range(chunk):
        padded -= 1 << (padded.bit_length() - 1)
    return 1 << (padded.bit_length() - 1)


@triton.constexpr_function
def _unseen(mask):
    """The value of a mask of this kind for a token that is not seen."""
    return 0 if mask == "bool" else float("-inf")


@triton.jit
def _sees(values, MASK: tl.constexpr):
    return values != 0 if MASK == "bool" else values > float("-inf")


@triton.jit
def _within(rows, columns, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Which of `rows [n, 1]`, and where the rank is padded, which of its columns are there to be read or written."""
    return rows if BLOCK_R == R else rows & (columns < R)


@triton.jit
def _product(a, b, sums, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """`sums` + a b; with SWAP `sums` and what is returned are transposed: sums + bᵀ aᵀ."""
    return tl.dot(tl.trans(b) if SWAP else a, tl.trans(a) if SWAP else b, sums, input_precision=PRECISION)


# Arguments derived from B and S change from call to call: their divisibility by 16 must not trigger a new compilation.
@triton.jit(do_not_specialize=["mask_b", "B", "S"])
def _bounds(mask, bounds, slots, mask_b, mask_s, B, S, GROUPS: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """`bounds [2, B]`: the first token that row b of the mask sees, and the one after the last; equal where it sees nothing.

    `slots [2, B · GROUPS]` becomes the empty range, for requests that no program will meet.
    """
    b = tl.program_id(0)
    for group in tl.static_range(GROUPS):
        tl.store(slots + b * GROUPS + group, 0)
        tl.store(slots + (B + b) * GROUPS + group, 0)
    if MASK == "none":
        tl.store(bounds + b, 0)
        tl.store(bounds + B + b, S)
    else:
        row = mask + b.to(tl.int64) * mask_b
        # One minimum and one maximum a lane, so that only the last step has lanes wait for each other.
        first = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        end = tl.zeros([BLOCK], tl.int32)
        for start in range(0, S, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            seen = _sees(tl.load(row + tokens.to(tl.int64) * mask_s, mask=tokens < S, other=_unseen(MASK)), MASK)
            first = tl.minimum(first, tl.where(seen, tokens, 0x7FFFFFFF))
            end = tl.maximum(end, tl.where(seen, tokens + 1, 0))
        last = tl.max(end, 0)
        tl.store(bounds + b, tl.minimum(tl.min(first, 0), last))
        tl.store(bounds + B + b, last)


@triton.jit
def _stand(tile, ends, bounds, B, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """Where in the walk tile number `tile` is; `ends [BLOCK_B]` are those of the rows of the mask.

    Returns:
        Its row; its request; the row's bounds; the number of the request's first tile, and of the one after its last.
    """
    seer = tl.sum((ends <= tile).to(tl.int32), 0)  # passes over rows that see nothing
    first, end = tl.load(bounds + seer), tl.load(bounds + B + seer)
    each = tl.cdiv(end - first, BLOCK_N)
    last = tl.sum(tl.where(tl.arange(0, BLOCK_B) == seer, ends, 0), 0)
    later = (last - 1 - tile) // each  # groups of this row that come after
    after = last - later * each
    return seer, seer * GROUPS + GROUPS - 1 - later, first, end, after - each, after


@triton.jit(do_not_specialize=["mask_b", "B", "PROGRAMS"])
def _attend(
    q_latent, q_rope, latent, k_rope, mask, bounds, slots, partial, tops, weights, scale,
    q_latent_b, q_latent_h, q_rope_b, q_rope_h, latent_b, latent_s: tl.constexpr, k_rope_b, k_rope_s: tl.constexpr,
    mask_b, mask_s, B, H, PROGRAMS, R: tl.constexpr, P: tl.constexpr, MASK: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_B: tl.constexpr,
    GROUPS: tl.constexpr, SHARED: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program's walk; partials are Σ p c `[slots, H, R]`, Σ p and what p is relative to, the highest score, `[slots, H]`.

    A request is a row of the mask, and of its GROUPS one; without SHARED the latent is value alone, and its keys are `k_rope`.
    The tiles of all requests, in their order, are dealt out in equal shares. Whole tiles leave some programs with one more than
    others whatever the rule: rounding the share up costs no time, and saves partials; a share below LEAST would cost more in
    partials than in reading. Programs and requests only go up along the walk, and each step ups one of them: so program +
    request is a slot that nobody else writes, and those of one request, from and to in `slots [2, B · GROUPS]`, are adjacent.

    The strides of tokens are known when this is compiled: addresses within a tile are then one number a thread and constants,
    and leave the registers to the sums.
    """
    program = tl.program_id(0)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    tokens = tl.arange(0, BLOCK_N)
    rope_dims = tl.arange(0, BLOCK_P)
    row = tl.arange(0, BLOCK_B)
    firsts = tl.load(bounds + row, mask=row < B, other=0)
    tiles = tl.cdiv(tl.load(bounds + B + row, mask=row < B, other=0) - firsts, BLOCK_N) * GROUPS
    ends = tl.cumsum(tiles, 0)  # where each row's tiles end in the walk
    total = tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(total, PROGRAMS), LEAST)
    tile = program * share
    stop = tl.minimum(tile + share, total)
    while tile < stop:
        seer, b, first, end, before, after = _stand(tile, ends, bounds, B, GROUPS, BLOCK_N, BLOCK_B)
        until = tl.minimum(stop, after)
        if tile == before:
            tl.store(slots + b, program + b)
            tl.store(slots + B * GROUPS + b, (after - 1) // share + b + 1)
        # A cache can have more than 2³¹ values: what grows with requests and tokens is counted in 64 bits.
        wide = b.to(tl.int64)
        queries = ()
        sums = ()
        for i in tl.static_range(_chunks(BLOCK_R)):
            columns = _start(BLOCK_R, i) + tl.arange(0, _width(BLOCK_R, i))
            if SHARED:
                pointer = q_latent + wide * q_latent_b + heads[:, None] * q_latent_h + columns
                q = tl.load(pointer, mask=_within(heads[:, None] < H, columns, R, BLOCK_R), other=0.0)
                queries = queries + (q.to(tl.float32) if UPCAST else q,)
            sums = sums + (tl.zeros([_width(BLOCK_R, i), BLOCK_H] if SWAP else [BLOCK_H, _width(BLOCK_R, i)], tl.float32),)
        pointer = q_rope + wide * q_rope_b + heads[:, None] * q_rope_h + rope_dims
        q = tl.load(pointer, mask=(heads[:, None] < H) & (rope_dims < P), other=0.0)
        q = q.to(tl.float32) if UPCAST else q
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_H], tl.float32)
        for start in range(first + (tile - before) * BLOCK_N, first + (until - before) * BLOCK_N, BLOCK_N):
            left = end - start
            at = tl.cast(start, tl.int64)
            cached = latent + wide * latent_b + at * latent_s
            known = tokens[:, None] < left
            seen = tokens < left
            # Asked for first, because single bytes are not prefetched as tiles are, and needed only after the scores.
            if MASK != "none":
                column = mask + seer.to(tl.int64) * mask_b + (start + tokens).to(tl.int64) * mask_s
                said = tl.load(column, mask=seen, other=_unseen(MASK))
                seen = _sees(said, MASK)
            scores = tl.zeros([BLOCK_N, BLOCK_H] if SWAP else [BLOCK_H, BLOCK_N], tl.float32)
            values = ()
            for i in tl.static_range(_chunks(BLOCK_R)):
                columns = _start(BLOCK_R, i) + tl.arange(0, _width(BLOCK_R, i))
                there = _within(known, columns, R, BLOCK_R)
                c = tl.load(cached + tokens[:, None] * latent_s + columns, mask=there, other=0.0)
                c = c.to(tl.float32) if UPCAST else c
                if SHARED:
                    scores = _product(queries[i], tl.trans(c), scores, SWAP, PRECISION)
                values = values + (c,)
            turned = k_rope + wide * k_rope_b + at * k_rope_s
            k = tl.load(turned + tokens[:, None] * k_rope_s + rope_dims, mask=_within(known, rope_dims, P, BLOCK_P), other=0.0)
            k = k.to(tl.float32) if UPCAST else k
            scores = _product(q, tl.trans(k), scores, SWAP, PRECISION)
            scores = (tl.trans(scores) if SWAP else scores) * scale
            if MASK == "additive":
                # The least finite number is how some say "not seen": in base 2 it must not become −∞.
                scores += (tl.maximum(said.to(tl.float32), -2e38) * 1.4426950408889634)[None, :]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(higher > float("-inf"), higher, 0.0)  # −∞ − −∞ is NaN
            rescale = tl.exp2(top - base)
            p = tl.exp2(scores - base[:, None])
            weight = weight * rescale + tl.sum(p, 1)
            p = p if UPCAST else p.to(q_rope.dtype.element_ty)
            grown = ()
            for i in tl.static_range(_chunks(BLOCK_R)):
                faded = sums[i] * (rescale[None, :] if SWAP else rescale[:, None])
                grown = grown + (_product(p, values[i], faded, SWAP, PRECISION),)
            sums = grown
            top = higher
        slot = (program + b).to(tl.int64) * H + heads
        tl.store(tops + slot, top, mask=heads < H)
        tl.store(weights + slot, weight, mask=heads < H)
        for i in tl.static_range(_chunks(BLOCK_R)):
            columns = _start(BLOCK_R, i) + tl.arange(0, _width(BLOCK_R, i))
            pointer = partial + slot[:, None] * R + columns
            found = tl.trans(sums[i]) if SWAP else sums[i]
            tl.store(pointer, found, mask=_within(heads[:, None] < H, columns, R, BLOCK_R))
        tile = until


@triton.jit(do_not_specialize=["B"])
def _combine(partial, tops, weights, slots, out, B, H, R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_SLOTS: tl.constexpr):
    """`out [B, H, R]`: all partials of a request as one softmax, zero where there are none.

    A softmax a lane of BLOCK_SLOTS, merged at the end: lanes wait for each other and for memory no more often than they must.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    lowest, upper = tl.load(slots + b), tl.load(slots + B + b)
    top = tl.full([BLOCK_SLOTS], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_SLOTS], tl.float32)
    sums = tl.zeros([BLOCK_SLOTS, BLOCK_R], tl.float32)
    for start in range(lowest, upper, BLOCK_SLOTS):
        slot = start + tl.arange(0, BLOCK_SLOTS)
        row = slot.to(tl.int64) * H + h
        there = (slot < upper)[:, None] & (columns < R)[None, :]
        summed = tl.load(partial + row[:, None] * R + columns, mask=there, other=0.0)
        highest = tl.load(tops + row, mask=slot < upper, other=float("-inf"))
        weighed = tl.load(weights + row, mask=slot < upper, other=0.0)
        higher = tl.maximum(top, highest)
        base = tl.where(higher > float("-inf"), higher, 0.0)
        old, new = tl.exp2(top - base), tl.exp2(highest - base)
        weight = weight * old + weighed * new
        sums = sums * old[:, None] + summed * new[:, None]
        top = higher
    highest = tl.max(top, 0)
    rescale = tl.exp2(top - tl.where(highest > float("-inf"), highest, 0.0))
    total = tl.sum(weight * rescale, 0)
    mean = tl.sum(sums * rescale[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + (b.to(tl.int64) * H + h) * R + columns, mean.to(out.dtype.element_ty), mask=columns < R)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run `kernel`. A function of its own, so that it can be replaced by one that only compiles."""
    kernel[grid](*arguments, **options)


def decode(
    q_latent: torch.Tensor | None,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    tiling: Tiling | None = None,
    groups: int = 1,
) -> torch.Tensor:
    """Attention of one query per head and request over the cache, without checks.

    Args:
        q_latent: `[B · GROUPS, H, 1, R]`, or None if the latent is only the value.
        q_rope: `[B · GROUPS, H, 1, P]`.
        latent: `[B · GROUPS, S, R]`, any strides but 1 in the last dim; R a multiple of 16.
        k_rope: `[B · GROUPS, S, P]`, likewise.
        mask: None, or bool or floating `[B or 1, 1, 1, S]` of any strides.
        scaling: The factor of the scores.
        tiling: Sizes of the launch; None for those that `attention.kernels.tiling` chooses.
        groups: How many consecutive requests share a row of the mask.

    Returns:
        `[B · GROUPS, H, 1, R]`, contiguous.
    """
    requests, heads, _, rope = q_rope.shape
    batch, cached, rank, device = requests // groups, latent.shape[1], latent.shape[2], q_rope.device
    tiling = tiling or choose(heads, rank, rope, q_rope.element_size(), machine(device))
    assert tiling is not None
    q_rope = q_rope if q_rope.stride(-1) == 1 else q_rope.contiguous()
    q_mixed = q_rope if q_latent is None else q_latent if q_latent.stride(-1) == 1 else q_latent.contiguous()
    out = torch.empty(requests, heads, 1, rank, dtype=q_rope.dtype, device=device)
    # The most partials there can be: all programs together walk from the first request to the last.
    count = tiling.programs + requests - 1
    partial = torch.empty(count, heads, rank, dtype=torch.float32, device=device)
    tops, weights = (torch.empty(count, heads, dtype=torch.float32, device=device) for _ in range(2))
    bounds, slots = (torch.empty(2, rows, dtype=torch.int32, device=device) for rows in (batch, requests))
    kind, mask_b, mask_s = "none", 0, 0
    if mask is not None:
        kind = "bool" if mask.dtype == torch.bool else "additive"
        mask = mask.expand(batch, -1, -1, -1)[:, 0, 0]
        mask = mask.view(torch.uint8) if kind == "bool" else mask
        mask_b, mask_s = mask.stride()
    launch(
        _bounds, (batch,), mask, bounds, slots, mask_b, mask_s, batch, cached,
        GROUPS=groups, MASK=kind, BLOCK=16384, num_warps=16,
    )  # fmt: skip
    launch(
        _attend, (tiling.programs, triton.cdiv(heads, tiling.block_h)),
        q_mixed, q_rope, latent, k_rope, mask, bounds, slots, partial, tops, weights, scaling * _LOG2E,
        q_mixed.stride(0), q_mixed.stride(1), q_rope.stride(0), q_rope.stride(1),
        *latent.stride()[:2], *k_rope.stride()[:2], mask_b, mask_s,
        batch, heads, tiling.programs, R=rank, P=rope, MASK=kind, LEAST=tiling.least,
        BLOCK_H=tiling.block_h, BLOCK_N=tiling.block_n, BLOCK_R=padded(rank), BLOCK_P=max(16, power_of_two(rope)),
        BLOCK_B=max(_ROWS, power_of_two(batch)), GROUPS=groups, SHARED=q_latent is not None, SWAP=tiling.swap,
        UPCAST=not isinstance(_attend, triton.JITFunction),  # the interpreter stores bf16 as bits and would multiply these
        PRECISION="ieee" if q_rope.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    # Many partials of few requests, or few partials of many: either way enough programs read them in one or two rounds.
    block_slots, block_r = (64, 64) if requests <= _FEW else (8, 512)
    block_r = min(block_r, power_of_two(rank))
    grid = requests, heads, triton.cdiv(rank, block_r)
    launch(
        _combine, grid, partial, tops, weights, slots, out, requests, heads, R=rank, BLOCK_R=block_r, BLOCK_SLOTS=block_slots
    )
    return out
