"""One new token attends to its cache, by the fastest backend that can serve a call. This is the one place that chooses.

`decode` attends to a latent (MLA), `decode_grouped` to keys and values that query heads share (GQA, MQA). A backend of either
is one function of its signature, one that says why it cannot serve a call, and one entry of `LATENT` or `GROUPED`.

FlashMLA and FlashInfer are not among them. FlashMLA wants latent and rotary key joined, in pages of 64 tokens, and lengths in
place of a mask: the first means to copy the cache of transformers, the second cannot say that a prompt is padded on the left.
FlashInfer (0.7) reads the two apart, in pages that a static cache could be taken for, but plans on the host by lengths that it
copies from the device: anew for each step, and outside of CUDA graphs. Neither could be run here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from attention.errors import Refusal
from attention.kernels import torch_decode, triton_decode

Backend = Literal["auto", "triton", "torch"]


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
    if backend == "auto" and first is not None and not triton_decode.on_gpu(first):
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


def _nothing(*_: torch.Tensor | None) -> None:
    return None


LATENT: dict[str, Entry] = {
    "triton": Entry(triton_decode.mla, triton_decode.latent_objection),
    "torch": Entry(torch_decode.decode, _nothing),
}
GROUPED: dict[str, Entry] = {
    "triton": Entry(triton_decode.gqa, triton_decode.grouped_objection),
    "torch": Entry(torch_decode.decode_grouped, _nothing),
}
