"""`first`: the first head of each group."""

from __future__ import annotations

import torch
from merging import merge, record


def test_first_takes_the_first_head_of_each_group() -> None:
    a = record(groups=4, norm="all")
    merged = merge("first", a, 2)
    for name in ("k", "v", "k_bias", "v_bias"):
        assert torch.equal(getattr(merged, name), getattr(a, name)[::2]), name
    assert torch.equal(merged.k_norm.gain, a.k_norm.gain[::2])
