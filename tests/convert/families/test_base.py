"""The registry of families, and what the base of all of them makes of a config."""

from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_model
from written import refused

from attention.errors import Refusal
from convert.families import FAMILIES, family_of


def test_an_unknown_family_is_refused_with_the_list() -> None:
    with pytest.raises(Refusal, match="'bert' is not supported") as caught:
        family_of("bert")
    assert all(name in caught.value.hint for name in ("llama", "qwen3", "phi"))


def test_what_is_not_read_on_purpose_is_refused_with_the_reason() -> None:
    with pytest.raises(Refusal, match=r"openai-gpt' is not supported: .*keeps no KV cache"):
        family_of("openai-gpt")


def test_quantised_experts_are_refused_before_weights_are_read(convert: Any, tmp_path: Any) -> None:
    """As OpenAI publishes them, in a file that nothing here opens."""
    tiny_config("gpt_oss", quantization_config={"quant_method": "mxfp4"}).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    refused(convert("mqa", tmp_path, tmp_path / "out"), 2, "is quantised (mxfp4)")
    assert "it is quantised (mxfp4), which a conversion refuses" in convert("plan", tmp_path).output


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "smollm3"])
def test_a_window_counts_if_it_is_on(model_type: str) -> None:
    def windows(**changes: Any) -> set[int | None]:
        config = tiny_config(model_type, sliding_window=64, max_window_layers=2, num_hidden_layers=4, **changes)
        return {FAMILIES[model_type].of(config).scoring(layer).window for layer in range(config.num_hidden_layers)}

    assert 64 in windows(use_sliding_window=True)
    assert windows(use_sliding_window=False) == {None}


def test_local_layers_have_windows() -> None:
    local, plain = tiny_config("gpt_neo", window_size=64), tiny_config("gpt_neo", attention_types=[[["global"], 3]])
    family = FAMILIES["gpt_neo"]
    assert [family.of(local).scoring(layer).window for layer in range(3)] == [64, None, None]
    assert [family.of(plain).scoring(layer).window for layer in range(3)] == [None] * 3


def test_attention_is_known_but_for_what_no_record_says() -> None:
    known = tiny_config("gemma2", attn_logit_softcapping=50.0, sliding_window=8)
    assert FAMILIES["gemma2"].of(known).traits.unmodelled == []
    both_ways = tiny_config("gemma2", use_bidirectional_attention=True)
    assert FAMILIES["gemma2"].of(both_ways).traits.unmodelled == ["use_bidirectional_attention"]


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("codegen", {"num_attention_heads": 2}, "4 blocks of equally many heads, and num_attention_heads is 2"),
        *((name, {"rotary_dim": dims}, f"RoPE rotates pairs of each head's 8 dims, and rotary_dim is {dims}")
          for name in ("codegen", "gptj") for dims in (0, 3, 10)),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping, which its class of transformers ignores"),
        *((name, {"add_cross_attention": True}, "it has cross-attention (add_cross_attention)")
          for name in ("gpt2", "gpt_bigcode", "xglm")),
        *(("gpt_neo", {"window_size": size}, f"its local layers see no tokens (window_size is {size})") for size in (0, -1)),
        ("opt", {"do_layer_norm_before": False}, "it normalises behind its attention (do_layer_norm_before is false)"),
        ("falcon", {"alibi": True}, "alibi is true"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn is false"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2 and new_decoder_architecture False"),
        ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn 3"),
        ("falcon", {"num_kv_heads": 4}, "num_kv_heads is 4, and without multi_query"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact is true and pretraining_tp is 2"),
        ("mpt", {"no_bias": False}, "no_bias is false"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln is True"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm is True"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_config.attn_type is multiquery_attention"),
        ("mpt", {"attn_config": {"alibi_bias_max": 4}}, "attn_config.alibi_bias_max is 4"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi is False"),
    ],
)  # fmt: skip
def test_what_a_record_does_not_say_is_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    assert FAMILIES[model_type].of(tiny_config(model_type)).unreadable is None
    assert message in str(FAMILIES[model_type].of(tiny_config(model_type, **changes)).unreadable)


@pytest.mark.parametrize("model_type", ["codegen", "gptj"])
def test_rotary_dims_may_be_those_of_a_field(model_type: str) -> None:
    facts = FAMILIES[model_type].of(tiny_config(model_type, rotary_dim=6)).describe()
    assert (facts["rotary_dims"], facts["rotary_pairing"], facts["rope_type"]) == (6, "interleaved", "default")


def test_a_block_has_queries_then_values_then_keys() -> None:
    model = tiny_model(tiny_config("codegen"))
    weight = model.transformer.h[1].attn.qkv_proj.weight
    weight.data.copy_(torch.arange(len(weight))[:, None].expand_as(weight))  # every row says where it is
    name = "transformer.h.1.attn"
    tensors = {f"{name}.qkv_proj.weight": weight, f"{name}.out_proj.weight": model.transformer.h[1].attn.out_proj.weight}
    record = FAMILIES["codegen"].of(model.config).split(tensors, 1)
    first = torch.arange(8) // 2 * 48 + torch.arange(8) % 2 * 8  # 2 heads of 8 dims in a block of 48 rows
    assert record.q[:, 0, 0].tolist() == first.tolist()
    assert record.v[:, 0, 0].tolist() == (first + 16).tolist()
    assert record.k[:, 0, 0].tolist() == (first + 32).tolist()
