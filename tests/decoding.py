"""What tests of decoding kernels share: where they run, how exact they must be, ragged masks.

Kernels run in Triton's interpreter, on CPU tensors; with TRITON_INTERPRET=0 in the environment they are compiled for a GPU.
"""

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention.kernels import decode, decode_grouped, torch_decode, triton_decode
from attention.kernels.tiling import Tiling
from attention.kernels.triton_decode import gqa_decode, mla_decode

INTERPRETER = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cpu" if INTERPRETER else "cuda"
SCALE = 0.3
# fp32 adds up in another order than fp64 does, on a GPU one product after the other. Rounding inputs to half precision is not
# part of the error, rounding of probabilities and outputs is: half an ulp of each, 2⁻¹¹ in fp16 and 2⁻⁸ in bf16 (whose
# products the interpreter cannot do).
TOLERANCE = {torch.float32: 2e-6 if INTERPRETER else 1e-5, torch.float16: 1e-3}
TOLERANCE |= {} if INTERPRETER else {torch.bfloat16: 8e-3}
SMALL = Tiling(block_h=16, block_n=16, stages=2, warps=4, programs=3, least=1)


def agree(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> bool:
    """Finite, as close as its dtype allows as a whole, head by head in direction, and in the largest deviation."""
    assert found.shape == expected.shape
    bound = TOLERANCE[found.dtype] if tolerance is None else tolerance
    cosine = torch.nn.functional.cosine_similarity(found.double(), expected, -1)
    aligned = bool((1 - cosine)[expected.any(-1)].abs().max() <= bound) if bool(expected.any()) else True
    largest = float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    off = float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))
    return bool(found.isfinite().all()) and off <= bound and aligned and largest <= 4 * bound


def ragged(batch: int, cached: int, seed: int = 0, holes: float = 0.0) -> torch.Tensor:
    """Left padding, a tail that is not filled yet, holes; `[B, 1, 1, S]`, true where a token is seen."""
    generator = torch.Generator().manual_seed(seed)
    first, end = torch.randint(0, cached + 1, (2, batch, 1), generator=generator).sort(0).values
    columns = torch.arange(cached)
    mask = (columns >= first) & (columns < end) & (torch.rand(batch, cached, generator=generator) >= holes)
    return mask[:, None, None].to(DEVICE)


def added(mask: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers to add to scores, −∞ where `mask` does not see."""
    bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(9)).to(mask.device)
    return torch.where(mask, bias, -torch.inf).to(dtype)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Tensors pass for those of a GPU."""
    monkeypatch.setattr(triton_decode, "on_gpu", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


def spelled_out(*call: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """One head of one query at a time, over the tokens it sees and no others, in fp64; zero where it sees none.

    Of queries, keys and values `[B, G, S, D]`, or of both parts of queries, a latent and its RoPE key `[B, S, R]`.
    """
    if len(call) == 4:
        q_latent, q_rope, latent, k_rope = call
        call = torch.cat((q_latent, q_rope), -1), torch.cat((latent, k_rope), -1)[:, None], latent[:, None]
    q, k, v = call
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    for b, t in itertools.product(range(len(q)), range(q.shape[2])):
        row = None if mask is None else mask.expand(len(q), -1, -1, -1)[b, 0, t]
        seen = torch.arange(k.shape[2], device=q.device)
        if row is not None:
            seen = (row if row.dtype == torch.bool else row > -torch.inf).nonzero()[:, 0]
        for h in range(q.shape[1]) if len(seen) else ():
            group = h // (q.shape[1] // k.shape[1])
            scores = SCALE * (k[b, group, seen].double() @ q[b, h, t].double())
            if row is not None and row.dtype != torch.bool:
                scores = scores + row[seen].double()
            out[b, h, t] = scores.softmax(0) @ v[b, group, seen].double()
    return out


def latents(
    batch: int, heads: int, cached: int, rank: int, rope: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Both parts of queries, a latent and its RoPE key."""
    return _drawn([(batch, heads, 1, rank), (batch, heads, 1, rope), (batch, cached, rank), (batch, cached, rope)], dtype, seed)


def grouped(
    batch: int, heads: int, groups: int, cached: int, dim: int, rank: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values."""
    return _drawn([(batch, heads, 1, dim), (batch, groups, cached, dim), (batch, groups, cached, rank)], dtype, 0)


def _drawn(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)


class Sizes(TorchDispatchMode):
    """Tells how many floating values each operation makes."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype in (torch.float32, torch.float64) and not made._is_view():
            self.tell(made.numel())
        return made


class Kind(NamedTuple):
    """What decodes one of both kinds of caches.

    Attributes:
        decode: Chooses who does.
        by_torch: In torch.
        served: Whom it calls: the name of `by_torch`, and of the operator.
        operator: In Triton, without its checks.
        call: Tensors for it: of a batch, so many cached tokens, and a dtype; with 3 query heads for each KV head.
        groups: KV heads of these; None of a latent.
    """

    decode: Callable[..., torch.Tensor]
    by_torch: Callable[..., torch.Tensor]
    served: tuple[str, str]
    operator: Callable[..., torch.Tensor]
    call: Callable[..., tuple[torch.Tensor, ...]]
    groups: int | None


def _of_latent(batch: int, cached: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return latents(batch, 3, cached, 32, 16, dtype)


def _of_heads(batch: int, cached: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return grouped(batch, 6, 2, cached, 24, 32, dtype)


KINDS: dict[str, Kind] = {
    "latent": Kind(decode, torch_decode.decode, ("decode", "mla"), mla_decode, _of_latent, None),
    "heads": Kind(decode_grouped, torch_decode.decode_grouped, ("decode_grouped", "gqa"), gqa_decode, _of_heads, 2),
}
