"""The plugin for vLLM, without vLLM: what it registers, warns of and refuses. tests/engines runs it."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_config

from attention.models.configuration_kvfold import KvfoldConfig
from attention.models.modeling_kvfold import KvfoldForCausalLM, KvfoldModel
from attention.models.vllm import PROVEN, TRIED, objection, register


class Registry:
    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def get_supported_archs(self) -> set[str]:
        return set(self.known)

    def register_model(self, name: str, place: str) -> None:
        assert name not in self.known
        self.known[name] = place


def fake(monkeypatch: pytest.MonkeyPatch, version: str) -> Registry:
    module: Any = ModuleType("vllm")
    module.__version__, module.ModelRegistry = version, Registry()
    monkeypatch.setitem(sys.modules, "vllm", module)
    found: Registry = module.ModelRegistry
    return found


def test_vllm_finds_it_and_may_load_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = fake(monkeypatch, f"{TRIED}.1")
    (point,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "kvfold")
    for _ in range(2):
        point.load()()
    assert registry.known == {"KvfoldForCausalLM": "attention.models.vllm_model:KvfoldForCausalLM"}


@pytest.mark.parametrize("version", ["0.31.0", "0.320.0", "1.0"])
def test_other_versions_are_named_and_nothing_is_registered(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = fake(monkeypatch, version)
    with caplog.at_level(logging.WARNING, "kvfold"):
        register()
    assert not registry.known
    assert f"this is {version}: checkpoints of that class do not start" in caplog.text


def test_what_fails_in_it_only_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=f"{TRIED}.0"))
    with caplog.at_level(logging.WARNING, "kvfold"):
        register()
    assert "vLLM will not know kvfold's class" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt2", {}, None),
        ("qwen3", {}, None),
        ("qwen3", {"kv_lora_rank": 16}, "in place of its latent"),
        ("gpt2", {"inner_windows": [4, None]}, "windows inside its attention"),
        ("bloom", {}, "built around bloom, which was not run there"),
    ],
)
def test_what_vllm_would_run_wrongly_is_refused(model_type: str, changes: dict[str, Any], message: str | None) -> None:
    inner = SimpleNamespace(model_type=model_type, kv_lora_rank=changes.pop("kv_lora_rank", None))
    reason = objection(SimpleNamespace(text_config=inner, inner_windows=None, **changes) if not changes else
                       SimpleNamespace(text_config=inner, **changes))  # fmt: skip
    assert (reason is None) if message is None else (message in str(reason))


@pytest.mark.parametrize("model_type", PROVEN)
def test_the_base_model_has_the_weights_of_the_class_with_a_head(model_type: str) -> None:
    """vLLM builds the first from the files of the second."""
    from transformers import AutoConfig

    from convert.families import FAMILIES
    from convert.hosts.kvfold import HOST

    source = tiny_config(model_type, **({"use_qk_norm": True} if model_type == "cohere" else {}))
    target = FAMILIES[model_type].spec(source).grouped(2)
    config = AutoConfig.for_model(**HOST.config(source.to_dict() | {"dtype": "float32"}, source, target, None))
    assert isinstance(config, KvfoldConfig)
    whole, base = KvfoldForCausalLM(config).eval(), KvfoldModel(config).eval()
    weights = {name.removeprefix("model."): tensor for name, tensor in whole.state_dict().items()}
    missing, unexpected = base.load_state_dict(weights, strict=False)
    assert not missing
    assert set(unexpected) <= {"lm_head.weight", "embed_out.weight"}
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        states = whole.model(ids, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(base(ids).last_hidden_state, states)
