"""What a row says of a class is proved on a small twin of it, and a wrong row is not."""

from dataclasses import replace
from typing import Any

import pytest
from rows import rows
from tiny import ROPES, switched, tiny_config

from attention.rope import Rotary
from convert.families import FAMILIES
from convert.families.heads import Projections
from convert.families.projections import NAMES
from convert.families.reading.twin import Twin, disproof, kinds

WINDOWED = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1, "window_size": 7}


@pytest.mark.parametrize("model_type", rows(name for name, family in FAMILIES.items() if family.has_heads))
def test_every_row_is_proved(model_type: str) -> None:
    twin = Twin(switched(model_type, True, **WINDOWED))
    assert disproof(FAMILIES[model_type].of(twin.config), twin) is None


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rope_is_proved(kind: str) -> None:
    twin = Twin(tiny_config("llama", rope_parameters=ROPES[kind]))
    assert disproof(FAMILIES["llama"], twin) is None


def norm_of(model_type: str, **changes: Any) -> Any:
    row: Any = FAMILIES[model_type]
    return replace(row.norm, **changes)


SPOILT: dict[str, tuple[str, dict[str, Any]]] = {
    "pairing": ("llama", {"pairing": "interleaved"}),
    "scale": ("granite", {"scaled_by": None}),
    "norm behind RoPE": ("qwen3", {"norm": norm_of("qwen3", after_rotary=True)}),
    "gains less one": ("gemma3_text", {"norm": norm_of("gemma3_text", gain_offset=0.0)}),
    "kind of norm": ("cohere", {"norm": norm_of("cohere", kind="rms")}),
    "window": ("mistral", {"extra_features": ()}),
    "bias": ("qwen2", {"qkv_bias": False}),
    "rotary share": ("nemotron", {"partial_rotary": False}),
    "cap": ("gemma2", {"extra_features": ("sliding_window",)}),
    "layers with RoPE": ("smollm3", {"rotates": lambda config, layer: True}),
    "path": ("llama", {"attention_path": "model.layers.{layer}.attention"}),
    "output": ("phi", {"projections": NAMES}),
}


@pytest.mark.parametrize("field", SPOILT)
def test_a_wrong_row_is_refuted(field: str) -> None:
    model_type, spoilt = SPOILT[field]
    changes = {"cap": {"attn_logit_softcapping": 0.4}, "layers with RoPE": {"no_rope_layers": [1, 0, 1]}}.get(field, {})
    twin = Twin(switched(model_type, True, **(WINDOWED | changes)))
    assert disproof(FAMILIES[model_type].of(twin.config), twin) is None
    wrong = disproof(replace(FAMILIES[model_type], **spoilt), twin)
    assert wrong.startswith("layer ")


def test_a_wrong_slope_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, row = Twin(tiny_config("bloom")), FAMILIES["bloom"]
    slopes = row.of(twin.config).slopes
    monkeypatch.setattr(type(row), "slopes", property(lambda self: tuple(slope / 2 for slope in slopes)))
    assert disproof(row, twin) is not None


def test_wrong_frequencies_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, row = Twin(tiny_config("llama")), FAMILIES["llama"]
    right = row.of(twin.config).rotary(0)
    monkeypatch.setattr(Projections, "rotary", lambda self, layer: Rotary(right.frequencies * 1.01))
    assert disproof(row, twin) is not None


def test_a_twin_has_layers_of_every_kind_and_stays_small() -> None:
    config = tiny_config(
        "smollm3", num_hidden_layers=30, no_rope_layers=[1] * 20 + [0] * 10, hidden_size=512, num_attention_heads=32,
        num_key_value_heads=8, head_dim=16, intermediate_size=4096, vocab_size=50000,
    )  # fmt: skip
    twin = Twin(config)
    assert twin.layers == [0, 1, 2, 3, 20]
    assert set(kinds(config, twin.lists)) == set(kinds(twin.config, twin.lists))
    assert sum(parameter.numel() for parameter in twin.model.parameters()) < 2e5
    assert config.num_hidden_layers == 30, "the config itself stays"
