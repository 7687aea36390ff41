"""Models are scored beside their source, whose score does not depend on how many others there are; caches have their size."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import random_model, tiny_config, tiny_model
from written import Make

from attention.encoded_forward import store_encoded
from attention.errors import Failure
from attention.spec import AttentionSpec
from eval.inputs.loading import load
from eval.inputs.source import Source
from eval.inputs.text import Text
from eval.quality import lockstep
from eval.quality.evaluation import report_of
from eval.quality.lockstep import cache_figures, measured_bytes_per_token
from eval.quality.settings import EvaluationSettings

TEXT = Text("novel.txt", "It was a bright cold day in April, and the clocks were striking thirteen. " * 5)
SHORT = EvaluationSettings(contexts=(32, 16), device="cpu")
SCORED = 370 // 32 * 31 + 370 // 16 * 15  # at both contexts


@pytest.fixture
def models(checkpoint: Make) -> list[Source]:
    """A source and three others."""
    paths = [checkpoint(num_hidden_layers=1)]
    paths += [checkpoint(name=f"m{n}", num_key_value_heads=1 + n % 2, num_hidden_layers=1) for n in range(3)]
    return [Source.parse(str(path)) for path in paths]


@pytest.mark.parametrize(("small", "expected"), [(0, [0, 1, 1, 1]), (2.5, [0, 1, 2, 1]), (3, [0, 1, 2, 3])])
def test_models_are_in_memory_together_only_while_they_are_small(
    small: float, expected: list[int], models: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the groups, the report is the same."""
    whole = report_of(models, TEXT, SHORT)
    loaded, alive = list[weakref.ref[Any]](), list[int]()
    stages: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def watched(source: Source, *how: str) -> Iterator[Any]:
        alive.append(sum(reference() is not None for reference in loaded))
        with load(source, *how) as model:
            loaded.append(weakref.ref(model))
            yield model

    size = max((model.files / "model.safetensors").stat().st_size for model in models)
    monkeypatch.setattr(lockstep, "_SMALL", small * size)

    def told(name: str, done: int, total: int, unit: str) -> None:
        stages[name] = done, total

    found = report_of(models, TEXT, SHORT, progress=told, opening=watched)
    assert found == whole
    assert alive == expected, "models that are there while another is loaded"
    assert set(stages.values()) == {(SCORED, SCORED)}
    assert len(stages) == 4 - max(expected)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi": {},
    "mistral": {"sliding_window": 64},
    "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


@pytest.mark.parametrize(
    ("model_type", "kv_heads", "kind", "expected"),
    [
        *(("llama", *row) for row in ((8, "MHA", 1536), (4, "GQA-4", 768), (1, "MQA", 192))),
        *((name, 2, "GQA-2", 384) for name in FAMILIES),
    ],
)
def test_a_live_cache_holds_what_is_predicted(model_type: str, kv_heads: int, kind: str, expected: int) -> None:
    model = tiny_model(tiny_config(model_type, num_key_value_heads=kv_heads, **FAMILIES[model_type]))
    spec = AttentionSpec.from_config(model.config)
    assert spec.kind == kind
    # 3 layers × key and value × KV heads × 8 dims × 4 bytes
    assert measured_bytes_per_token(model, "float32") == spec.bytes_per_token("float32") == expected
    # In the dtype asked for, whatever it runs in.
    assert measured_bytes_per_token(model.to(torch.bfloat16), "float32") == expected
    assert measured_bytes_per_token(model, "float16") == spec.bytes_per_token("float16") == expected / 2


def test_sizes_of_their_own_are_measured() -> None:
    wide = tiny_model(tiny_config("llama", head_dim=24, num_key_value_heads=2))
    spec = AttentionSpec.from_config(wide.config)
    assert measured_bytes_per_token(wide, "bfloat16") == spec.bytes_per_token("bfloat16") == 576
    short = tiny_model(tiny_config("mistral", sliding_window=8))
    assert measured_bytes_per_token(short, "float32", 7) == 3 * 2 * 4 * 8 * 4, "within its window"


def test_the_figures_of_a_converted_model() -> None:
    model = tiny_model(tiny_config("llama", num_key_value_heads=2))
    figures = cache_figures(model, AttentionSpec.from_config(model.config), "bfloat16", source_bytes=768)
    assert figures == {
        "cache_dtype": "bfloat16",
        "cache_format": None,
        "kv_bytes_per_token": 192,
        "kv_bytes_measured": 192.0,
        "cache_ratio": 0.25,
    }


def test_a_cache_that_holds_something_else_fails_with_both_numbers() -> None:
    model = tiny_model(tiny_config("llama"))
    with pytest.raises(Failure, match=r"live cache of LlamaForCausalLM holds 384 bytes per token.* predicts 192") as caught:
        cache_figures(model, AttentionSpec.from_config(model.config).grouped(2), "bfloat16", source_bytes=384)
    assert "report the model type" in str(caught.value.hint)
    hybrid = tiny_model(tiny_config("lfm2", layer_types=["conv", "full_attention", "conv"]))  # two layers cache no keys
    with pytest.raises(Failure, match=r"holds 128 bytes per token.* predicts 384"):
        cache_figures(hybrid, AttentionSpec.from_config(hybrid.config), "bfloat16", source_bytes=384)


def test_an_encoder_has_no_cache_to_measure() -> None:
    from transformers import BertConfig, BertLMHeadModel

    model = BertLMHeadModel(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=32)
    )
    with pytest.raises(Failure, match="BertLMHeadModel keeps no KV cache"):
        measured_bytes_per_token(model.eval(), "float32")


WINDOWED = FAMILIES | {"gpt_oss": {"sliding_window": 64}, "llama4_text": {"attention_chunk_size": 64}}


WINDOWED_ROWS = [("mistral", None), ("mistral", "int4"), ("gemma3_text", "int8"), ("gpt_oss", "int4"), ("llama4_text", None)]


@pytest.mark.parametrize(("model_type", "form"), WINDOWED_ROWS)
def test_what_windows_keep_out_of_the_cache_is_not_counted(model_type: str, form: str | None) -> None:
    sizes = {"max_position_embeddings": 512, "num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 4}
    fields = {key: value for key, value in WINDOWED[model_type].items() if key != "layer_types"}
    model = random_model(tiny_config(model_type, **sizes | fields))
    spec = AttentionSpec.from_config(model.config)
    whole = spec.bytes_per_token("float32")
    if form:
        store_encoded(model, form)
    for context, cut in ((63, False), (64, True), (256, True)):
        before = spec.bytes_per_token("float32", context)
        figures = cache_figures(model, spec, "float32", before, form, context)  # measures, too
        held = spec.cache_bytes(form or "float32", context) / context
        assert figures["kv_bytes_per_token"] == figures["kv_bytes_measured"] == held
        assert figures.get("kv_context") == (context if cut else None)
        assert before < whole if cut else before == whole
        assert form is not None or figures["cache_ratio"] == 1
