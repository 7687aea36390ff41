"""What a layer of an encoded cache reads."""

from __future__ import annotations

import copy

import pytest
import torch

from attention.cache import EncodedLayer
from attention.encoding import decode, encode
from attention.formats import FORMATS

CASES = [("fp8", False), ("int4", False), ("int3", True), ("mixed", True)]


@pytest.mark.parametrize("form", ["int4", "int3", "int2"])
def test_each_token_is_read_as_it_is_encoded_by_itself(form: str) -> None:
    """Known answer: heads in groups of 32 values, in the pass that writes them as well."""
    layer = EncodedLayer(FORMATS[form], latent=False)
    given = torch.randn(2, 1, 3, 9, 64, generator=torch.Generator().manual_seed(0))
    for end in (5, 8, 9):
        read = layer.update(*given[:, :, :, layer.get_seq_length() : end])
        for part, values in zip(read, given[:, :, :, :end], strict=True):
            assert torch.equal(part + 0, decode(encode(values, FORMATS[form], 32), FORMATS[form], 32, torch.float32))


@pytest.mark.parametrize(("form", "latent"), CASES)
def test_memory_is_within_a_twentieth_of_what_is_stored(form: str, latent: bool) -> None:
    layer = EncodedLayer(FORMATS[form], latent)
    for new in torch.zeros(2, 1, 1, 6016, 16).split([6000, 13, 1, 1, 1], 3):
        layer.update(*new)
    held = sum(tensor.untyped_storage().nbytes() for part in layer.parts for tensor in part._held)
    assert layer.nbytes <= held <= 1.05 * layer.nbytes


@pytest.mark.parametrize(("form", "latent"), CASES)
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
