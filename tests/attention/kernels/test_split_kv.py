"""The kernel over encoded caches against attention spelled out over what they decode to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding import DEVICE, INTERPRETER, SCALE, SMALL, TOLERANCE, added, agree, ragged
from rows import rows

pytest.importorskip("triton")  # there are no wheels for other systems than Linux

from attention.cache import EncodedLayer
from attention.formats import FORMATS
from attention.kernels import decode, decode_grouped, torch_decode, trial
from attention.kernels.operators import gqa_decode, mla_decode
from attention.kernels.tiling import Shape
from attention.stored import Stored

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETER and not torch.cuda.is_available(), reason="needs a GPU, or the interpreter"),
]

FORMS = [name for name, form in FORMATS.items() if form.bits < 32 and not (form.steps or form.classes)]  # refused
PAIRS = rows([(form, dtype) for dtype in TOLERANCE for form in FORMS if form != str(dtype)[6:]], [torch.float32])
SWAPPED = replace(SMALL, swap=True, block_n=32)
LONG = 75  # tokens


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def stored(form: str, keys: torch.Tensor, values: torch.Tensor, latent: bool) -> tuple[Stored, Stored]:
    """Both as a cache has them after several passes, the last of one token."""
    layer = EncodedLayer(FORMATS[form], latent)
    for one, other in zip(keys.split([LONG - 1, 1], 2), values.split([LONG - 1, 1], 2), strict=True):
        read = layer.update(one, other)
    assert all(isinstance(part, Stored) for part in read)
    return read


def exactly(part: Stored) -> torch.Tensor:
    return part.cached.block(0, part.shape[2], torch.float64)


def masks(batch: int, cached: int = LONG) -> list[torch.Tensor | None]:
    seen = ragged(batch, cached, holes=0.3, seed=4)
    seen[..., -1] = True
    return [None, seen, added(seen)]


def latents(form: str, rank: int, rope: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    q, r = draw(batch, 5, 1, rank, seed=2, dtype=dtype), draw(batch, 5, 1, rope, seed=3, dtype=dtype)
    return q, r, *stored(form, draw(batch, 1, LONG, rank, dtype=dtype), draw(batch, 1, LONG, rope, seed=1, dtype=dtype), True)


def heads(form: str, dim: int, rank: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    cached = draw(batch, 2, LONG, dim, dtype=dtype), draw(batch, 2, LONG, rank, seed=1, dtype=dtype)
    return draw(batch, 6, 1, dim, seed=2, dtype=dtype), *stored(form, *cached, False)


@pytest.mark.parametrize(("rank", "rope"), rows([(16, 8), (80, 32), (160, 32), (320, 64)], [(160, 32)]))
@pytest.mark.parametrize(("form", "dtype"), PAIRS, ids=str)
@pytest.mark.usefixtures("poison")
def test_every_format_of_a_latent(form: str, rank: int, rope: int, dtype: torch.dtype) -> None:
    q, r, latent, k_rope = latents(form, rank, rope, dtype=dtype)
    for mask, sizes in zip(masks(2), (SMALL, SWAPPED, SMALL), strict=True):
        wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
        expected = torch_decode.decode(q.double(), r.double(), exactly(latent)[:, 0], exactly(k_rope)[:, 0], wide, SCALE)
        assert agree(mla_decode(q, r, latent, k_rope, mask, SCALE, sizes), expected)


@pytest.mark.parametrize(("dim", "rank"), rows([(16, 16), (64, 64), (80, 96), (128, 128)], [(80, 96)]))
@pytest.mark.parametrize(("form", "dtype"), PAIRS, ids=str)
@pytest.mark.usefixtures("poison")
def test_every_format_of_heads(form: str, dim: int, rank: int, dtype: torch.dtype) -> None:
    q, k, v = heads(form, dim, rank, dtype=dtype)
    for mask, sizes in zip(masks(2), (SMALL, SWAPPED, SMALL), strict=True):
        wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
        expected = torch_decode.decode_grouped(q.double(), exactly(k), exactly(v), wide, SCALE)
        assert agree(gqa_decode(q, k, v, mask, SCALE, sizes), expected)


@pytest.mark.parametrize("form", rows(FORMS, ["fp8", "int4"]))
def test_the_chosen_sizes_serve_them(form: str) -> None:
    q, r, latent, k_rope = latents(form, 48, 16)
    expected = torch_decode.decode(q.double(), r.double(), exactly(latent)[:, 0], exactly(k_rope)[:, 0], None, SCALE)
    assert agree(decode(q, r, latent, k_rope, None, SCALE, "triton"), expected)
    q, k, v = heads(form, 24, 48)
    expected = torch_decode.decode_grouped(q.double(), exactly(k), exactly(v), None, SCALE)
    assert agree(decode_grouped(q, k, v, None, SCALE, "triton"), expected)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_a_number_stays_so(form: str) -> None:
    keys, values = draw(1, 1, 1, LONG, 16), draw(1, 1, LONG, 16, seed=1)
    values[..., 3, 5] = torch.nan
    found = gqa_decode(draw(1, 2, 1, 16), *stored(form, keys[0], values, False), None, SCALE, SMALL)
    assert found[..., 5].isnan().all()


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("form", rows(FORMS, ["fp8", "int4"]))
def test_a_trial_finds_the_kernel_right(form: str, groups: int | None) -> None:
    shape = Shape(3, 48, 24, groups, torch.float32, torch.bool, FORMATS[form])
    assert 0 < trial.deviation(shape, DEVICE) < trial.tolerance(torch.float32)
