"""A stored tensor passes for what it decodes to, and only then is decoded."""

from __future__ import annotations

import pytest
import torch

from attention.cache import EncodedLayer
from attention.formats import FORMATS
from attention.stored import Stored

FORMS = [name for name, form in FORMATS.items() if form.bits < 32 and not form.classes]
CASES = [(form, False) for form in FORMS] + [("int4", True), ("mixed", True)]
LONG = 75  # tokens


def stored(form: str, latent: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Stored, Stored]:
    layer = EncodedLayer(FORMATS[form], latent)
    keys, values = torch.randn(2, 2, 1 if latent else 3, LONG, 16, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for one, other in zip(keys.split([32, 32, 10, 1], 2), values.split([32, 32, 10, 1], 2), strict=True):
        read = layer.update(one, other)
    return read


@pytest.mark.parametrize(("form", "latent"), CASES)
def test_any_operation_computes_with_the_decoded_tensor(form: str, latent: bool) -> None:
    for part in stored(form, latent):
        whole = part.whole()
        assert (part.shape, part.dtype, part.device, part.stride()) == (whole.shape, whole.dtype, whole.device, whole.stride())
        assert not isinstance(whole, Stored)
        for found, expected in (
            (part + 1, whole + 1),
            (part[:, 0], whole[:, 0]),
            (part.transpose(1, 2).reshape(-1), whole.transpose(1, 2).reshape(-1)),
            (torch.cat([part, part], 2), torch.cat([whole, whole], 2)),
            (torch.nn.functional.scaled_dot_product_attention(part, part, part), sdpa(whole)),
        ):
            assert type(found) is torch.Tensor
            assert torch.equal(found, expected)


def sdpa(whole: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(whole, whole, whole)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_are_those_of_the_whole(form: str) -> None:
    for part in stored(form, dtype=torch.float64):
        for start, end in ((0, 32), (31, 50), (64, LONG)):
            assert torch.equal(part.cached.block(start, end, torch.float64), part.whole()[:, :, start:end])


def test_it_is_decoded_once_and_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    part, decoded = stored("int8")[1], []
    block = type(part.cached).block
    monkeypatch.setattr(type(part.cached), "block", lambda *arguments: decoded.append(arguments) or block(*arguments))
    assert (part.shape[2], part.ndim, repr(part)) == (LONG, 4, "Stored([2, 3, 75, 16], int8)")
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
