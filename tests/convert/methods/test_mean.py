"""`mean`: the mean of adjacent heads."""

from __future__ import annotations

import torch
from merging import merge, record


def test_mean_is_the_mean_of_adjacent_heads() -> None:
    a = record(groups=4, norm="head")
    merged = merge("mean", a, 2)
    for name in ("k", "v", "k_bias", "v_bias"):
        rows = getattr(a, name)
        expected = torch.stack([(rows[0] + rows[1]) / 2, (rows[2] + rows[3]) / 2])
        assert torch.allclose(getattr(merged, name), expected, atol=1e-6), name
    assert torch.allclose(merged.k_norm.gain, a.k_norm.gain.unflatten(0, (2, 2)).mean(1))
