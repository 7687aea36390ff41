"""Constant channels of the queries' latent: the norm gives back every number, and one channel is one, in every dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.families import neutral
from convert.families.neutral import latent_size, query_constants, query_latent, query_rank, query_scale

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 0.0, torch.float16: 2.0**-10, torch.float64: 2.0**-22}
SMALL = {torch.float16: 2.0**-11}  # inputs of about one become 2⁻¹² there, and lose bits


def test_ranks_are_multiples_of_16_and_squares_of_constants_sum_to_them() -> None:
    for width in range(1, 8193):
        rank = query_rank(width)
        found = query_constants(rank)
        assert rank % 16 == 0
        assert rank - 16 < width + 5 <= rank
        assert found[0] == 1
        assert len(found) <= rank - width
        assert sum(value**2 for value in found) == rank
        assert all(value == int(value) and value <= 256 for value in found), "which bfloat16 holds"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 64, 576, 896, 1000])
def test_inputs_come_out_bit_for_bit_beside_a_one(width: int, dtype: torch.dtype) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    rank = query_rank(width)
    scale = latent_size(query_constants(rank))
    tensors = query_latent(width, scale, torch.zeros((), dtype=dtype))
    norm = DeepseekV3RMSNorm(rank).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(tensors["q_a_layernorm.weight"])
    x = torch.randn(50, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    latent = norm(torch.nn.functional.linear(x, tensors["q_a_proj.weight"], tensors["q_a_proj.bias"])).detach()
    # float64 goes through float32 in this norm.
    torch.testing.assert_close(latent[:, :width] / scale, x, rtol=ROUNDING[dtype], atol=SMALL.get(dtype, 0))
    one = rank - len(query_constants(rank))
    assert float((latent[:, one] - 1).abs().max()) <= ROUNDING[dtype]
    assert not latent[:, width:one].any()
    assert not latent[:, one + 1 :].any()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 70), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_queries_read_their_input_and_a_constant(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, width), (rows,)))
    joined = neutral.join_query_bias(weight, bias, query_rank(width))
    assert joined.shape == (rows, query_rank(width))
    assert torch.equal(joined[:, :width], weight)
    assert torch.equal(joined[:, -len(query_constants(query_rank(width)))], bias), "of the first constant"
    latent = query_latent(width, 0.5, weight)
    assert neutral.is_query_latent(latent)
    if dtype != torch.float16:
        assert neutral.is_query_latent(query_latent(width, 1.0, weight, 2.0**20)), "as kvfold wrote it first"
    for name, tensor in latent.items():
        changed = tensor.clone()
        changed.view(-1)[-1] = 7
        assert not neutral.is_query_latent(latent | {name: changed}), name


@pytest.mark.parametrize("gain", [1e-3, 1.0, 1e3])
def test_queries_say_how_large_their_inputs_are(gain: float) -> None:
    """If they are about one: the latent then has the size that constants leave it."""
    generator = torch.Generator().manual_seed(0)
    x, weight = gain * torch.randn(99, 64, generator=generator), torch.randn(48, 64, generator=generator) / (8 * gain)
    size = float((query_scale(weight) * x).square().mean().sqrt()) / latent_size(query_constants(query_rank(64)))
    assert 0.5 < size < 2
    assert query_scale(torch.zeros(3, 4)) == 1
