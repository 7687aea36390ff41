"""What engines take: sizes of latents, and output classes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_config

from attention.errors import Refusal
from attention.spec import AttentionSpec
from convert.families import FAMILIES
from convert.hosts import HOSTS, PORTABLE
from convert.hosts.engines import ENGINES, engine_of, running, storing
from convert.hosts.kvfold import HOST, LATENT_HOST

BEFORE = AttentionSpec(2, 32, 32, 128)
CLASSES = {host.name: host for hosts in (*HOSTS.values(), PORTABLE) for host in hosts}


@pytest.mark.parametrize(
    ("host", "model_type", "spec", "expected"),
    [
        ("its own class", "llama", BEFORE.grouped(8), ["transformers", "vllm", "llama.cpp"]),
        ("its own class", "phi", BEFORE.grouped(8), ["transformers", "vllm"]),
        ("its own class", "falcon", BEFORE.grouped(1), ["transformers"]),
        ("deepseek_v3", "llama", BEFORE.latent(512, 64), ["transformers", "vllm"]),
        ("deepseek_v3", "llama", BEFORE.latent(256, 64), ["transformers", "vllm"]),
        ("deepseek_v3", "llama", BEFORE.latent(512, 128), ["transformers"]),
        ("deepseek_v3", "llama", BEFORE.latent(448, 128), ["transformers"]),
        ("portable deepseek_v3", "llama", BEFORE.latent(512, 64), ["transformers", "vllm"]),
        ("portable deepseek_v3", "llama", BEFORE.latent(96, 32), ["transformers"]),
        ("kvfold", "llama", BEFORE.latent(512, 64), ["transformers"]),
        ("kvfold", "llama", BEFORE.grouped(8), ["transformers"]),
    ],
)
def test_what_runs_a_result(host: str, model_type: str, spec: AttentionSpec, expected: list[str]) -> None:
    assert running(CLASSES[host], FAMILIES[model_type], spec) == expected


@pytest.mark.parametrize(
    ("model_type", "grouped", "latent"),
    [("gpt2", True, False), ("qwen3", True, True), ("stablelm", False, True), ("bloom", False, False)],
)
def test_vllm_runs_results_of_kvfolds_class_where_they_were_tried(model_type: str, grouped: bool, latent: bool) -> None:
    tried = {False: ["transformers"], True: ["transformers", "vllm"]}
    for host, spec, runs in ((HOST, BEFORE.grouped(8), grouped), (LATENT_HOST, BEFORE.latent(512, 64), latent)):
        assert running(host, FAMILIES[model_type], spec) == tried[runs]
    assert running(LATENT_HOST, FAMILIES[model_type], BEFORE.latent(512, 64).keeping([0], 8)) == ["transformers"]


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
    ids=["windows", "dynamic RoPE"],
)
def test_what_vllms_plugin_refuses_is_not_made_for_it(changes: dict[str, Any]) -> None:
    family = FAMILIES["qwen3"]
    for host, spec in ((HOST, BEFORE.grouped(8)), (LATENT_HOST, BEFORE.latent(512, 64))):
        assert running(host, family.of(tiny_config("qwen3")), spec) == ["transformers", "vllm"]
        assert running(host, family.of(tiny_config("qwen3", **changes)), spec) == ["transformers"]


@pytest.mark.parametrize(
    ("host", "model_type", "changes", "key", "known", "architecture"),
    [
        ("gpt_bigcode", "gpt2", {}, "activation_function", "gelu_new", "GPTBigCodeForCausalLM"),
        ("phi", "gptj", {}, "activation_function", "gelu_new", "PhiForCausalLM"),
    ],
)
def test_engines_that_do_not_read_the_activation_do_not_know_the_architecture(
    host: str, model_type: str, changes: dict[str, Any], key: str, known: str, architecture: str
) -> None:
    for activation, name in (("relu", "TransformersForCausalLM"), (known, architecture)):
        family = FAMILIES[model_type].of(tiny_config(model_type, **changes, **{key: activation}))
        assert CLASSES[host].config({}, family, family.spec.grouped(1), None)["architectures"] == [name]


@given(values=st.integers(0, 5000))
def test_the_largest_size_that_fits(values: int) -> None:
    engine = ENGINES["vllm"]
    if values < 320:
        with pytest.raises(Refusal, match=rf"256\+64, 448\+64 or 512\+64, and the budget leaves {values} numbers"):
            engine.fitting(values)
    else:
        assert engine.fitting(values) == max(size for size in engine.latents if sum(size) <= values)


@pytest.mark.parametrize(
    ("host", "spec", "form", "expected"),
    [
        ("its own class", BEFORE.grouped(8), "q4_0", ["transformers", "llama.cpp"]),
        ("its own class", BEFORE.grouped(8), "fp8", ["transformers", "vllm (not tried)"]),
        ("its own class", BEFORE.grouped(8), "int4", ["transformers"]),
        ("portable deepseek_v3", BEFORE.latent(160, 32), "q8_0", ["transformers", "llama.cpp"]),
        ("portable deepseek_v3", BEFORE.latent(160, 16), "q8_0", []),  # blocks of 32
        ("portable deepseek_v3", BEFORE.latent(176, 32), "q8_0", []),
        ("deepseek_v3", BEFORE.latent(512, 64), "fp8", ["transformers", "vllm (not tried)"]),
    ],
)
def test_which_engines_store_a_cache(host: str, spec: AttentionSpec, form: str, expected: list[str]) -> None:
    spec = replace(spec, q_lora_rank=4096) if CLASSES[host].portable else spec
    assert storing(CLASSES[host], FAMILIES["llama"], spec, form) == expected


def test_latents_of_kvfolds_class_are_stored_in_few_bits_by_transformers_alone() -> None:
    spec = BEFORE.latent(512, 64)
    assert [name for name, engine in ENGINES.items() if engine.stores(LATENT_HOST, spec)] == ["transformers"]
    options = [cache.option for cache in ENGINES["vllm"].stores(HOST, BEFORE.grouped(8))]
    of_vllm = ("fp8", "int4_per_token_head", "nvfp4", "turboquant_4bit_nc", "turboquant_3bit_nc")
    assert options == [f"--kv-cache-dtype {name}" for name in of_vllm]


def test_unknown_engines_are_refused() -> None:
    assert engine_of(None) is None
    of_all = (one.engines(FAMILIES[name]) for one in CLASSES.values() for name in one.families)
    assert all({"transformers"} <= engines <= ENGINES.keys() for engines in of_all)
    with pytest.raises(Refusal, match="no engine 'tgi' is known") as caught:
        engine_of("tgi")
    assert caught.value.hint == "choose transformers, vllm, llama.cpp, or leave it out"
