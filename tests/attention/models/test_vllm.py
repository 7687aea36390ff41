"""The plugin for vLLM, without vLLM: what it registers, warns of and refuses. tests/engines runs it."""

import logging
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_config
from transformers import AutoConfig

from attention.models.modeling_kvfold import KvfoldForCausalLM, KvfoldModel
from attention.models.vllm import PROVEN, TRIED, latent_objection, length_objection, objection, register
from convert.families import FAMILIES
from convert.hosts.kvfold import HOST


class Registry:
    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def get_supported_archs(self) -> set[str]:
        return set(self.known)

    def register_model(self, name: str, place: str) -> None:
        assert name not in self.known
        self.known[name] = place


class Sizes:
    """By which vLLM knows whether a config has a latent, where its model type has no class of its own for it."""

    def __init__(self, hf_text_config: Any) -> None:
        self.hf_text_config = hf_text_config


def fake(monkeypatch: pytest.MonkeyPatch, version: str, cpu: bool = False) -> Any:
    module, sizes = SimpleNamespace(__version__=version, ModelRegistry=Registry()), SimpleNamespace()
    module.platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: cpu))
    sizes.MODEL_ARCH_CONFIG_CONVERTORS, sizes.ModelArchConfigConvertorBase = {}, Sizes
    monkeypatch.setitem(sys.modules, "vllm", module)  # type: ignore[arg-type]
    monkeypatch.setitem(
        sys.modules,
        "vllm.transformers_utils",
        SimpleNamespace(model_arch_config_convertor=sizes),  # type: ignore[arg-type]
    )
    module.sizes = sizes.MODEL_ARCH_CONFIG_CONVERTORS
    return module


def test_vllm_finds_it_and_may_load_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = fake(monkeypatch, f"{TRIED}.1")
    (point,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "kvfold")
    for _ in range(2):
        point.load()()
    assert vllm.ModelRegistry.known == {"KvfoldForCausalLM": "attention.models.vllm_model:KvfoldForCausalLM"}
    latents = [vllm.sizes["kvfold"](SimpleNamespace(kv_lora_rank=rank)).is_deepseek_mla() for rank in (16, None)]
    assert latents == [True, False]


def test_a_kernel_that_lists_bfloat16_alone_refuses_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, f"{TRIED}.1", cpu=True)
    backend, kernel = SimpleNamespace(supported_dtypes=[torch.bfloat16]), type("AMXMLAImpl", (SimpleNamespace,), {})
    name = "vllm.v1.attention.backends.mla.amx_mla"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(AMXMLABackend=backend, AMXMLAImpl=kernel))  # type: ignore[arg-type]
    for _ in range(2):
        register()
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    assert kernel(heads=4).heads == 4
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float16)
    with pytest.raises(ValueError, match=r"wrongly in torch\.float16; give --dtype bfloat16"):
        kernel(heads=4)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.320.0", "1.0"])
def test_other_versions_are_named_and_nothing_is_registered(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = fake(monkeypatch, version)
    with caplog.at_level(logging.WARNING, "kvfold"):
        register()
    assert not vllm.ModelRegistry.known
    assert not vllm.sizes
    assert f"this is {version}: checkpoints of that class do not start" in caplog.text


def test_what_fails_in_it_only_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=f"{TRIED}.0"))
    with caplog.at_level(logging.WARNING, "kvfold"):
        register()
    assert "vLLM will not know kvfold's class" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "latent", "changes", "message"),
    [
        ("gpt2", False, {}, None),
        ("qwen3", False, {}, None),
        ("qwen3", True, {}, None),
        ("gpt2", False, {"inner_windows": [4, None]}, "windows inside its attention"),
        ("qwen3", True, {"rope": {"rope_type": "dynamic", "factor": 2.0}}, "its RoPE (dynamic) depends on the length"),
        ("phi", True, {"rope": {"full_attention": {"rope_type": "longrope"}}}, "its RoPE (longrope) depends on the length"),
        ("qwen3", True, {"rope": {"rope_type": "yarn", "factor": 2.0}}, None),
        ("qwen3", False, {"layer_types": ["full_attention", "sliding_attention"]}, "larger than planned"),
        ("bloom", False, {}, "its grouped attention is built around bloom, which was not run there"),
        ("opt", True, {}, "its latent attention is built around opt, which was not run there"),
        ("qwen3", True, {"kept_layers": [1]}, "1 of its layers are as in its source"),
    ],
)
def test_what_vllm_would_run_wrongly_is_refused(
    model_type: str, latent: bool, changes: dict[str, Any], message: str | None
) -> None:
    inner = SimpleNamespace(
        model_type=model_type,
        kv_lora_rank=16 if latent else None,
        layer_types=changes.get("layer_types"),
        rope_parameters=changes.get("rope"),
    )
    reason = objection(SimpleNamespace(**{"text_config": inner, "inner_windows": None, "kept_layers": None} | changes))
    assert (reason is None) if message is None else (message in str(reason))


@pytest.mark.parametrize(
    ("window", "cap", "message"), [(None, None, None), (64, None, "sees 64 tokens"), (None, 50.0, "capped at 50.0")]
)
def test_what_vllms_latent_attention_would_leave_out_is_refused(
    window: int | None, cap: float | None, message: str | None
) -> None:
    reason = latent_objection(SimpleNamespace(sliding_window=window, softcap=cap))
    assert (reason is None) if message is None else (message in str(reason))


def test_vllm_takes_no_more_positions_than_a_result_is_calibrated_for() -> None:
    """Of linear RoPE and YaRN it takes those of config.json times their factor."""
    config = tiny_config("qwen3", calibrated_positions=32, source_positions=128, max_position_embeddings=32)
    assert length_objection(config, 32) is None
    assert str(length_objection(config, 128)).startswith("vLLM would take 128 positions, and it is calibrated for 32 of")
    assert length_objection(tiny_config("qwen3"), 1000) is None


@pytest.mark.parametrize("model_type", PROVEN)
def test_the_base_model_has_the_weights_of_the_class_with_a_head(model_type: str) -> None:
    """vLLM builds the first from the files of the second."""
    source = tiny_config(model_type, **({"use_qk_norm": True} if model_type == "cohere" else {}))
    family = FAMILIES[model_type].of(source)
    raw = source.to_dict() | {"dtype": "float32"}
    config = AutoConfig.for_model(**HOST.config(raw, family, family.spec.grouped(2), None))
    whole, base = KvfoldForCausalLM(config).eval(), KvfoldModel(config).eval()
    weights = {name.removeprefix("model."): tensor for name, tensor in whole.state_dict().items()}
    missing, unexpected = base.load_state_dict(weights, strict=False)
    assert not missing
    assert set(unexpected) <= {"lm_head.weight", "embed_out.weight"}
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        states = whole.model(ids, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(base(ids).last_hidden_state, states)
