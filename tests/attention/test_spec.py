"""The one formula of KV bytes, the names of attention kinds, and what can be grouped."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config
from transformers import Gemma3Config, GPT2Config, LlamaConfig, MambaConfig

from attention.errors import Refusal
from attention.formats import FORMATS
from attention.models.configuration_kvfold import KvfoldConfig
from attention.spec import AttentionSpec, dtype_bytes

LLAMA_2_7B = AttentionSpec(num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128)
LLAMA_3_8B = AttentionSpec(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)


def test_bytes_of_dtypes() -> None:
    assert [dtype_bytes(name) for name in ("float32", "float16", "bfloat16", "float64")] == [4, 2, 2, 8]
    with pytest.raises(Refusal, match=r"no KV cache is kept in 'bf16' \(choose float32, float16, bfloat16, float64\)"):
        dtype_bytes("bf16")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kind"), [(32, 32, "MHA"), (32, 16, "GQA-16"), (32, 2, "GQA-2"), (32, 1, "MQA"), (1, 1, "MHA")]
)
def test_kinds_are_named_after_their_kv_heads(heads: int, kv_heads: int, kind: str) -> None:
    assert AttentionSpec(num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=64).kind == kind


@pytest.mark.parametrize("kv_heads", [3, 16, 0, -2])
def test_kv_heads_that_do_not_divide_the_query_heads_are_refused(kv_heads: int) -> None:
    with pytest.raises(Refusal, match=f"8 query heads cannot share {kv_heads} KV heads"):
        AttentionSpec(num_layers=1, num_heads=8, num_kv_heads=kv_heads, head_dim=64)


@settings(deadline=None)
@given(heads=st.integers(1, 96), share=st.integers(1, 4), groups=st.integers(-3, 200))
def test_exactly_the_divisors_of_the_kv_heads_can_be_grouped(heads: int, share: int, groups: int) -> None:
    spec = AttentionSpec(num_layers=2, num_heads=heads * share, num_kv_heads=heads, head_dim=16)
    if groups > 0 and heads / groups == heads // groups:
        assert spec.grouped(groups) == AttentionSpec(2, heads * share, groups, 16)
        assert spec.grouped(groups).bytes_per_token("float16") * heads == spec.bytes_per_token("float16") * groups
    else:
        with pytest.raises(Refusal, match=f"^cannot make {groups} groups from {heads} KV heads: "):
            spec.grouped(groups)


@pytest.mark.parametrize(
    ("spec", "groups", "message"),
    [
        (LLAMA_2_7B, 6, "cannot make 6 groups from 32 KV heads: 6 does not divide 32 (choose 1, 2, 4, 8, 16 or 32)"),
        (LLAMA_3_8B, 16, "cannot make 16 groups from 8 KV heads: it must be between 1 and 8 (choose 1, 2, 4 or 8)"),
        (LLAMA_2_7B.grouped(1), 2, "cannot make 2 groups from 1 KV heads: it must be between 1 and 1 (choose 1)"),
    ],
)
def test_a_refused_grouping_names_values_rule_and_choices(spec: AttentionSpec, groups: int, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        spec.grouped(groups)
    assert str(caught.value) == message


GEMMA_TEXT = {
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "hidden_size": 48,
    "max_position_embeddings": 8192, "sliding_window": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tiny_config("llama", num_key_value_heads=8), AttentionSpec(3, 8, 8, 8)),
        (tiny_config("llama", num_key_value_heads=2, head_dim=24), AttentionSpec(3, 8, 2, 24)),
        (tiny_config("llama", num_key_value_heads=1, head_dim=None), AttentionSpec(3, 8, 1, 8)),
        (GPT2Config(n_embd=96, n_layer=5, n_head=6), AttentionSpec(5, 6, 6, 16)),
        (tiny_config("gpt_neox", num_key_value_heads=None, head_dim=None), AttentionSpec(3, 8, 8, 8)),
        (Gemma3Config(text_config=GEMMA_TEXT), AttentionSpec(4, 6, 3, 32, windows=(16,) * 4)),
    ],
    ids=["MHA", "a head_dim of its own", "MQA without head_dim", "neither KV heads nor head_dim", "both None", "a text part"],
)
def test_sizes_are_read_from_a_config(config: Any, expected: AttentionSpec) -> None:
    assert AttentionSpec.from_config(config) == expected


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 16}, (16, 16, 16)),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 128}, None),
        ("phi3", {"sliding_window": 2047, "max_position_embeddings": 4096}, (2047, 2047, 2047)),
        ("qwen2", {"sliding_window": 131072, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, (None, 16, 16)),
        ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 3}, (16, 16, None)),
        ("gpt_oss", {"sliding_window": 16}, (16, None, 16)),
        ("llama4_text", {"attention_chunk_size": 16, "no_rope_layers": [1, 1, 0]}, (16, 16, None)),
        ("gpt_neo", {}, None),
    ],
)
def test_windows_are_those_of_transformers_cache(model_type: str, changes: dict[str, Any], windows: Any) -> None:
    """A window inside an attention, as gpt_neo has it, keeps nothing out of the cache, nor one over all positions."""
    config = tiny_config(model_type, **changes)
    assert AttentionSpec.from_config(config).windows == windows
    if model_type == "mistral":
        wrapped = KvfoldConfig(text_config=config, attention_path="model.layers.{layer}.self_attn")
        assert AttentionSpec.from_config(wrapped).windows == windows


def test_windows_bound_what_layers_hold() -> None:
    """Gemma 3 of 18 layers, and of 26, whose 139 MiB others have measured."""
    pattern = (*(512,) * 5, None)
    small, large = (AttentionSpec(n, 4, 1, 256, windows=(pattern * 5)[:n]) for n in (18, 26))
    assert large.cache_bytes("bfloat16", 32768) == (22 * 511 + 4 * 32768) * 1024 == 145_729_536
    assert small.cache_bytes("bfloat16", 32768) == small.bytes_per_token("bfloat16", 32768) * 32768 == 108_512_256
    assert small.bytes_per_token("bfloat16") == small.bytes_per_token("bfloat16", 511) == 18 * 1024
    assert small.cache_bytes("bfloat16", 32768, static=True) == (15 * 512 + 3 * 32768) * 1024
    assert small.window_note(511) is None
    assert small.window_note(32768) == (
        "the windowed layers (15 of 18, which see 512 tokens) are 7.2% of the cache at 32,768 tokens"
    )
    assert (small.at_context(511), small.at_context(512)) == ("", " at 512 tokens")
    latent = small.latent(96, 32).keeping([layer for layer in range(18) if pattern[layer % 6]], 1)
    assert latent.cache_bytes("bfloat16", 32768) == (15 * 511 * 512 + 3 * 32768 * 128) * 2
    assert latent.kept_bytes("bfloat16", 32768) == 15 * 511 * 512 * 2
    assert "are 23.8% of" in str(latent.window_note(32768))


@pytest.mark.parametrize("form", FORMATS)
def test_without_windows_bytes_per_token_do_not_depend_on_the_context(form: str) -> None:
    for spec in (LLAMA_3_8B, LLAMA_3_8B.latent(512, 64)):
        for context in (1, 1000) if spec.takes(form) else ():
            assert spec.bytes_per_token(form, context) == spec.bytes_per_token(form)
            assert isinstance(spec.bytes_per_token(form, context), int)


def test_a_latent_is_counted_by_rank_and_rotary_dims() -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 96, "v_head_dim": 128}
    spec = AttentionSpec.from_config(tiny_config("deepseek_v3", num_key_value_heads=8, **latent))
    assert spec == AttentionSpec(3, 8, 8, 128, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=96)
    assert spec.key_dim == 160
    assert spec.kind == "MLA-512+64"
    assert spec.bytes_per_token("bfloat16") == 3 * (512 + 64) * 2


def test_a_latent_keeps_the_dims_of_its_queries() -> None:
    latent = AttentionSpec(4, 8, 2, 16).latent(40, 8)
    assert (latent.kind, latent.num_kv_heads, latent.values_per_token) == ("MLA-40+8", 8, 4 * 48)
    assert (latent.qk_nope_head_dim, latent.key_dim, latent.head_dim) == (16, 24, 16)
    with pytest.raises(Refusal, match="MLA-40\\+8 has a latent and no KV heads to merge"):
        latent.grouped(1)


def test_where_nothing_rotates_there_is_no_rotary_key() -> None:
    spec = AttentionSpec(4, 8, 8, 16).latent(40, 0)
    assert (spec.kind, spec.key_dim, spec.qk_nope_head_dim, spec.values_per_token) == ("MLA-40+0", 16, 16, 160)


@pytest.mark.parametrize("rope", [7, 34, -2])
def test_rotary_dims_that_keys_do_not_have_are_refused(rope: int) -> None:
    with pytest.raises(Refusal, match="rank 0 holds nothing"):
        AttentionSpec(4, 8, 2, 16).latent(0, 8)
    with pytest.raises(Refusal, match=rf"cannot keep {rope} rotary dims of 2 KV heads × 16: it must be even and between"):
        AttentionSpec(4, 8, 2, 16).latent(40, rope)


def other_heads(**changes: int) -> LlamaConfig:
    return LlamaConfig(num_attention_heads=8, num_key_value_heads=4, per_layer_config={0: changes})


OPENELM = SimpleNamespace(
    model_type="openelm", hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=[4, 2]
)
OPENELM.get_text_config = lambda decoder: OPENELM


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MambaConfig(), "model type 'mamba' has no single number of attention heads"),
        (OPENELM, r"'openelm' has a different number of KV heads in every layer: \[4, 2\]"),
        (other_heads(head_dim=4), "model type 'llama' has layers that differ in head_dim$"),
        (other_heads(num_key_value_heads=2, head_dim=4), "has layers that differ in head_dim, num_key_value_heads$"),
        (
            tiny_config("llama", layer_types=["sliding_attention"] * 3),
            r"transformers makes no KV cache for this config of type 'llama': .*sliding_window",
        ),
    ],
)
def test_a_config_without_one_attention_or_a_cache_is_refused(config: Any, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        AttentionSpec.from_config(config)


def test_layers_may_stay_as_the_source_has_them() -> None:
    source = LLAMA_3_8B
    latent, grouped = (made.keeping([19, 0], 8) for made in (source.latent(512, 64), source.grouped(2)))
    assert (latent.kind, grouped.kind) == ("MLA-512+64 in 30 of 32 layers", "GQA-2 in 30 of 32 layers")
    assert latent.kept == grouped.kept == (0, 19)
    assert latent.values_per_token == 30 * 576 + 2 * 2 * 8 * 128
    assert grouped.bytes_per_token("bfloat16") == (30 * 2 + 2 * 8) * 2 * 128 * 2
    assert latent.bytes_per_token("int4") == 26 * (256 + 32) + 4 * (384 + 1) + 30 * (38 + 3) + 2 * 2 * 8 * (64 + 16)
    mixed = FORMATS["mixed"]
    rows = 26 * (mixed.row_bytes(512, "latent") + 33) + 4 * (mixed.precise.row_bytes(512, "latent") + 38 + 3)
    assert latent.bytes_per_token("mixed") == rows + 2 * 2 * 8 * (64 + 16), "heads beside it are in int4"
    assert [latent.is_latent(layer) for layer in (0, 1, 19)] == [False, True, False]
    assert source.latent(512, 64).keeping([], 8) == source.latent(512, 64)
