"""Latents that are divided by their norm: the same attention where the norm can be made constant, and close to it elsewhere."""

import dataclasses

import pytest
import torch
from records import blocks_of, factored, inputs, record

from attention.forward import attention_output, output_error
from attention.record import FactoredAttention
from convert.methods.blocks import Blocks
from convert.methods.portable_norm import with_constant_norm

WIDTH = 20


def latent(rank: int = 9, seed: int = 0, bias: bool = True) -> FactoredAttention:
    a = factored(4, 6, 2, rank, WIDTH, seed=seed)
    without = dataclasses.replace(a, q_nope_bias=None, q_rope_bias=None, k_rope_bias=None)
    return without if bias else dataclasses.replace(without, o_bias=None)


def beside_one(x: torch.Tensor) -> torch.Tensor:
    """The same inputs, of which a combination is one for every token."""
    direction = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(5))
    direction = direction / direction.norm()
    return x + (1 - x @ direction)[..., None] * direction


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_exact_where_a_constant_is_at_hand(bias: bool) -> None:
    a, x = latent(bias=bias), beside_one(inputs(WIDTH, tokens=64, blocks=8))
    found = with_constant_norm(record(2), a, Blocks.whole(x))
    assert found.normalised
    assert found.o_bias is None
    assert found.down.shape == (10, WIDTH)
    torch.testing.assert_close(found.latent(x).norm(dim=-1), torch.ones(8, 64))
    assert output_error(a, found, blocks_of(list(beside_one(inputs(WIDTH, tokens=50, blocks=2))))) < 1e-4


def error(a: FactoredAttention, x: torch.Tensor, on: torch.Tensor) -> float:
    return output_error(a, with_constant_norm(record(2), a, Blocks.whole(x)), blocks_of(list(on)))


def of_one_size(x: torch.Tensor) -> torch.Tensor:
    """As behind an RMSNorm."""
    return x / x.square().mean(-1, keepdim=True).sqrt()


def test_a_latent_that_holds_everything_is_made_constant() -> None:
    """Inputs of one size have a quadratic form that is constant, and a latent of full rank can hold it."""
    x, others = of_one_size(inputs(WIDTH, tokens=128, blocks=32)).split(16)
    errors = [error(latent(rank, bias=False), x, others) for rank in (4, 20)]
    assert errors[1] < min(1e-3, 0.01 * errors[0])


def test_more_text_is_better() -> None:
    x, others = of_one_size(inputs(WIDTH, tokens=64, blocks=64)).split(32)
    assert error(latent(8), x, others) < error(latent(8), x[:2], others)


def test_tokens_count_as_much_as_they_are_attended_to() -> None:
    """Where all heads rest on a block's first token, its norm is nearer to one than others'."""
    x = inputs(WIDTH, tokens=64, blocks=16)
    x[:, 0] = 3 * inputs(WIDTH, tokens=16, seed=40, blocks=1)[0]
    a = record(2, seed=1)
    resting = dataclasses.replace(a, q=a.q * 0, k=a.k * 0, q_bias=a.q_bias * 0 + 9, k_bias=a.k_bias * 0)  # type: ignore[operator]
    resting = dataclasses.replace(resting, k=resting.k + 0.3 * x[:, 0].mean(0), rotary=None)
    off = []
    for before in (resting, dataclasses.replace(a, q=a.q * 0, q_bias=None)):
        found = with_constant_norm(before, latent(2), Blocks.whole(x))
        off.append(float(((x[:, 0] @ found.down.T).norm(dim=-1) - 1).square().mean()))
    assert off[0] < 0.5 * off[1]


def test_tokens_of_zeros_add_nothing_and_silent_layers_stay_silent() -> None:
    x, a = inputs(WIDTH), latent()
    x[0, 3] = 0
    silent = dataclasses.replace(a, o=a.o * 0, o_bias=a.o[:, 0, 0] * 0)
    assert not attention_output(with_constant_norm(record(2), silent, Blocks.whole(x)), blocks_of(x)).any()
    found = with_constant_norm(record(2), a, Blocks.whole(x))
    assert not found.latent(x)[0, 3].any()
    assert torch.isfinite(attention_output(found, blocks_of(x))).all()
