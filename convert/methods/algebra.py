"""Linear algebra that several methods use, all in fp64."""

import torch


def augmented(rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`rows [heads, D, E]` with `bias [heads, D]` as one more column, the weight of a constant input: `[heads, D, E + 1]`."""
    rows = rows.double()
    return torch.cat((rows, torch.zeros_like(rows[..., :1]) if bias is None else bias.double()[..., None]), -1)


def floored(values: torch.Tensor, share: float) -> torch.Tensor:
    """Clamp `values` to at least `share` of the largest, so that one can divide by them; ones if all are zero."""
    largest = values.max()
    return values.clamp_min(share * largest) if largest > 0 else torch.ones_like(values)


def roots(moments: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Square roots of positive semidefinite `[n, D, D]` matrices, and the inverses of these roots.

    Eigenvalues are floored at `share` of the largest of all matrices, so that a zero matrix counts next to nothing.
    """
    values, vectors = torch.linalg.eigh(moments)
    values = floored(values, share).sqrt()
    return (vectors * values[:, None]) @ vectors.mT, (vectors / values[:, None]) @ vectors.mT


def leading_subspace(rows: torch.Tensor, second: torch.Tensor | None, rank: int) -> torch.Tensor:
    """The orthonormal columns `[n, rank]` onto which the projection of rows·x has the most energy, E|projection|².

    Costs one eigendecomposition of the smaller Gram matrix, n × n or E × E; if E × E, also one QR of `[n, rank]`, and
    one more eigendecomposition if `second` is singular.

    Args:
        rows: `[n, E]`.
        second: `[E, E]`, E[x xᵀ]; None for the identity. It may be singular: nothing is divided by it.
        rank: At most min(n, E).

    Returns:
        `[n, rank]`, fp32.
    """
    rows = rows.double()
    if rows.shape[0] <= rows.shape[1]:
        return leading(rows @ rows.T if second is None else rows @ second.to(rows) @ rows.T, rank).float()
    # The n × n Gram matrix A Aᵀ, for A = rows·L with second = L Lᵀ, has the spectrum of the E × E matrix Aᵀ A.
    images = rows if second is None else rows @ root(second.to(rows))
    images = images @ leading(images.T @ images, rank)
    return torch.linalg.qr(images).Q.float()


def leading(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Eigenvectors of the `rank` largest eigenvalues, as columns, largest first, with signs as `fix_signs` sets them."""
    return fix_signs(torch.linalg.eigh(gram).eigenvectors[..., -rank:].flip(-1))  # eigh reads one triangle only


def fix_signs(vectors: torch.Tensor) -> torch.Tensor:
    """Columns with their largest entry made real and positive: eigenvectors leave the phase open, and libraries differ."""
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * (largest.conj() / largest.abs().clamp_min(torch.finfo(torch.float64).tiny))


def root(second: torch.Tensor) -> torch.Tensor:
    """L with L Lᵀ = `second`. Directions without energy get 1e-12 of the mean, so that they exist and come last.

    If `second` is singular, or not positive because its sums were rounded, this costs an eigendecomposition.
    """
    floor = (second.diagonal().mean() * 1e-12).clamp_min(torch.finfo(torch.float64).tiny)
    lower, failed = torch.linalg.cholesky_ex(second + floor * torch.eye(len(second)).to(second))
    if not failed:
        return lower
    values, vectors = torch.linalg.eigh(second)
    return vectors * values.clamp_min(floor).sqrt()
