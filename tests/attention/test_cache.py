"""What a layer of an encoded cache reads."""

from __future__ import annotations

import copy

import pytest
import torch

from attention.cache import EncodedLayer, _HeldGroups, _HeldRows
from attention.encoding import decode, encode
from attention.errors import Refusal
from attention.formats import FORMATS

GROUPED = [name for name, form in FORMATS.items() if form.tokens]
LOSSY = ["fp8", "int8", *GROUPED]
CASES = [(form, latent) for form in LOSSY for latent in (False, True)] + [("mixed", True)]
LONG = 75  # tokens: two full groups of keys and a part of one


@pytest.mark.parametrize("form", GROUPED)
def test_keys_are_read_encoded_once_their_group_is_behind(form: str) -> None:
    """Known answer: groups of 32 tokens per channel, the newest token's in full precision; values always encoded."""
    stored, layer = FORMATS[form], EncodedLayer(FORMATS[form], latent=False)
    keys, values = torch.randn(2, 1, 3, LONG, 16, generator=torch.Generator().manual_seed(0))
    for token in range(LONG):
        read, read_values = layer.update(keys[:, :, token : token + 1], values[:, :, token : token + 1])
        own = token // 32 * 32
        for start in range(0, own, 32):
            group = keys[:, :, start : start + 32].transpose(2, 3)
            expected = decode(encode(group, stored, 32), stored, 32, torch.float32).transpose(2, 3)
            assert torch.equal(read[:, :, start : start + 32], expected)
        assert torch.equal(read[:, :, own:], keys[:, :, own : token + 1])
    assert torch.equal(read_values, decode(encode(values, stored, 32), stored, 32, torch.float32))


def test_tokens_of_several_groups_are_refused() -> None:
    with pytest.raises(Refusal, match="takes tokens of one group of 32 at a time"):
        EncodedLayer(FORMATS["int4"], latent=False).update(torch.zeros(1, 2, 33, 8), torch.zeros(1, 2, 33, 8))


def held(layer: EncodedLayer) -> int:
    """Bytes of the memory behind all tensors of a layer."""
    found = {}
    for part in layer.parts:
        growing = part._encoded if isinstance(part, _HeldRows) else part._closed
        tensors = [*growing._held, *([part._opened] if isinstance(part, _HeldGroups) else [])]
        found |= {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


@pytest.mark.parametrize(("form", "latent"), CASES)
def test_memory_is_within_a_twentieth_of_what_is_stored(form: str, latent: bool) -> None:
    layer = EncodedLayer(FORMATS[form], latent)
    for new in torch.zeros(2, 1, 1, 6016, 16).split(32, 3):
        layer.update(*new)
    for _ in range(3):
        layer.update(*torch.zeros(2, 1, 1, 1, 16))
    assert layer.stored_bytes(4) <= held(layer) <= 1.05 * layer.stored_bytes(4)


def places(layer: EncodedLayer) -> list[int]:
    return [tensor.data_ptr() for part in layer.parts if isinstance(part, _HeldRows) for tensor in part._encoded._held]


@pytest.mark.parametrize(("form", "latent"), CASES)
@torch.no_grad()
def test_a_step_copies_nothing_but_its_token(form: str, latent: bool) -> None:
    layer, token = EncodedLayer(FORMATS[form], latent), torch.zeros(2, 1, 2, 1, 16)
    for _ in range(40):
        layer.update(*token)
    before = places(layer)
    for _ in range(150):
        layer.update(*token)
    assert places(layer) == before
    assert layer.get_seq_length() == 190


@pytest.mark.parametrize("form", LOSSY)
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
