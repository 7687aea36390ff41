"""What methods share of linear algebra: leading subspaces, and signs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import random

from convert.methods.algebra import fix_signs, leading_subspace


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), width=st.integers(1, 12), weighted=st.booleans(), data=st.data())
def test_the_leading_subspace_keeps_as_much_as_any(count: int, width: int, weighted: bool, data: Any) -> None:
    rank = data.draw(st.integers(1, min(count, width)))
    rows, root = random(count, width), random(width, width, seed=1).double()
    found = leading_subspace(rows, root @ root.T if weighted else None, rank).double()
    assert found.shape == (count, rank)
    torch.testing.assert_close(found.T @ found, torch.eye(rank).double(), rtol=1e-5, atol=1e-5)
    images = rows.double() @ root if weighted else rows.double()
    kept = (found.T @ images).square().sum()
    assert float(kept) == pytest.approx(float(torch.linalg.svdvals(images)[:rank].square().sum()), rel=1e-5)


def test_signs_are_fixed_by_the_largest_entry() -> None:
    vectors = torch.linalg.qr(torch.complex(random(5, 5), random(5, 5, seed=1)).to(torch.complex128)).Q
    rotated = vectors * torch.exp(1j * random(5, seed=2).double())
    found = fix_signs(rotated)
    torch.testing.assert_close(found, fix_signs(vectors), rtol=1e-12, atol=1e-12)
    largest = found.gather(0, found.abs().argmax(0, keepdim=True))[0]
    assert (largest.real > 0).all()
    assert largest.imag.abs().max() < 1e-12
    torch.testing.assert_close(found.abs(), vectors.abs(), rtol=1e-12, atol=1e-12)
    assert torch.isfinite(torch.view_as_real(fix_signs(torch.zeros(3, 2, dtype=torch.complex128)))).all()
