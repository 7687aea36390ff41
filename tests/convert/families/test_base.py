"""The registry of families, and what the base of all of them makes of a config."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_config
from written import refused

from attention.errors import Refusal
from convert.families import FAMILIES, family_of


def test_an_unknown_family_is_refused_with_the_list() -> None:
    with pytest.raises(Refusal, match="'bert' is not supported") as caught:
        family_of("bert")
    assert caught.value.hint is not None
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


def test_a_cap_that_the_class_ignores_is_refused() -> None:
    capped = FAMILIES["gemma3_text"].of(tiny_config("gemma3_text", attn_logit_softcapping=50.0))
    assert capped.unreadable == "config.json sets attn_logit_softcapping, which its class of transformers ignores"


def test_attention_is_known_but_for_what_no_record_says() -> None:
    known = tiny_config("gemma2", attn_logit_softcapping=50.0, sliding_window=8)
    assert FAMILIES["gemma2"].of(known).traits.unmodelled == []
    both_ways = tiny_config("gemma2", use_bidirectional_attention=True)
    assert FAMILIES["gemma2"].of(both_ways).traits.unmodelled == ["use_bidirectional_attention"]
