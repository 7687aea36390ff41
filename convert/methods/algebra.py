"""The linear algebra that methods share, all in fp64."""

from __future__ import annotations

import torch


def augmented(rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[heads, D, E + 1]`: the bias as the weight of a constant input."""
    rows = rows.double()
    return torch.cat((rows, torch.zeros_like(rows[..., :1]) if bias is None else bias.double()[..., None]), -1)


def floored(weights: torch.Tensor, share: float) -> torch.Tensor:
    """Weights of which none is below a share of the largest, to be divided by; ones where all are zero."""
    largest = weights.max()
    return weights.clamp_min(share * largest) if largest > 0 else torch.ones_like(weights)


def roots(moments: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The roots of positive `[n, D, D]` matrices, and the roots' inverses.

    Eigenvalues are floored at a share of the largest of all, so that a matrix of zeros weighs next to nothing.
    """
    values, vectors = torch.linalg.eigh(moments)
    values = floored(values, share).sqrt()
    return (vectors * values[:, None]) @ vectors.mT, (vectors / values[:, None]) @ vectors.mT


def leading_subspace(rows: torch.Tensor, second: torch.Tensor | None, rank: int) -> torch.Tensor:
    """Orthonormal `[n, rank]` whose projection keeps most of rows·x, by E|projection|².

    One eigendecomposition of the smaller Gram matrix, n × n or E × E; in the second case one QR of `[n, rank]` as well, and
    one more eigendecomposition if `second` is singular.

    Args:
        rows: `[n, E]`.
        second: `[E, E]`, E[x xᵀ]; None for the identity. It may be singular: nothing is divided by it.
        rank: At most min(n, E).

    Returns:
        In fp32.
    """
    rows = rows.double()
    if rows.shape[0] <= rows.shape[1]:
        return leading(rows @ rows.T if second is None else rows @ second.to(rows) @ rows.T, rank).float()
    # The n × n Gram matrix A Aᵀ, for A = rows·L with second = L Lᵀ, has the spectrum of the E × E matrix Aᵀ A.
    images = rows if second is None else rows @ root(second.to(rows))
    images = images @ leading(images.T @ images, rank)
    return torch.linalg.qr(images).Q.float()


def leading(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Eigenvectors of the `rank` largest eigenvalues, as columns, largest first, each with a sign of its own choice fixed."""
    return fix_signs(torch.linalg.eigh(gram).eigenvectors[..., -rank:].flip(-1))  # it reads one triangle alone


def fix_signs(vectors: torch.Tensor) -> torch.Tensor:
    """Columns turned so that their largest entry is real and positive: eigenvectors leave that open, and libraries differ."""
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * (largest.conj() / largest.abs().clamp_min(torch.finfo(torch.float64).tiny))


def root(second: torch.Tensor) -> torch.Tensor:
    """L with L Lᵀ = `second`, whose directions without energy get 1e-12 of the mean so that they have a place, the last.

    A second moment that is singular, or not even positive by the rounding of its sums, costs an eigendecomposition.
    """
    floor = (second.diagonal().mean() * 1e-12).clamp_min(torch.finfo(torch.float64).tiny)
    lower, failed = torch.linalg.cholesky_ex(second + floor * torch.eye(len(second)).to(second))
    if not failed:
        return lower
    values, vectors = torch.linalg.eigh(second)
    return vectors * values.clamp_min(floor).sqrt()
