"""Attention over the cached latent, by the fastest backend that can serve a call. This is the one place that chooses.

A backend is one file and one entry of `BACKENDS`: a function of the signature of `decode`, and one that says why it cannot
serve a call. FlashMLA and FlashInfer are not among them: the former wants latent and rotary key joined in pages of 64 tokens,
the latter both in pages and only 512 + 64, and transformers caches two separate tensors without pages, so that either
would have to copy the cache; neither could be run here either.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

from attention.errors import Refusal
from attention.kernels import torch_decode
from attention.kernels.tiling import RANK_STEP, Tiling, choose, machine

Backend = Literal["auto", "triton", "torch"]
Decode = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float],
    torch.Tensor,
]
Objection = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], str | None]

# Triton itself is imported by the first call that it serves. It reads its environment then, in the same way.
_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Entry:
    """A backend: what runs it, and `objection`, which says why it cannot serve a call of one query, or None."""

    run: Decode
    objection: Objection


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
        backend: A name in `BACKENDS`, or "auto": the first of them that can.

    Returns:
        `[B, H, T, R]`, the mean latent each query sees; zero where it sees nothing at all.

    Raises:
        Refusal: `backend` is not one, or cannot serve this call; or the mask is for another number of tokens.
    """
    if mask is not None and mask.shape[-1] != latent.shape[1]:
        raise Refusal(
            f"cannot attend with a mask over {mask.shape[-1]} tokens to a cache of {latent.shape[1]}: they must be as many",
            "let transformers make the mask, or give one of shape [B, 1, T, S] over the whole cache",
        )
    check(backend)
    if q_latent.shape[2] != 1 or (backend == "auto" and not _on_gpu(latent)):
        _note("torch", None)
        return BACKENDS["torch"].run(q_latent, q_rope, latent, k_rope, mask, scaling)
    warned = None
    for name, entry in BACKENDS.items():
        if backend not in ("auto", name):
            continue
        reason = entry.objection(q_latent, q_rope, latent, k_rope, mask)
        if reason is None:
            _note(name, warned)
            return entry.run(q_latent, q_rope, latent, k_rope, mask, scaling)
        if backend == name:
            raise Refusal(f"the {name} backend cannot decode here: {reason}", 'leave the choice to backend="auto"')
        warned = f"decoding without the {name} backend: {reason}"
        _warn(warned)
    raise AssertionError("torch objects to nothing")


def check(backend: str) -> None:
    """Whether `backend` is one that `decode` takes.

    Raises:
        Refusal: It is not.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise Refusal(f"there is no backend {backend!r}: it must be one of 'auto', {', '.join(map(repr, BACKENDS))}")


# Apart, so that tests can have tensors pass for those of a GPU.
def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


_watching: list[dict[str, str | None]] = []


@contextmanager
def watched() -> Iterator[dict[str, str | None]]:
    """Names of the backends that serve `decode` within the block, each with the warning that it came with, or None.

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


def _triton_objection(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
) -> str | None:
    tensors = (q_latent, q_rope, latent, k_rope)
    heads, rank, rope = q_latent.shape[1], latent.shape[2], k_rope.shape[2]
    if not _TRITON:
        return "Triton is not installed"
    if not _on_gpu(latent) and not (_INTERPRETED and latent.device.type == "cpu"):
        return f"it needs tensors on a CUDA device, and these are on {latent.device.type}"
    if any(tensor.device != latent.device for tensor in (*tensors, *(() if mask is None else (mask,)))):
        places = ", ".join(str(tensor.device) for tensor in tensors) + ("" if mask is None else f" and {mask.device}")
        return f"it takes tensors on one device, and these are on {places}"
    if latent.dtype not in _DTYPES or any(tensor.dtype != latent.dtype for tensor in tensors):
        return f"it takes float16, bfloat16 or float32, all alike, not {', '.join(str(t.dtype)[6:] for t in tensors)}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "it has no gradients, and some are asked for (use torch.no_grad())"
    if rank % RANK_STEP or not rank or not rope:
        return f"it takes a latent rank that is a multiple of {RANK_STEP} and a rotary key, not {rank} + {rope}"
    if latent.stride(2) != 1 or k_rope.stride(2) != 1:
        return f"the cached values of a token do not lie side by side (strides {latent.stride(2)} and {k_rope.stride(2)})"
    if mask is not None and mask.shape[:-1] not in ((1, 1, 1), (len(latent), 1, 1)):
        return f"it takes a mask [{len(latent)} or 1, 1, 1, S], not one of shape {list(mask.shape)}"
    if mask is not None and mask.dtype not in (torch.bool, *_DTYPES):
        return f"it takes masks of bool, float16, bfloat16 or float32, not {str(mask.dtype)[6:]}"
    of = None if mask is None else mask.dtype
    return _machine_objection(heads, rank, rope, latent.dtype, of, _on_gpu(latent), str(latent.device))


# Facts about the machine: compiled code need not find them out again.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _machine_objection(
    heads: int, rank: int, rope: int, dtype: torch.dtype, mask: torch.dtype | None, cuda: bool, device: str
) -> str | None:
    if cuda and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    tiling = choose(heads, rank, rope, dtype.itemsize, machine(torch.device(device)))
    if tiling is None:
        size = dtype.itemsize
        return f"two tiles of rank {rank} + {rope}, {size} bytes a value, do not fit into the shared memory of this GPU"
    return None if _INTERPRETED else _failure(heads, rank, rope, dtype, mask, tiling, device)


@cache
def _failure(
    heads: int, rank: int, rope: int, dtype: torch.dtype, mask: torch.dtype | None, tiling: Tiling, device: str
) -> str | None:
    """Why the kernel cannot be had on `device`, found by building it: a launch that fails would end the whole model.

    Whoever captures a CUDA graph or lets torch.compile trace has it built by then, outside of both.
    """
    try:
        from attention.kernels.mla_decode import build

        with torch.cuda.device(device):
            build(heads, rank, rope, dtype, mask, tiling)
    except Exception as error:  # of Triton, of compilers it calls, of the driver: no class is common to them
        # A full GPU says nothing about the kernel, and may have room the next time.
        if "out of memory" in str(error):
            raise
        return f"Triton cannot build it here: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


# An operator of its own: compiled code takes it as it is, and need not look into Triton's launches.
@torch.library.custom_op("kvfold::mla_decode", mutates_args=())
def _triton(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    from attention.kernels.mla_decode import mla_decode

    return mla_decode(q_latent, q_rope, latent, k_rope, mask, scaling)


@_triton.register_fake
def _(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    return q_latent.new_empty(q_latent.shape)


BACKENDS: dict[str, Entry] = {
    "triton": Entry(_triton, _triton_objection),
    "torch": Entry(torch_decode.decode, lambda *_: None),
}
