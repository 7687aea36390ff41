"""Decoding over encoded caches, in torch and in Triton, against attention over what they decode to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding import DEVICE, INTERPRETER, SCALE, SMALL, TOLERANCE, added, agree, ragged
from rows import rows

pytest.importorskip("triton")  # there are no wheels for other systems than Linux

from attention.cache import EncodedLayer
from attention.encoding import Encoded, decode
from attention.formats import FORMATS
from attention.kernels import GROUPED, LATENT, torch_decode
from attention.kernels.operand import operand, parts
from attention.kernels.operators import gqa_decode, mla_decode
from attention.kernels.triton_decode import grouped_objection
from attention.stored import Stored

FORMS = [name for name, form in FORMATS.items() if form.bits < 64 and not form.classes]
CASES = [(form, latent) for form in FORMS for latent in (False, True)] + [("mixed", True)]
BY_TRITON = [form for form in FORMS if FORMATS[form].bits < 32 and not FORMATS[form].steps]
PAIRS = rows([(form, dtype) for dtype in TOLERANCE for form in BY_TRITON if form != str(dtype)[6:]], [torch.float32])
LONG = 75  # tokens


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cached(form: str, latent: bool, *given: torch.Tensor) -> tuple[Stored, ...]:
    """Both parts `[B, G, S, n]` as a cache has them after several passes, the last of one token."""
    layer = EncodedLayer(FORMATS[form], latent)
    for one, other in zip(*(part.split([32, 32, 10, 1], 2) for part in given), strict=True):
        read = layer.update(one, other)
    assert all(isinstance(part, Stored) for part in read)
    return read


def call(form: str, latent: bool, dtype: torch.dtype, batch: int = 2, device: str = "cpu") -> tuple[Any, ...]:
    """Queries, and both parts of a cache, as `attention.kernels` takes them."""
    groups, sizes = (1, (80, 32)) if latent else (2, (32, 64))
    given = [draw(batch, groups, LONG, size, seed=size, dtype=dtype).to(device) for size in sizes]
    queries = [draw(batch, 6, 1, size, seed=2, dtype=dtype).to(device) for size in (sizes if latent else sizes[:1])]
    return *queries, *cached(form, latent, *given)


def expected(tensors: tuple[Any, ...], mask: torch.Tensor | None) -> torch.Tensor:
    """In fp64, over all of the cache, decoded."""
    wide = [t.cached.block(0, LONG, torch.float64) if isinstance(t, Stored) else t.double() for t in tensors]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    if len(tensors) == 4:
        return torch_decode.decode(*wide[:2], wide[2][:, 0], wide[3][:, 0], mask, SCALE)
    return torch_decode.decode_grouped(*wide, mask, SCALE)


def masks(batch: int) -> list[torch.Tensor | None]:
    seen = ragged(batch, LONG, holes=0.3, seed=4)
    seen[..., -1] = True
    return [None, seen, added(seen), seen[:1]]


@pytest.mark.parametrize(("form", "latent"), CASES)
def test_blocks_give_what_decoding_it_whole_gives(form: str, latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch = (LATENT if latent else GROUPED)["torch"].run_stored
    tensors = call(form, latent, torch.float64, 3)
    seen = [None if mask is None else mask.cpu() for mask in masks(3)]
    if not latent:  # a number for each head
        seen.append(draw(3, 6, 1, LONG, seed=5).masked_fill(~seen[1], -torch.inf))
    for values in (1, 2**18):  # short blocks, and a single one
        monkeypatch.setattr(torch_decode, "_VALUES", {"cpu": values})
        for mask in seen:
            torch.testing.assert_close(by_torch(*tensors, mask, SCALE), expected(tensors, mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_that_of_the_queries(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are in float32, whatever the model's dtype."""
    monkeypatch.setattr(torch_decode, "_VALUES", {"cpu": 1})
    query, *both = call("int4", False, dtype)
    found = torch_decode.decode_grouped_stored(query, *both, None, SCALE)
    wide = [part.cached.block(0, LONG, torch.float32).double() for part in both]
    exact = torch_decode.decode_grouped(query.double(), *wide, None, SCALE)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_a_query_that_sees_nothing_is_zero_and_the_least_number_hides_nothing_alone() -> None:
    tensors, least = call("int8", True, torch.float64), torch.zeros(2, 1, 1, LONG).double()
    least[0], least[1, ..., :40] = torch.finfo(torch.float64).min, torch.finfo(torch.float64).min
    for mask in (torch.arange(2).bool()[:, None, None, None].expand(2, 1, 1, LONG), least):
        found = torch_decode.decode_stored(*tensors, mask, SCALE)
        torch.testing.assert_close(found, expected(tensors, mask), rtol=0, atol=1e-12)
        assert bool(found[0].any()) == (mask is least)


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Tells how many floating values each operation makes."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype in (torch.float32, torch.float64) and not made._is_view():
            self.tell(made.numel())
        return made


@pytest.mark.parametrize(("form", "latent"), [("fp8", False), ("int4", True), ("mixed", True)])
def test_no_copy_of_the_whole_cache_is_made(form: str, latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_decode, "_VALUES", {"cpu": 1})
    tensors, sizes = call(form, latent, torch.float32, 1), list[int]()
    monkeypatch.setattr(Stored, "whole", None)
    with Sizes(sizes.append):
        (LATENT if latent else GROUPED)["torch"].run_stored(*tensors, None, SCALE)
    assert 32 * 80 <= max(sizes) < LONG * 80


def test_blocks_fit_a_cache() -> None:
    cpu = torch.device("cpu")
    for values in (1, 160, 2**20):
        tokens = torch_decode._tokens(values, cpu)
        assert tokens == 32 or tokens * values <= 2**18
    assert torch_decode._tokens(160, torch.device("meta")) > torch_decode._tokens(160, cpu)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("form", BY_TRITON)
def test_what_kernels_get_holds_all_that_is_cached_and_is_no_copy(form: str, latent: bool) -> None:
    for part in call(form, latent, torch.float32)[-2:]:
        found, whole = operand(part), part.whole().flatten(0, 1)
        assert (found.tokens, found.size) == (LONG, whole.shape[-1])
        assert [each.data_ptr() for each in found[:3] if each is not None] == [each.data_ptr() for each in parts(part)]
        if found.kind == "rows":
            encoded = Encoded(found.codes, found.scales, found.offsets)
            assert torch.equal(decode(encoded, FORMATS[form], found.group, torch.float32), whole)
        else:
            codes = found.codes.view(torch.float8_e4m3fn) if found.kind == "fp8" else found.codes
            assert torch.equal(codes.float(), whole)


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "float64"])
def test_what_triton_does_not_read_is_left_to_torch(form: str) -> None:
    given = torch.randn(2, 1, 2, LONG, 64)
    query, both = torch.randn(1, 4, 1, 64), cached(form, False, *given)
    assert grouped_objection(query, *both, None) == f"it does not read a cache in {form}"


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETER and not torch.cuda.is_available(), reason="needs a GPU, or the interpreter")
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("form", "dtype"), PAIRS, ids=str)
@pytest.mark.usefixtures("poison")
def test_the_kernel_reads_every_format(form: str, dtype: torch.dtype, latent: bool) -> None:
    """And what is no number stays so."""
    tensors = call(form, latent, dtype, device=DEVICE)
    kernel = mla_decode if latent else gqa_decode
    for mask, tiling in zip(masks(2), (SMALL, replace(SMALL, swap=True, block_n=32), None), strict=False):
        assert agree(kernel(*tensors, mask, SCALE, tiling), expected(tensors, mask))
    given = draw(2, 1, 1, LONG, 16, dtype=dtype).to(DEVICE)
    given[1, ..., 3, 5] = torch.nan
    found = gqa_decode(draw(1, 2, 1, 16, dtype=dtype).to(DEVICE), *cached(form, False, *given), None, SCALE, SMALL)
    assert found[..., 5].isnan().all()
