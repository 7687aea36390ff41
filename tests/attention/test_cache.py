"""What a layer of an encoded cache reads."""

from __future__ import annotations

import pytest
import torch

from attention.cache import EncodedLayer
from attention.encoding import decode, encode
from attention.errors import Refusal
from attention.formats import FORMATS

GROUPED = [name for name, form in FORMATS.items() if form.tokens]
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
