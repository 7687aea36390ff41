"""Latents whose norm is nearly constant, for classes that normalise them and have no biases.

An RMSNorm divides a latent by its own size. Constants switch that off (`convert.families.latent`), and need biases. Without
them, the latent itself can be made to have nearly the same size for every token: the norm then divides by about one. Two things
are free. One more channel, w·x, is a least squares fit of 1 on x: w = Σ⁻¹ μ. And keys and values do not mind in which basis a
latent is stored: any map B of its channels is undone behind the norm. So c = (w; B D) x for a latent D x, with w and B such
that E_s (|c_s|² − 1)² is least. Tokens are weighed by the attention that they receive: many heads rest on a block's first
token, and what a token's |c| is off, its keys and values are off.

The fit runs in whitened coordinates, with a ridge on w and B. B grows by the directions that lower the error fastest. What keys
and values have in common for all tokens, the output's bias, rides on the combination of c / |c| that is nearest to constant.

Queries of such a class may read a latent that has a norm of its own: the input without the gains of its norm (`behind_norm`).
"""

from dataclasses import replace

import torch

from attention.forward import attention_received
from attention.record import Attention, FactoredAttention
from convert.methods.blocks import Blocks

_UNSEEN = 0.1  # of the mean importance: what tokens count that receive no attention in the sample
_FLOOR = 1e-4  # of the mean square of a channel of the input: the ridge of whitening
_RIDGE = 1e-3  # on w and B, in whitened coordinates
_LEAST = 1e-3  # of a channel's size in whitened coordinates: what is behind the norm makes up for it
_STEPS = 40
_NOTHING = 1e-6  # of the largest singular value


def with_constant_norm(before: Attention, after: FactoredAttention, sample: Blocks) -> FactoredAttention:
    """The same latent attention with one more channel, whose latent is divided by its norm, and without an output bias.

    Args:
        before: The source's record.
        after: The result's, whose latent nothing divides.
        sample: The layer's inputs.
    """
    blocks = [block.float() for block in sample.blocks]
    importance = torch.cat([attention_received(before, block) for block in blocks]) + _UNSEEN
    x, importance = torch.cat([block.x for block in blocks]), importance / importance.mean()
    down, back = _fitted(x, importance, after.down)
    constant = _nearest_to_one(x @ down.float().T, importance)
    up_k, up_v = (torch.nn.functional.pad((up.double() @ back).float(), (1, 0)) for up in (after.up_k, after.up_v))
    if after.o_bias is not None:
        up_v = up_v + _carrying(after.o, after.o_bias)[..., None] * constant
    return replace(after, down=down.float(), up_k=up_k, up_v=up_v, o_bias=None, normalised=True)


def _fitted(x: torch.Tensor, importance: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(w; B D) `[R + 1, E]`, and the inverse of B `[R, R]`, for inputs `[tokens, E]` and their importance, of mean one."""
    wide = x.double()
    second = wide.T @ (importance[:, None] * wide) / len(wide)
    floor = (_FLOOR * second.diagonal().mean()).clamp_min(torch.finfo(torch.float64).tiny)
    root = torch.linalg.cholesky(second + floor * torch.eye(len(second)).to(second))
    inputs = torch.linalg.solve_triangular(root, wide.T, upper=False).T  # whitened: their second moment is 1
    basis, triangle = torch.linalg.qr((down.double() @ root).T)
    one, mixing = _descended(inputs.float(), (inputs @ basis).float(), importance.float())
    energy, vectors = torch.linalg.eigh(mixing.T @ mixing)
    size = energy.clamp_min(_LEAST**2).sqrt()
    rows = torch.cat((one, size[:, None] * (vectors.T @ basis.T)))
    return torch.linalg.solve_triangular(root.T, rows.T, upper=True).T, triangle.T @ vectors / size


def _descended(inputs: torch.Tensor, latents: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The channel w `[1, E]`, and a matrix `[n, R]` with BᵀB as its square, in whitened coordinates, fp64."""
    mean = (importance[:, None] * inputs).mean(0)
    one = mean[None] / mean.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    one, mixing = _closer(inputs, latents, importance, one, latents.new_zeros(0, latents.shape[1]))
    while len(mixing) < latents.shape[1]:
        lacking = -importance * _excess(inputs, latents, one, mixing)
        gain, directions = torch.linalg.eigh(latents.T @ (lacking[:, None] * latents) / len(lacking))
        more = min(latents.shape[1] - len(mixing), max(4, len(mixing)))
        added = (directions[:, -more:] * gain[-more:].clamp_min(_NOTHING).sqrt()).T
        one, mixing = _closer(inputs, latents, importance, one, torch.cat((mixing, added)))
    return one.double(), mixing.double()


def _excess(inputs: torch.Tensor, latents: torch.Tensor, one: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """`[tokens]`, |c|² − 1."""
    return (inputs @ one.T).square().sum(1) + (latents @ mixing.T).square().sum(1) - 1


def _closer(
    inputs: torch.Tensor, latents: torch.Tensor, importance: torch.Tensor, one: torch.Tensor, mixing: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both after a few steps of L-BFGS."""
    found = one.clone().requires_grad_(True), mixing.clone().requires_grad_(bool(len(mixing)))
    search = torch.optim.LBFGS([part for part in found if part.requires_grad], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        ridge = sum((part.square().sum() for part in found), torch.zeros(()))
        total = (importance * _excess(inputs, latents, *found).square()).mean() + _RIDGE * ridge
        total.backward()
        return total

    with torch.enable_grad():
        search.step(loss)
    return found[0].detach(), found[1].detach()


def _nearest_to_one(latents: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """`[R]`, least squares of 1 on c / |c|."""
    unit = (latents / latents.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)).double()
    gram, mean = unit.T @ (importance[:, None] * unit), (importance[:, None] * unit).sum(0)
    return torch.linalg.solve(gram + _NOTHING * gram.trace() * torch.eye(len(gram)).to(gram), mean).float()


def _carrying(o: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The smallest values `[H, D]` that W_O `[E, H, D]` turns into the bias, as far as any do."""
    values = torch.linalg.pinv(o.double().flatten(1), rtol=_NOTHING) @ bias.double()
    return values.view(o.shape[1:]).float()


def behind_norm(record: FactoredAttention, gain: torch.Tensor, sample: Blocks) -> tuple[FactoredAttention, float]:
    """The record with queries that read the input without the gains of its RMSNorm: another norm changes next to nothing.

    Args:
        record: Its queries read the input, and have no biases.
        gain: `[E]`. A channel whose gain is zero is always zero, and left out.
        sample: The layer's inputs.

    Returns:
        The record, whose queries make up for the mean size of what they read, and how far tokens are from that size (root mean
        square).
    """
    # What bfloat16 holds, the other dtypes hold, too; queries make up for the rounding.
    down = torch.where(gain == 0, 0, 1 / gain).bfloat16().to(record.q_nope)
    sizes = torch.cat([(block.x.to(down) * down).square().mean(-1).sqrt() for block in sample.blocks])
    mean = sizes.square().mean().sqrt()
    scale = torch.where(down == 0, 0, mean / down)
    found = replace(record, q_nope=record.q_nope * scale, q_rope=record.q_rope * scale, q_down=down.diag())
    return found, float((sizes / mean - 1).square().mean().sqrt())
