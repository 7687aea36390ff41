"""Former model types: what is refused by their configs, and what another class of transformers computes of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from formers import CONFIGS, TOKENS, config_of, logits, tensors_of, write
from safetensors.torch import load_file
from written import Convert, refused

from attention.errors import Failure, Refusal
from eval.inputs.former import FORMERS, former_of
from eval.inputs.source import Source


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_class_of_transformers_says_what_its_own_code_says(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = Source.parse(str(write(tmp_path / "old", kind)))
    assert "auto_map" not in source.raw
    assert not source.needs_code
    (note,) = source.notes
    assert f"its model type {kind.removesuffix('2')!r} is read as {source.model_type}, without its own code" in note
    model, loaded = AutoModelForCausalLM.from_pretrained(source.files, output_loading_info=True)
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.config.model_type, model.config.architectures) == (source.model_type, [type(model).__name__])
    ids = torch.randint(TOKENS, (29,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        said = model(ids[None]).logits[0]
    torch.testing.assert_close(said, logits(kind, tensors_of(kind), ids), rtol=1e-4, atol=1e-4)


def test_every_type_is_compared_and_documented() -> None:
    assert {kind.removesuffix("2") for kind in CONFIGS} == set(FORMERS)
    documented = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert all(f"`{model_type}`" in documented for model_type in FORMERS)


def test_nothing_beyond_the_length_of_qwen_s_training_is_computed() -> None:
    former = former_of(config_of("qwen"), "config.json")
    assert former is not None
    assert former.config["max_position_embeddings"] == CONFIGS["qwen"]["seq_length"]
    assert "use_dynamic_ntk and use_logn_attn scales beyond 64 tokens is left out" in former.note


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "stablelm_epoch",
            {"rotary_scaling_factor": 2.0},
            "rotary_scaling_factor is 2.0; it must be 1.0, which is all that",
        ),
        ("internlm", {"rotary": {"type": "linear"}}, "rotary is {'type': 'linear'}; it must be of type 'dynamic'"),
        ("internlm", {"rotary": [1]}, "rotary is [1]"),
        ("internlm", {"rotary": {"base": "much"}}, "rope_theta is 'much'; it must be a number from 1"),
        ("internlm", {"bias": "yes"}, "bias is 'yes'"),
        ("internlm", {"max_position_embeddings": None}, "max_position_embeddings is None; it must be an integer above 0"),
        (
            "baichuan",
            {"max_position_embeddings": ...},
            "it is a Baichuan-13B: no class of transformers has such layers",
        ),
        ("baichuan2", {"hidden_size": 5120}, "hidden_size is that of a 13B, with ALiBi"),
        ("baichuan", {"vocab_size": 125696}, "is its head normalised?"),
        ("baichuan2", {"vocab_size": 64000}, "is its head normalised?"),
        ("baichuan", {"architectures": None}, "architectures is None and vocab_size 331: is its head normalised?"),
        ("baichuan2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is {'type': 'linear'"),
        ("qwen", {"no_bias": False}, "no_bias is False; it must be True, which is all that transformers' class computes"),
        ("qwen", {"kv_channels": 16}, "kv_channels is 16; it must be 12"),
        ("qwen", {"rotary_pct": 0.5}, "rotary_pct is 0.5"),
        ("qwen", {"visual": {"width": 8}}, "visual is {'width': 8}; it must be None"),
        ("phi-msft", {"num_local_experts": 4}, "num_local_experts is 4; it must be None"),
        ("Yi", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is {'type': 'linear'"),
        ("qwen", {"seq_length": ...}, "seq_length is None; it must be an integer above 0"),
        (
            "phi-msft",
            {"n_head_kv": 2},
            "n_head_kv is 2; it must be None or 4",
        ),
        ("phi-msft", {"n_embd": 392, "rotary_dim": 2}, "rotary_dim is 2, which no partial_rotary_factor of 98 dims gives"),
        ("deepseek", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek", {"n_shared_experts": None}, "n_shared_experts is None; it must be an integer above 0"),
    ],
)
def test_what_the_class_does_not_compute_is_refused(
    kind: str, changes: dict[str, Any], message: str, convert: Convert, tmp_path: Path
) -> None:
    config = {key: value for key, value in (config_of(kind) | changes).items() if value is not ...}
    with pytest.raises(Refusal) as caught:
        Source.parse(str(with_config(tmp_path, config))).raw  # noqa: B018
    assert message in str(caught.value)
    refused(convert("inspect", tmp_path), 2, message)


def test_what_a_config_leaves_out_is_what_its_own_code_takes() -> None:
    def read(kind: str, *left_out: str) -> dict[str, Any]:
        former = former_of({key: value for key, value in config_of(kind).items() if key not in left_out}, "config.json")
        assert former is not None
        return former.config

    assert read("Yi", "rope_theta")["rope_theta"] == 5e6
    assert not read("RefinedWebModel", "parallel_attn", "multi_query")["parallel_attn"]
    assert read("phi-msft", "bos_token_id", "eos_token_id")["eos_token_id"] is None


def test_the_weights_say_the_dtype_where_the_config_does_not(tmp_path: Path) -> None:
    path = write(tmp_path / "old", "qwen", {name: tensor.bfloat16() for name, tensor in tensors_of("qwen").items()})
    with_config(path, {key: value for key, value in config_of("qwen").items() if key not in ("dtype", "torch_dtype")})
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    assert Source.parse(str(path)).dtype == "bfloat16"


def with_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_its_own_code_may_measure_what_is_refused(tmp_path: Path) -> None:
    config = {key: value for key, value in config_of("baichuan").items() if key != "max_position_embeddings"}
    trusted = Source.parse(str(with_config(tmp_path, config)), trust_remote_code=True)
    assert (trusted.model_type, trusted.needs_code, trusted.notes) == ("baichuan", True, ())
    assert trusted.files == tmp_path
    with_config(tmp_path, {key: value for key, value in config.items() if key != "auto_map"})
    with pytest.raises(Refusal, match="ALiBi"):
        Source.parse(str(tmp_path), trust_remote_code=True).raw  # noqa: B018  # there is no code


def test_a_tensor_that_its_code_has_not_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("qwen") | {"transformer.h.0.attn.c_proj.bias": torch.ones(48)}
    with pytest.raises(Failure, match=r"this model type has tensors of other names than transformer\.h\.0\.attn\.c_proj\.bias"):
        Source.parse(str(write(tmp_path / "old", "qwen", tensors))).files  # noqa: B018
    tensors = tensors_of("baichuan") | {"model.layers.1.self_attn.W_pack.weight": torch.ones(100, 48)}
    with pytest.raises(Failure, match=r"a tensor \[100, 48\] does not stack queries, keys and values"):
        Source.parse(str(write(tmp_path / "odd", "baichuan", tensors))).files  # noqa: B018
