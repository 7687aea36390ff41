"""Attention of one new token over its cache, by the fastest backend that can serve the call. Only this module chooses.

`decode` attends to a latent (MLA), `decode_grouped` to keys and values that query heads share (GQA, MQA).

FlashMLA and FlashInfer are not backends. FlashMLA wants latent and rotary key joined, in pages of 64 tokens, and lengths in
place of a mask: the first would copy the cache of transformers, the second cannot express that a prompt is padded on the left.
FlashInfer (0.7) reads the two separately, in pages like those of a static cache, but plans on the CPU by lengths that it
copies from the GPU: at every step, and outside of CUDA graphs. Neither has been run here.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

from attention.errors import Refusal
from attention.kernels import torch_decode, triton_decode

Backend = Literal["auto", "triton", "torch"]


def decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention of H heads over one latent, which is the key and the value of all heads.

    Torch serves several queries at once, whatever `backend` says, and everything on a CPU. Where
    torch has to serve a single query on a GPU because a faster backend cannot, a warning says why, once per reason.

    Args:
        q_latent: `[B, H, T, R]`, nope queries times W_UK.
        q_rope: `[B, H, T, P]`, rotated.
        latent: `[B, S, R]`; read from the cache in place, like `k_rope`. Masked tokens are multiplied by 0, so they must be
            finite; Triton only does not read tokens before the first or after the last that a request sees.
        k_rope: `[B, S, P]`, rotated. With one query, both may be `Stored` `[B, 1, S, …]`, which torch alone reads.
        mask: `[B or 1, 1, T, S]`: true where a token is seen, or a number added to the scores; or None.
        scaling: What scores are multiplied by.
        backend: "triton", "torch", or "auto" for the first of them that can serve the call.

    Returns:
        `[B, H, T, R]`, the mean latent that each query sees; zero if it sees no token.

    Raises:
        Refusal: `backend` is unknown or cannot serve this call, or the mask has another number of tokens.
    """
    tensors = q_latent, q_rope, latent, k_rope, mask
    return _serve(triton_decode.mla, triton_decode.latent_objection, torch_decode.decode, tensors, scaling, backend)


def decode_grouped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention of one query per head, where H / G consecutive heads share a KV head; keys and values are not repeated.

    Args:
        query: `[B, H, 1, D]`.
        keys: `[B, G, S, D]`; read from the cache in place, like `values`; both may be `Stored`, as in
            `decode`. Masked tokens must be finite.
        values: `[B, G, S, Dv]`.
        mask: `[B or 1, 1 or H, 1, S]`: true where a token is seen, or a number added to the scores; or None.
        scaling: What scores are multiplied by.
        backend: As in `decode`.

    Returns:
        `[B, H, 1, Dv]`. If a query sees no token, Triton gives zero, and torch whatever its own attention gives.

    Raises:
        Refusal: As in `decode`.
    """
    tensors = query, keys, values, mask
    return _serve(triton_decode.gqa, triton_decode.grouped_objection, torch_decode.decode_grouped, tensors, scaling, backend)


def _serve(
    kernel: Callable[..., torch.Tensor],
    objection: Callable[..., str | None],
    in_torch: Callable[..., torch.Tensor],
    tensors: tuple[Any, ...],
    scaling: float,
    backend: Backend,
) -> torch.Tensor:
    """Run a kernel, or the same in torch. `objection` says of `tensors` why the kernel cannot serve them, or None."""
    query, *_, cached, mask = tensors
    if mask is not None and mask.shape[-1] != cached.shape[-2]:
        raise Refusal(
            f"cannot attend with a mask over {mask.shape[-1]} tokens to a cache of {cached.shape[-2]}: they must be as many",
            "let transformers make the mask, or give one of shape [B, 1, T, S] over the whole cache",
        )
    check(backend)
    warned = None
    if query.shape[2] == 1 and (backend == "triton" or (backend == "auto" and triton_decode.on_gpu(query))):
        reason = objection(*tensors)
        if reason is None:
            _note("triton", None)
            return kernel(*tensors, scaling)
        if backend == "triton":
            raise Refusal(f"the triton backend cannot decode here: {reason}", 'leave the choice to backend="auto"')
        warned = f"decoding without the triton backend: {reason}"
        _warn(warned)
    _note("torch", warned)
    return in_torch(*tensors, scaling)


def check(backend: str) -> None:
    """Check that `backend` is one that `decode` and `decode_grouped` take.

    Raises:
        Refusal: It is not.
    """
    if backend not in get_args(Backend):
        raise Refusal(f"unknown backend {backend!r}: it must be one of {', '.join(map(repr, get_args(Backend)))}")


_watching: list[dict[str, str | None]] = []


@contextmanager
def watched() -> Iterator[dict[str, str | None]]:
    """The backends that serve either function within the block, by name, each with the warning that it gave, or None.

    Calls from compiled code are not recorded.
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


# Compiled code warns while it is traced.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
