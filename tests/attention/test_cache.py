"""What a layer of an encoded cache holds and hands to attention.

A stored tensor passes for what it decodes to; attention with one query reads it a block of tokens at a time.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import SCALE, Sizes, added, on_gpu, ragged

from attention import kernels
from attention.cache import EncodedLayer, Stored
from attention.encoding import decode, encode, rounded
from attention.errors import Refusal
from attention.formats import FORMATS
from attention.kernels import torch_decode

HELD = [("fp8", False), ("int4", False), ("int3", True), ("mixed", True)]


@pytest.mark.parametrize("form", ["int4", "int3", "int2"])
def test_each_token_is_read_as_it_is_encoded_by_itself(form: str) -> None:
    """Known answer: heads in groups of 32 values, in the pass that writes them as well."""
    layer = EncodedLayer(FORMATS[form], latent=False)
    given = torch.randn(2, 1, 3, 9, 64, generator=torch.Generator().manual_seed(0))
    for end in (5, 8, 9):
        read = layer.update(*given[:, :, :, layer.get_seq_length() : end])
        for part, values in zip(read, given[:, :, :, :end], strict=True):
            assert torch.equal(part + 0, decode(encode(values, FORMATS[form], 32), FORMATS[form], 32, torch.float32))


@pytest.mark.parametrize("form", ["int4", "mixed"])
def test_a_latent_without_a_rope_key(form: str) -> None:
    layer, given = EncodedLayer(FORMATS[form], latent=True), (torch.ones(1, 1, 9, 16), torch.ones(1, 1, 9, 0))
    read = layer.update(*given)
    assert [part.shape for part in read] == [part.shape for part in given]
    assert torch.equal(read[0], rounded(given[0], FORMATS[form], "latent"))
    assert torch.equal(read[1], rounded(given[1], FORMATS[form], "rope"))


@pytest.mark.parametrize(("form", "latent"), HELD)
def test_memory_is_within_a_twentieth_of_what_is_stored(form: str, latent: bool) -> None:
    layer = EncodedLayer(FORMATS[form], latent)
    for new in torch.zeros(2, 1, 1, 6016, 16).split([6000, 13, 1, 1, 1], 3):
        layer.update(*new)
    held = sum(tensor.untyped_storage().nbytes() for part in layer.parts for tensor in part._held)
    assert layer.nbytes <= held <= 1.05 * layer.nbytes


@pytest.mark.parametrize(("form", "latent"), HELD)
@torch.no_grad()
def test_a_step_copies_nothing_but_its_token(form: str, latent: bool) -> None:
    layer, token = EncodedLayer(FORMATS[form], latent), torch.zeros(2, 1, 2, 1, 16)
    places = []
    for count in (40, 150):
        for _ in range(count):
            layer.update(*token)
        places.append([tensor.data_ptr() for part in layer.parts for tensor in part._held])
    assert places[0] == places[1]
    assert layer.get_seq_length() == 190


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_tensors_that_must_not_be_changed_are_replaced(form: str) -> None:
    """Those of inference mode outside of it, and those that gradients flow through."""
    given = torch.randn(2, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    layer = EncodedLayer(FORMATS[form], latent=True)
    with torch.inference_mode():
        layer.update(*given[..., :20, :])
    layer.update(*given[..., 20:30, :])
    read = layer.update(*given[..., 30:, :].clone().requires_grad_())
    expected = EncodedLayer(FORMATS[form], latent=True).update(*given)
    assert all(torch.equal(one, other) for one, other in zip(read, expected, strict=True))


def test_a_beam_does_not_write_into_another() -> None:
    layer, token = EncodedLayer(FORMATS["int8"], latent=False), torch.ones(2, 1, 2, 1, 16)
    layer.update(*token)
    layer.batch_select_indices(slice(0, 1))  # type: ignore[arg-type]  # a view, which shares memory
    other = copy.deepcopy(layer)
    layer.update(*token)
    read, _ = other.update(*2 * token)
    assert read[0, 0, :, 0].tolist() == [1, 2]
    assert layer.update(*token)[0][0, 0, :, 0].tolist() == [1, 1, 1]


FORMS = [name for name, form in FORMATS.items() if form.bits < 64 and not form.classes]
CASES = [*((form, False) for form in FORMS), ("int4", True), ("fp8", True), ("mixed", True)]
LONG = 75  # tokens


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def stored(form: str, latent: bool = False, dtype: torch.dtype = torch.float64, batch: int = 2) -> tuple[Any, ...]:
    """Both parts of a cache after several passes, the last of one token."""
    layer, groups, sizes = EncodedLayer(FORMATS[form], latent), *((1, (80, 32)) if latent else (2, (32, 64)))
    given = [draw(batch, groups, LONG, size, seed=size, dtype=dtype) for size in sizes]
    for one, other in zip(*(part.split([32, 32, 10, 1], 2) for part in given), strict=True):
        read = layer.update(one, other)
    assert all(isinstance(part, Stored) for part in read)
    return read


def call(form: str, latent: bool, dtype: torch.dtype = torch.float64, batch: int = 2) -> tuple[Any, ...]:
    """Queries, and both parts of a cache, as `attention.kernels` takes them."""
    sizes = (80, 32) if latent else (32,)
    return *(draw(batch, 6, 1, size, seed=2, dtype=dtype) for size in sizes), *stored(form, latent, dtype, batch)


def expected(tensors: tuple[Any, ...], mask: torch.Tensor | None) -> torch.Tensor:
    """In fp64, over all of the cache, decoded."""
    wide = [t.cached.block(0, LONG, torch.float64) if isinstance(t, Stored) else t.double() for t in tensors]
    if len(tensors) == 4:
        return torch_decode.decode(*wide[:2], wide[2][:, 0], wide[3][:, 0], mask, SCALE)
    return torch_decode.decode_grouped(*wide, mask, SCALE)


def by_torch(latent: bool) -> Callable[..., torch.Tensor]:
    return torch_decode.decode if latent else torch_decode.decode_grouped


@pytest.mark.parametrize(("form", "latent"), [case for case in CASES if FORMATS[case[0]].bits < 32])
def test_any_operation_computes_with_the_decoded_tensor(form: str, latent: bool) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    for part in stored(form, latent, torch.float32):
        whole = part.whole()
        assert (part.shape, part.dtype, part.device, part.stride()) == (whole.shape, whole.dtype, whole.device, whole.stride())
        assert not isinstance(whole, Stored)
        for found, wanted in (
            (part + 1, whole + 1),
            (part[:, 0], whole[:, 0]),
            (part.transpose(1, 2).reshape(-1), whole.transpose(1, 2).reshape(-1)),
            (torch.cat([part, part], 2), torch.cat([whole, whole], 2)),
            (attend(part, part, part), attend(whole, whole, whole)),
        ):
            assert type(found) is torch.Tensor
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(("form", "latent"), CASES)
def test_blocks_give_what_decoding_it_whole_gives(form: str, latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, seen = call(form, latent, batch=3), ragged(3, LONG, holes=0.3, seed=4).cpu()
    seen[..., -1] = True
    masks = [None, seen, added(seen), seen[:1]]
    if not latent:  # a number for each head
        masks.append(draw(3, 6, 1, LONG, seed=5).masked_fill(~seen, -torch.inf))
    for values in (1, 2**18):  # short blocks, and a single one
        monkeypatch.setattr(torch_decode, "_VALUES", {"cpu": values})
        for mask in masks:
            wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
            found = by_torch(latent)(*tensors, mask, SCALE)
            torch.testing.assert_close(found, expected(tensors, wide), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_that_of_the_queries(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are in float32, whatever the model's dtype."""
    monkeypatch.setattr(torch_decode, "_VALUES", {"cpu": 1})
    query, *both = call("int4", False, dtype)
    found = torch_decode.decode_grouped(query, *both, None, SCALE)
    wide = [part.cached.block(0, LONG, torch.float32).double() for part in both]
    exact = torch_decode.decode_grouped(query.double(), *wide, None, SCALE)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_a_query_that_sees_nothing_is_zero_and_the_least_number_hides_nothing_alone() -> None:
    tensors, least = call("int8", True), torch.zeros(2, 1, 1, LONG).double()
    least[0], least[1, ..., :40] = torch.finfo(torch.float64).min, torch.finfo(torch.float64).min
    for mask in (torch.arange(2).bool()[:, None, None, None].expand(2, 1, 1, LONG), least):
        found = torch_decode.decode(*tensors, mask, SCALE)
        torch.testing.assert_close(found, expected(tensors, mask), rtol=0, atol=1e-12)
        assert bool(found[0].any()) == (mask is least)


@pytest.mark.parametrize(("form", "latent"), [("fp8", False), ("int4", True), ("mixed", True)])
def test_no_copy_of_the_whole_cache_is_made(form: str, latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_decode, "_VALUES", {"cpu": 1})
    tensors, sizes = call(form, latent, torch.float32, 1), list[int]()
    monkeypatch.setattr(Stored, "whole", None)
    with Sizes(sizes.append):
        by_torch(latent)(*tensors, None, SCALE)
    assert 32 * 80 <= max(sizes) < LONG * 80


def test_blocks_fit_a_cache() -> None:
    cpu = torch.device("cpu")
    for values in (1, 160, 2**20):
        tokens = torch_decode._tokens(values, cpu)
        assert tokens == 32 or tokens * values <= 2**18
    assert torch_decode._tokens(160, torch.device("meta")) > torch_decode._tokens(160, cpu)


@pytest.mark.parametrize("latent", [False, True])
def test_on_a_gpu_torch_reads_it_and_triton_refuses(latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    monkeypatch.setattr(kernels.triton_decode, "_TRITON", True)
    monkeypatch.setattr(kernels, "_warned", set())
    decode, tensors = kernels.decode if latent else kernels.decode_grouped, call("int8", latent, torch.float32)
    with kernels.watched() as seen, pytest.warns(RuntimeWarning, match="it reads no encoded cache"):
        assert torch.equal(decode(*tensors, None, SCALE), by_torch(latent)(*tensors, None, SCALE))
    assert list(seen) == ["torch"]
    with pytest.raises(Refusal, match="the triton backend cannot decode here: it reads no encoded cache"):
        decode(*tensors, None, SCALE, "triton")


def test_it_is_decoded_once_and_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    part, decoded = stored("int8")[1], []
    block = type(part.cached).block
    monkeypatch.setattr(type(part.cached), "block", lambda *arguments: decoded.append(arguments) or block(*arguments))
    assert (part.shape[2], part.ndim, repr(part)) == (LONG, 4, "Stored([2, 2, 75, 64], int8)")
    assert not decoded
    assert torch.equal(part * 2, part + part)
    assert len(decoded) == 1


@pytest.mark.parametrize("tokens", [1, 2])
def test_compiled_code_and_several_queries_get_it_decoded(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: tokens == 1)
    layer = EncodedLayer(FORMATS["int4"], latent=False)
    plain, given = EncodedLayer(FORMATS["float32"], latent=False), torch.randn(2, 1, 3, 1, 16)
    assert all(map(torch.equal, plain.update(*given), given)), "what needs no decoding is the tensor itself"
    for read in layer.update(*torch.randn(2, 1, 3, tokens, 16)):
        assert type(read) is torch.Tensor
        assert read.shape == (1, 3, tokens, 16)


def test_inference_mode_reads_it_as_well() -> None:
    with torch.inference_mode():
        first = stored("int4")[0]
        found = first @ first.mT
    assert torch.equal(found, first.whole() @ first.whole().mT)
