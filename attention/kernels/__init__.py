"""One new token attends to its cache, by the fastest backend that can serve a call. This is the one place that chooses.

`decode` attends to a latent (MLA), `decode_grouped` to keys and values that query heads share (GQA, MQA). A backend of either
is one function of its signature, one that says why it cannot serve a call, and one entry of `LATENT` or `GROUPED`.

FlashMLA and FlashInfer are not among them. FlashMLA wants latent and rotary key joined, in pages of 64 tokens, and lengths in
place of a mask: the first means to copy the cache of transformers, the second cannot say that a prompt is padded on the left.
FlashInfer (0.7) reads the two apart, in pages that a static cache could be taken for, but plans on the host by lengths that it
copies from the device: anew for each step, and outside of CUDA graphs. Neither could be run here.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

from attention.errors import Refusal
from attention.kernels import torch_decode
from attention.kernels.tiling import RANK_STEP, Shape, Tiling, choose, machine

Backend = Literal["auto", "triton", "torch"]

# Triton itself is imported by the first call that it serves. It reads its environment then, in the same way.
_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Entry:
    """A backend: what runs it, and `objection`, which says of tensors of one query why it cannot serve them, or None."""

    run: Callable[..., torch.Tensor]
    objection: Callable[..., str | None]


def decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention of H heads over one latent that is key and value of all.

    Several queries at once are the ordinary work of torch, whatever `backend` says, and so is everything on a CPU. Where
    torch has to serve a single query on a GPU in place of a faster backend, a warning says why, once for each reason.

    Args:
        q_latent: `[B, H, T, R]`, queries taken through W_UK.
        q_rope: `[B, H, T, P]`, turned.
        latent: `[B, S, R]`; with `k_rope`, read as it lies in the cache. Hidden tokens are multiplied by 0, and so must be
            finite; Triton alone does not read those outside the span from the first to the last that a request sees.
        k_rope: `[B, S, P]`, turned.
        mask: `[B or 1, 1, T, S]`: true where a token is seen, or a number added to the scores; or None.
        scaling: What scores are multiplied by.
        backend: A name in `LATENT`, or "auto": the first of them that can.

    Returns:
        `[B, H, T, R]`, the mean latent each query sees; zero where it sees nothing at all.

    Raises:
        Refusal: `backend` is not one, or cannot serve this call; or the mask is for another number of tokens.
    """
    _check_mask(mask, latent.shape[1])
    check(backend)
    tensors = q_latent, q_rope, latent, k_rope, mask
    if q_latent.shape[2] != 1:
        _note("torch", None)
        return LATENT["torch"].run(*tensors, scaling)
    return _serve(LATENT, tensors, scaling, backend)


def decode_grouped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention of one query a head, where H / G heads in a row share a KV head, whose keys and values are not repeated.

    Args:
        query: `[B, H, 1, D]`.
        keys: `[B, G, S, D]`; with `values`, read as it lies in the cache. Of hidden tokens the same holds as in `decode`.
        values: `[B, G, S, Dv]`.
        mask: `[B or 1, 1 or H, 1, S]`: true where a token is seen, or a number added to the scores; or None.
        scaling: What scores are multiplied by.
        backend: A name in `GROUPED`, or "auto": the first of them that can, as in `decode`.

    Returns:
        `[B, H, 1, Dv]`. Where a query sees nothing at all it is zero with Triton, with torch what torch makes of it.

    Raises:
        Refusal: As `decode`.
    """
    _check_mask(mask, keys.shape[2])
    check(backend)
    return _serve(GROUPED, (query, keys, values, mask), scaling, backend)


def _check_mask(mask: torch.Tensor | None, cached: int) -> None:
    if mask is not None and mask.shape[-1] != cached:
        raise Refusal(
            f"cannot attend with a mask over {mask.shape[-1]} tokens to a cache of {cached}: they must be as many",
            "let transformers make the mask, or give one of shape [B, 1, T, S] over the whole cache",
        )


def _serve(
    entries: Mapping[str, Entry], tensors: tuple[torch.Tensor | None, ...], scaling: float, backend: str
) -> torch.Tensor:
    first = tensors[0]
    if backend == "auto" and first is not None and not on_gpu(first):
        _note("torch", None)
        return entries["torch"].run(*tensors, scaling)
    warned = None
    for name, entry in entries.items():
        if backend not in ("auto", name):
            continue
        reason = entry.objection(*tensors)
        if reason is None:
            _note(name, warned)
            return entry.run(*tensors, scaling)
        if backend == name:
            raise Refusal(f"the {name} backend cannot decode here: {reason}", 'leave the choice to backend="auto"')
        warned = f"decoding without the {name} backend: {reason}"
        _warn(warned)
    raise AssertionError("torch objects to nothing")


def check(backend: str) -> None:
    """Whether `backend` is one that `decode` and `decode_grouped` take.

    Raises:
        Refusal: It is not.
    """
    if backend != "auto" and backend not in LATENT:
        raise Refusal(f"there is no backend {backend!r}: it must be one of 'auto', {', '.join(map(repr, LATENT))}")


def on_gpu(tensor: torch.Tensor) -> bool:
    """Apart, so that tests can have tensors pass for those of a GPU."""
    return tensor.is_cuda


_watching: list[dict[str, str | None]] = []


@contextmanager
def watched() -> Iterator[dict[str, str | None]]:
    """Names of the backends that serve either function within the block, each with the warning that it came with, or None.

    Calls that torch.compile has made are not seen.
    """
    seen: dict[str, str | None] = {}
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.pop()


def _note(name: str, warned: str | None) -> None:
    if not torch.compiler.is_compiling():
        for seen in _watching:
            seen[name] = warned


_warned: set[str] = set()


# Compiled code warns when it is traced.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _latent_objection(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
) -> str | None:
    heads, rank, rope = q_latent.shape[1], latent.shape[2], k_rope.shape[2]
    if reason := _objection((q_latent, q_rope, latent, k_rope), latent, k_rope, mask):
        return reason
    if rank % RANK_STEP or not rank or not rope:
        return f"it takes a latent rank that is a multiple of {RANK_STEP} and a rotary key, not {rank} + {rope}"
    return _machine_objection(*_constants(heads, rank, rope), None, *_kinds(latent, mask))


def _grouped_objection(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> str | None:
    (batch, groups, _, dim), rank = keys.shape, values.shape[3]
    if reason := _objection((query, keys, values), values, keys, mask):
        return reason
    if rank % RANK_STEP or not rank or not dim:
        return f"it takes heads whose values are a multiple of {RANK_STEP}, not {rank}"
    if batch > 1 and groups > 1 and any(cached.stride(0) != groups * cached.stride(1) for cached in (keys, values)):
        return "the KV heads of a sequence do not lie next to those of the one before"
    return _machine_objection(*_constants(query.shape[1] // groups, rank, dim, groups), *_kinds(values, mask))


def _objection(
    tensors: tuple[torch.Tensor, ...], values: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None
) -> str | None:
    """What Triton has against either kind of call, whose `tensors` are `values` and `keys` of the cache beside others."""
    if not _TRITON:
        return "Triton is not installed"
    if not on_gpu(values) and not (_INTERPRETED and values.device.type == "cpu"):
        return f"it needs tensors on a CUDA device, and these are on {values.device.type}"
    if any(tensor.device != values.device for tensor in (*tensors, *(() if mask is None else (mask,)))):
        places = ", ".join(str(tensor.device) for tensor in tensors) + ("" if mask is None else f" and {mask.device}")
        return f"it takes tensors on one device, and these are on {places}"
    if values.dtype not in _DTYPES or any(tensor.dtype != values.dtype for tensor in tensors):
        return f"it takes float16, bfloat16 or float32, all alike, not {', '.join(str(t.dtype)[6:] for t in tensors)}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "it has no gradients, and some are asked for (use torch.no_grad())"
    if values.stride(-1) != 1 or keys.stride(-1) != 1:
        return f"the cached values of a token do not lie side by side (strides {values.stride(-1)} and {keys.stride(-1)})"
    if mask is not None and mask.shape[:-1] not in ((1, 1, 1), (len(values), 1, 1)):
        return f"it takes a mask [{len(values)} or 1, 1, 1, S], not one of shape {list(mask.shape)}"
    if mask is not None and mask.dtype not in (torch.bool, *_DTYPES):
        return f"it takes masks of bool, float16, bfloat16 or float32, not {str(mask.dtype)[6:]}"
    return None


def _constants(*sizes: int) -> tuple[int, ...]:
    """Numbers that code compiled for any size is to be compiled for: the length of a range has to be known to it."""
    return tuple(len(range(size)) for size in sizes)


def _kinds(cached: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.dtype, torch.dtype | None, bool, str]:
    return cached.dtype, None if mask is None else mask.dtype, on_gpu(cached), str(cached.device)


# Facts about the machine: compiled code need not find them out again.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _machine_objection(
    heads: int,
    rank: int,
    rope: int,
    groups: int | None,
    dtype: torch.dtype,
    mask: torch.dtype | None,
    cuda: bool,
    device: str,
) -> str | None:
    if cuda and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    tiling = choose(heads, rank, rope, dtype.itemsize, machine(torch.device(device)))
    if tiling is None:
        size = dtype.itemsize
        return f"two tiles of rank {rank} + {rope}, {size} bytes a value, do not fit into the shared memory of this GPU"
    return None if _INTERPRETED else _failure(Shape(heads, rank, rope, groups, dtype, mask), tiling, device)


@cache
def _failure(shape: Shape, tiling: Tiling, device: str) -> str | None:
    """Why the kernel cannot be had on `device`, found by building it: a launch that fails would end the whole model.

    Whoever captures a CUDA graph or lets torch.compile trace has it built by then, outside of both.
    """
    try:
        from attention.kernels.split_kv import build

        with torch.cuda.device(device):
            build(shape, tiling)
    except Exception as error:  # of Triton, of compilers it calls, of the driver: no class is common to them
        # A full GPU says nothing about the kernel, and may have room the next time.
        if "out of memory" in str(error):
            raise
        return f"Triton cannot build it here: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


# Operators of their own: compiled code takes them as they are, and need not look into Triton's launches.
@torch.library.custom_op("kvfold::mla_decode", mutates_args=())
def _mla(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    from attention.kernels.mla_decode import mla_decode

    return mla_decode(q_latent, q_rope, latent, k_rope, mask, scaling)


@_mla.register_fake
def _(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    return q_latent.new_empty(q_latent.shape)


@torch.library.custom_op("kvfold::gqa_decode", mutates_args=())
def _gqa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    from attention.kernels.gqa_decode import gqa_decode

    return gqa_decode(query, keys, values, mask, scaling)


@_gqa.register_fake
def _(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], values.shape[3]))


def _nothing(*_: torch.Tensor | None) -> None:
    return None


LATENT: dict[str, Entry] = {
    "triton": Entry(_mla, _latent_objection),
    "torch": Entry(torch_decode.decode, _nothing),
}
GROUPED: dict[str, Entry] = {
    "triton": Entry(_gqa, _grouped_objection),
    "torch": Entry(torch_decode.decode_grouped, _nothing),
}
