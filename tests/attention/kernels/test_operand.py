"""What kernels are given of a cache: where it lies, and which part means what."""

from __future__ import annotations

import pytest
import torch

from attention.cache import EncodedLayer
from attention.encoding import Encoded, decode
from attention.formats import FORMATS
from attention.kernels.operand import operand, parts
from attention.stored import Stored

FORMS = [name for name, form in FORMATS.items() if form.bits < 32 and not (form.steps or form.classes)]  # refused


def stored(form: str, latent: bool, length: int) -> tuple[Stored, Stored]:
    layer = EncodedLayer(FORMATS[form], latent)
    given = torch.randn(2, 2, 1 if latent else 3, length, 16, generator=torch.Generator().manual_seed(0))
    for token in given.split(1, 3):
        read = layer.update(*token)
    return read


@pytest.mark.parametrize("length", [1, 75])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_it_holds_all_that_is_cached(form: str, latent: bool, length: int) -> None:
    for part in stored(form, latent, length):
        found, whole = operand(part), part.whole().flatten(0, 1)
        assert (found.tokens, found.size) == (length, 16)
        if found.kind == "rows":
            encoded = Encoded(found.codes, found.scales, found.offsets)
            assert torch.equal(decode(encoded, FORMATS[form], found.group, torch.float32), whole)
        else:
            codes = found.codes.view(torch.float8_e4m3fn) if found.kind == "fp8" else found.codes
            assert torch.equal(codes.float(), whole)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_copied(form: str) -> None:
    for part in stored(form, False, 75):
        found = operand(part)
        assert [each.data_ptr() for each in found[:3] if each is not None] == [each.data_ptr() for each in parts(part)]


def test_a_tensor_is_itself() -> None:
    plain = torch.randn(2, 3, 5, 16)
    found = operand(plain)
    assert (found.kind, found.tokens, found.size) == ("plain", 5, 16)
    assert torch.equal(found.codes, plain.flatten(0, 1))
    assert parts(plain) == [plain]
