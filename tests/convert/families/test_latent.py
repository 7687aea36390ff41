"""Latent projections: the norm switched off for every rank, read again bit for bit, refused where it does something."""

from __future__ import annotations

import math

import torch

from convert.families.latent import constants
from convert.hosts.deepseek_v3 import HOST

# ---- the latent norm -----------------------------------------------------------------------------------------------


def normalised(values: torch.Tensor, rank: int, dtype: torch.dtype, stored: torch.dtype) -> torch.Tensor:
    """`values` through the stock norm beside the constants of `rank`, arithmetic in `dtype`, weights kept in `stored`."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    found = constants(rank)
    true = rank - len(found)
    rows = torch.nn.functional.pad(values, (0, -len(values) % true), value=1.0).view(-1, true).to(dtype)
    constant = (torch.tensor(found) * 2.0**20).to(stored).to(dtype).expand(len(rows), -1)
    norm = DeepseekV3RMSNorm(rank)
    with torch.no_grad():
        norm.weight.copy_(torch.cat((torch.full((true,), 2.0**20), torch.zeros(len(found)))))
        out = norm.to(dtype)(torch.cat((rows, constant), 1))
    assert out[:, true:].abs().max() == 0, "a constant is cached as nothing"
    return out[:, :true].flatten()[: len(values)]


def mantissas() -> torch.Tensor:
    """Every significand of bfloat16, with either sign and exponents as activations have them."""
    significands = 1 + torch.arange(128) / 128
    exponents = torch.randint(-24, 8, (128,), generator=torch.Generator().manual_seed(0))
    return torch.cat((significands, -significands)) * torch.exp2(exponents.repeat(2))


def test_the_norm_gives_back_every_bfloat16_bit_for_bit() -> None:
    values = mantissas()
    assert torch.equal(values.bfloat16().float(), values)
    kept = {rank: normalised(values, rank, torch.bfloat16, torch.bfloat16).float() for rank in range(2, 1025)}
    assert [rank for rank, found in kept.items() if not torch.equal(found, values)] == []


def test_the_norm_is_a_rounding_error_in_fp32() -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 3
    for rank in range(2, 1025):
        error = float(((normalised(values, rank, torch.float32, torch.float32) - values) / values).abs().max())
        assert error <= 2 * 2.0**-23, (rank, error)


def test_a_bfloat16_checkpoint_run_in_fp32_is_off_by_the_rounding_of_its_constants() -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 3
    for rank in range(2, 1025):
        limit = 2.0**-15 if len(constants(rank)) == 2 else 1 / 510
        error = float(((normalised(values, rank, torch.float32, torch.bfloat16) - values) / values).abs().max())
        assert error <= limit, (rank, error)


def test_constants_are_as_few_as_can_be_and_their_squares_sum_to_the_rank() -> None:
    single = {rank for rank in range(1, 1025) if len(constants(rank)) == 1}
    assert {16, 24, 32, 48, 64, 96, 256, 320, 448, 512, 576} <= single
    for rank in range(1, 1025):
        found = constants(rank)
        assert math.isclose(sum(c * c for c in found), rank, rel_tol=1e-12)
        assert len(found) <= 2
        assert HOST.reserved(rank) == len(found)
        if len(found) == 2:
            assert float(torch.tensor(found[0]).bfloat16()) == found[0]
            ratio = math.sqrt(rank) / float(torch.tensor(math.sqrt(rank)).bfloat16())
            if not -1 / 512 - 1e-5 < ratio - 1 < 1 / 510 + 1e-5:  # so close to the limit one may be enough or not
                assert not torch.equal((mantissas() * ratio).bfloat16().float(), mantissas()), f"one is enough for {rank}"
