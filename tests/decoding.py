"""What tests of decoding kernels share: where they run, how exact they must be, ragged masks.

Kernels run in Triton's interpreter, on CPU tensors; with TRITON_INTERPRET=0 in the environment they are compiled for a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from attention.kernels import triton_decode
from attention.kernels.tiling import Tiling

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
