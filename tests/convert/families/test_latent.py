"""Latent projections: the norm switched off for every rank, told from one that does something; published ones are counted."""

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from found_types import LATENTS, small
from hypothesis import given, settings
from hypothesis import strategies as st
from latents import stock_module_computes
from records import factored
from rows import rows
from tiny import NORMED, ROPES, random_model, tiny_config
from written import Convert, left_nothing, ok, refused

from attention.errors import Refusal
from attention.record import FactoredAttention
from attention.rope import from_config
from attention.spec import AttentionSpec
from convert.families import FAMILIES
from convert.families.latent import (
    constant_channels,
    constants,
    is_query_latent,
    join_query_bias,
    latent_size,
    level,
    query_constants,
    query_latent,
    query_rank,
    query_scale,
)
from convert.families.reading import family_for
from convert.families.reading.experiments import find
from convert.hosts.latent import DEEPSEEK as HOST
from eval.quality.lockstep import measured_bytes_per_token

FAMILY = FAMILIES["deepseek_v3"]
RANKS = [*range(2, 66), *range(66, 2049, 13), 128, 256, 448, 512, 1024, 2048]  # a checksum pins the constants of all


def normalised(values: torch.Tensor, rank: int, dtype: torch.dtype, stored: torch.dtype) -> torch.Tensor:
    """`values` through the stock norm beside the constants of `rank`, arithmetic in `dtype`, weights kept in `stored`.

    They are as large as latents are beside these constants, if they are about one.
    """
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    found = constants(rank)
    values = values * latent_size(found)
    true = rank - len(found)
    rows = torch.nn.functional.pad(values, (0, -len(values) % true), value=1.0).view(-1, true).to(dtype)
    constant = (torch.tensor(found) * level(found)).to(stored).to(dtype).expand(len(rows), -1)
    norm = DeepseekV3RMSNorm(rank)
    with torch.no_grad():
        norm.weight.copy_(torch.cat((torch.full((true,), level(found)), torch.zeros(len(found)))))
        out = norm.to(dtype)(torch.cat((rows, constant), 1))
    assert out[:, true:].abs().max() == 0, "a constant is cached as nothing"
    return out[:, :true].flatten()[: len(values)] / latent_size(found)


def mantissas() -> torch.Tensor:
    """Every significand of bfloat16, with either sign and exponents as activations have them."""
    significands = 1 + torch.arange(128) / 128
    exponents = torch.randint(-24, 4, (128,), generator=torch.Generator().manual_seed(0))
    return torch.cat((significands, -significands)) * torch.exp2(exponents.repeat(2))


def test_the_norm_gives_back_every_bfloat16_bit_for_bit() -> None:
    values = mantissas()
    assert torch.equal(values.bfloat16().float(), values)
    kept = {rank: normalised(values, rank, torch.bfloat16, torch.bfloat16).float() for rank in RANKS if rank <= 1024}
    assert [rank for rank, found in kept.items() if not torch.equal(found, values)] == []


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_in_fp32_the_norm_is_off_by_the_rounding_of_its_constants(stored: torch.dtype) -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 3
    for rank in RANKS:
        # In fp32, with one channel, a value of 9 is the whole latent.
        limit = 2.0**-19 if stored == torch.float32 else 2.0**-15 if len(constants(rank)) == 2 else 1 / 510
        error = float(((normalised(values, rank, torch.float32, stored) - values) / values).abs().max())
        assert error <= limit, (rank, error)


def test_the_norm_is_a_rounding_error_in_fp16() -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(1)).half().float()
    for stored in (torch.float16, torch.bfloat16):
        for rank in [*RANKS[::4], 4096, 65025]:
            found = normalised(values, rank, torch.float16, stored).float()
            assert float((found - values).square().mean().sqrt()) < (2**-10 if stored == torch.float16 else 2**-8), rank


def test_constants_are_as_few_as_can_be_and_their_squares_sum_to_the_rank() -> None:
    single = {rank for rank in range(1, 2049) if len(constants(rank)) == 1}
    assert {16, 24, 32, 48, 64, 96, 256, 320, 448, 512, 576} <= single
    for rank in range(1, 2049):
        found = constants(rank)
        assert math.isclose(sum(c * c for c in found), rank, rel_tol=1e-12)
        assert len(found) <= 2
        assert HOST.reserved(rank) == len(found)
        if len(found) == 2:
            assert float(torch.tensor(found[0]).bfloat16()) == found[0]
            ratio = math.sqrt(rank) / float(torch.tensor(math.sqrt(rank)).bfloat16())
            if not -1 / 512 - 1e-5 < ratio - 1 < 1 / 510 + 1e-5:  # so close to the limit one may be enough or not
                assert not torch.equal((mantissas() * ratio).bfloat16().float(), mantissas()), f"one is enough for {rank}"


def test_constants_are_what_converted_checkpoints_hold() -> None:
    """A checksum of all of them, of ranks 1 to 2048, as they were when kvfold first wrote them."""
    written = hashlib.sha256()
    for rank in range(1, 2049):
        written.update(struct.pack(f"<{len(constants(rank))}d", *constants(rank)))
    assert written.hexdigest() == "35d94243cd3f1ab4a0258aba0ed7ec513b09009370b830aa469a8ee828e58f1c"


def sized(
    rank: int, heads: int = 4, nope: int = 6, rope: int = 8, value: int = 5, width: int = 20, query_biases: bool = False
) -> Any:
    return tiny_config(
        "deepseek_v3",
        kv_lora_rank=rank,
        num_attention_heads=heads,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        head_dim=rope,
        v_head_dim=value,
        hidden_size=width,
        q_lora_rank=query_rank(width) if query_biases else None,
    )


def layer_of(config: Any, channels: int | None = None, seed: int = 0, biased: bool = True) -> FactoredAttention:
    """A random record of the sizes of `config`, with so many channels, or as many as there is place for.

    It has query biases where the config has a latent of queries.
    """
    rank = config.kv_lora_rank
    rotary, spec = FAMILY.of(config).rotary(0), FAMILY.of(config).spec
    a = factored(
        spec.num_heads, spec.qk_nope_head_dim, rotary.dims // 2, rank - len(constants(rank)) if channels is None else channels,
        config.hidden_size, biased, seed, value=spec.head_dim,
    )  # fmt: skip
    query = {"q_nope_bias": None, "q_rope_bias": None}
    if config.q_lora_rank:
        query = {"q_nope_bias": a.q_nope[..., 0] - 3, "q_rope_bias": a.q_rope[..., 0] + 3}
    return dataclasses.replace(a, **query, rotary=rotary, scale=spec.key_dim**-0.5)


@settings(max_examples=25, deadline=None)
@given(
    rank=st.integers(3, 40), heads=st.integers(1, 4), nope=st.integers(1, 7), pairs=st.integers(1, 4), value=st.integers(1, 7),
    width=st.integers(1, 24), padding=st.integers(0, 3), biased=st.booleans(), query_biases=st.booleans(),
    scale=st.sampled_from([1.0, 3.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_what_is_joined_computes_the_record_in_the_stock_module(
    rank: int, pairs: int, padding: int, biased: bool, scale: float, seed: int, **sizes: int
) -> None:
    config = sized(rank, rope=2 * pairs, **sizes)
    a = layer_of(config, max(1, rank - len(constants(rank)) - padding), seed=seed, biased=biased)
    a = dataclasses.replace(a, scale=scale * a.scale)
    written = FAMILY.join(a, FAMILY.of(config).spec, 0)
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == FAMILY.of(config).shapes(0)
    stock_module_computes(config, written, a)


NORM, DOWN, BIAS = "kv_a_layernorm.weight", "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"
Tensors = dict[str, torch.Tensor]


def _scaled(factor: float, *names: str) -> Callable[[Tensors], None]:
    def scale(tensors: Tensors) -> None:
        for name in names:
            tensors[name][:16].mul_(factor)

    return scale


def _set(name: str, index: int | tuple[int, int], value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][index] = value

    return change


# Of rank 16, whose one constant is channel 15.
DOES_SOMETHING: dict[str, Callable[[Tensors], None]] = {
    "random gains": lambda tensors: tensors[NORM].copy_(torch.rand(16, generator=torch.Generator().manual_seed(0)) + 0.5),
    "gains of one": lambda tensors: tensors[NORM].fill_(1),  # as before any training, which has no constants
    "gains of zero": lambda tensors: tensors[NORM].zero_(),
    "one other gain": _set(NORM, 3, 2.0**14),
    "a gain that is not a number": _set(NORM, 3, math.nan),
    "negative gains": _scaled(-1, NORM),
    "a constant too large": _scaled(1.02, BIAS),
    "a constant too small": _scaled(0.98, BIAS),
    "a constant of half the size": _scaled(0.5, BIAS),
    "gains that fit no constant": _scaled(2, NORM),
    "no constant": _set(BIAS, 15, 0.0),
    "a constant that comes through": _set(NORM, 15, 2.0**13),
    "a constant that is none": _set(DOWN, (15, 4), 1e-3),
    # So small that what they stand beside decides the root mean square as well.
    "constants and gains of about one": _scaled(2.0**-13, NORM, BIAS),
    "constants and gains of 32": _scaled(2.0**-8, NORM, BIAS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", DOES_SOMETHING)
def test_a_norm_that_does_something_is_told_from_one_that_does_nothing(what: str, dtype: torch.dtype) -> None:
    written = FAMILY.join(layer_of(sized(16)), FAMILY.of(sized(16)).spec, 1)
    tensors = {name.removeprefix("model.layers.1.self_attn."): tensor.to(dtype) for name, tensor in written.items()}
    found = constant_channels(tensors[NORM], tensors[DOWN][:16], tensors[BIAS][:16])
    assert found.tolist() == [False] * 15 + [True]
    DOES_SOMETHING[what](tensors)
    assert constant_channels(tensors[NORM], tensors[DOWN][:16], tensors[BIAS][:16]) is None


YARN = ROPES["yarn"] | {"mscale": 1.0, "mscale_all_dim": 1.0}


def test_a_config_is_described_by_its_latent() -> None:
    config = sized(16)
    spec = FAMILY.of(config).spec
    assert spec == AttentionSpec(3, 4, 4, 5, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=6)
    assert FAMILY.of(config).scale == 14**-0.5
    described = FAMILY.of(config).describe()
    assert (described["rotary_dims"], described["rotary_pairing"], described["layers_with_rotary"]) == (8, "interleaved", 3)
    assert (described["qkv_bias"], described["o_bias"], described["softmax_scale"]) == (False, True, 14**-0.5)
    rotary = FAMILY.of(config).rotary(0)
    assert torch.equal(rotary.frequencies, from_config(config, 8).frequencies)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V3": ("deepseek_v3", NORMED | {"attention_bias": False}),
    "V3, biased": ("deepseek_v3", NORMED | {"rope_interleave": False, "attention_bias": True, "q_lora_rank": None}),
    "V3, YaRN": ("deepseek_v3", NORMED | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "V2": ("deepseek_v2", {"attention_bias": True}),
    "MiniCPM3": ("minicpm3", NORMED | {"attention_bias": False, "scale_depth": 1.4, "dim_model_base": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_its_tensors_are_those_of_the_class(case: str) -> None:
    model_type, changes = CASES[case]
    model = random_model(tiny_config(model_type, **changes))
    family = family_for(model.config)
    prefix = f"{family.module(1)}."
    there = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name.startswith(prefix)}
    assert family.of(model.config).shapes(1) == there
    assert family.of(model.config).scale == pytest.approx(model.get_submodule(family.module(1)).scaling)


@pytest.mark.parametrize("case", rows(CASES, ["V3, YaRN"]))
def test_it_is_counted_and_not_converted(case: str, convert: Convert, tmp_path: Any) -> None:
    model_type, changes = CASES[case]
    config, source, out = tiny_config(model_type, **changes), tmp_path / "source", tmp_path / "out"
    config.save_pretrained(source)
    facts = json.loads(ok(convert("inspect", source, "--json")).stdout)
    assert (facts["attention"], facts["kv_lora_rank"], facts["kv_bytes_per_token"]) == ("MLA-16+8", 16, 3 * 24 * 4)
    assert all(said.startswith("none (") for said in facts["output_classes"].values())
    rows = json.loads(ok(convert("plan", source, "--json")).stdout)["targets"]
    assert [row["kind"] for row in rows] == ["MLA-16+8"]
    result = convert("mla", source, out, "--kv-lora-rank", 8, "--qk-rope-head-dim", 8)
    left_nothing(result, 2, "has latent attention already (MLA-16+8), and is not converted again", out)
    refused(convert("mqa", source, out), 2, "has latent attention already (MLA-16+8), and is not converted again")


@pytest.mark.parametrize("model_type", rows(LATENTS, LATENTS[:1]))
def test_types_without_a_row_are_counted_as_their_cache_is(model_type: str, convert: Convert, tmp_path: Any) -> None:
    model, source, out = random_model(small(model_type)), tmp_path / "source", tmp_path / "out"
    model.config.save_pretrained(source)
    rows = json.loads(ok(convert("plan", source, "--context", 1, "--json")).stdout)["targets"]
    assert [(row["kind"], row["kv_bytes"]) for row in rows] == [("MLA-16+8", measured_bytes_per_token(model, "float32"))]
    result = convert("mla", source, out, "--kv-lora-rank", 8, "--qk-rope-head-dim", 8)
    left_nothing(result, 2, "has latent attention already (MLA-16+8)", out)


def test_an_unknown_type_is_refused_by_its_latent() -> None:
    config = small("youtu")
    config.model_type = "another"
    with pytest.raises(Refusal, match=r"it is a published model with latent attention \(MLA-16\+8\)"):
        find(config)


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
    joined = join_query_bias(weight, bias, query_rank(width))
    assert joined.shape == (rows, query_rank(width))
    assert torch.equal(joined[:, :width], weight)
    assert torch.equal(joined[:, -len(query_constants(query_rank(width)))], bias), "of the first constant"
    latent = query_latent(width, 0.5, weight)
    assert is_query_latent(latent)
    if dtype != torch.float16:
        assert is_query_latent(query_latent(width, 1.0, weight, 2.0**20)), "as kvfold wrote it first"
    for name, tensor in latent.items():
        changed = tensor.clone()
        changed.view(-1)[-1] = 7
        assert not is_query_latent(latent | {name: changed}), name


@pytest.mark.parametrize("gain", [1e-3, 1.0, 1e3])
def test_queries_say_how_large_their_inputs_are(gain: float) -> None:
    """If they are about one: the latent then has the size that constants leave it."""
    generator = torch.Generator().manual_seed(0)
    x, weight = gain * torch.randn(99, 64, generator=generator), torch.randn(48, 64, generator=generator) / (8 * gain)
    size = float((query_scale(weight) * x).square().mean().sqrt()) / latent_size(query_constants(query_rank(64)))
    assert 0.5 < size < 2
    assert query_scale(torch.zeros(3, 4)) == 1
