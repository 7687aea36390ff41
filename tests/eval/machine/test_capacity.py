"""What fits where: a published table, parameter counts against real models, and the longest context."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config, tiny_model
from transformers import LlamaConfig

from attention.errors import Refusal
from attention.spec import AttentionSpec
from eval.machine.capacity import GIGABYTE, GPUS, count_parameters, fit

# A model of 64 layers and width 5120, as MHA.
LARGE = AttentionSpec(num_layers=64, num_heads=40, num_kv_heads=40, head_dim=128)


def sized(
    spec: AttentionSpec = LARGE, parameters: int = 32 * 10**9, batch: int = 16, context: int = 2048, **changes: Any
) -> SimpleNamespace:
    given = {"dtype": "bfloat16", "gpus": GPUS} | changes
    return SimpleNamespace(**fit(spec, parameters, **given, batch=batch, context=context))


@pytest.mark.parametrize(("batch", "gigabytes"), [(16, 42.9), (32, 85.9)])
def test_kv_memory_is_that_of_the_known_table(batch: int, gigabytes: float) -> None:
    assert round(sized(batch=batch).kv_bytes / GIGABYTE, 1) == gigabytes
    assert sized(batch=batch).kv_bytes_per_token == 1_310_720
    assert (sized().weight_bytes, sized(dtype="float32").weight_bytes) == (64 * GIGABYTE, 128 * GIGABYTE)
    assert sized(LARGE.grouped(8)).kv_bytes * 5 == sized(LARGE.grouped(1)).kv_bytes * 40 == sized().kv_bytes


def test_what_fits_on_which_gpu() -> None:
    found = sized(gpus={"small": 24, "medium": 80, "large": 141}, share=1.0)
    # 64 GB of weights leave 16 and 77 GB for 16 sequences of 1.31072 MB a token.
    assert found.longest_context == {"small": 0, "medium": 762, "large": 3671}
    assert found.fits == {"small": False, "medium": False, "large": True}


def test_windows_count_at_the_context() -> None:
    half = replace(LARGE, windows=(1024, None) * 32)
    found = sized(half, context=4096, gpus={"large": 141}, share=1.0)
    row = 2 * 40 * 128 * 2
    assert found.kv_bytes == 16 * 32 * (1023 + 4096) * row == 16 * 4096 * found.kv_bytes_per_token
    longest = found.longest_context["large"]
    assert longest == (141 - 64) * GIGABYTE // (16 * 32 * row) - 1023
    bounded = sized(replace(LARGE, windows=(1024,) * 64), context=10**6, gpus={"small": 64, "large": 141}, share=1.0)
    assert bounded.kv_bytes == 16 * 64 * 1023 * row
    assert bounded.fits == {"small": False, "large": True}, "at any length"


@settings(deadline=None, max_examples=50)
@given(
    groups=st.sampled_from([1, 2, 4, 8]),
    parameters=st.integers(0, 10**11),
    batch=st.integers(1, 512),
    context=st.integers(1, 10**6),
    size=st.integers(1, 200),
    percent=st.integers(1, 100),
)
def test_the_longest_context_is_the_largest_that_fits(
    groups: int, parameters: int, batch: int, context: int, size: int, percent: int
) -> None:
    spec = AttentionSpec(num_layers=32, num_heads=8, num_kv_heads=groups, head_dim=128)
    found = sized(spec, parameters, batch, context, gpus={"gpu": size}, share=percent / 100)
    budget, longest = percent / 100 * size * GIGABYTE, found.longest_context["gpu"]

    def taken(tokens: int) -> int:
        return 2 * parameters + batch * tokens * 2 * (32 * 2 * groups * 128)

    assert taken(longest + 1) > budget
    assert longest == 0 or taken(longest) <= budget
    assert found.fits["gpu"] == (taken(context) <= budget)


@pytest.mark.parametrize(
    ("model_type", "tied"), [("llama", False), ("llama", True), ("qwen2", True), ("gemma2", True), ("phi", False)]
)
def test_parameters_are_those_of_the_real_model(model_type: str, tied: bool) -> None:
    config = tiny_config(model_type, tie_word_embeddings=tied)
    model = tiny_model(config)
    distinct = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    assert count_parameters(config) == sum(distinct.values())


def test_a_7b_model_is_counted_without_being_made() -> None:
    llama_2_7b = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
    assert count_parameters(llama_2_7b) == 6_738_415_616


def test_a_model_that_transformers_cannot_build_is_refused_in_one_line() -> None:
    config = tiny_config("llama")
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(Refusal, match=r"cannot build a model from this config of type 'llama': KeyError: 'spiral'$"):
        count_parameters(config)


def test_a_cache_in_another_format_is_counted_with_its_scales() -> None:
    plain, found = sized(context=2048), sized(context=2048, cache_dtype="int4")
    assert found.weight_bytes == plain.weight_bytes
    assert found.kv_bytes_per_token == LARGE.bytes_per_token("int4") == plain.kv_bytes_per_token * 5 // 16
    assert found.kv_bytes == 16 * 2048 * found.kv_bytes_per_token
    longest = found.longest_context["A100/A800/H800"]
    room = 0.9 * GPUS["A100/A800/H800"] * GIGABYTE - found.weight_bytes
    assert 16 * LARGE.cache_bytes("int4", longest) <= room < 16 * LARGE.cache_bytes("int4", longest + 1)
