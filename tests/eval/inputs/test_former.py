"""Former model types: what is refused by their configs, and what another class of transformers computes of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from formers import CONFIGS, TOKENS, config_of, model_of, tensors_of, write
from safetensors.torch import load_file
from tiny import save_tokenizer
from written import Convert, ok, refused

from attention.errors import Failure, Refusal
from eval.inputs.former import FORMERS, former_of
from eval.inputs.loading import load
from eval.inputs.source import Source


def said(model: Any) -> torch.Tensor:
    """What a model says to some ids."""
    ids = torch.randint(TOKENS, (1, 29), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
    return found


def said_by(source: Source) -> torch.Tensor:
    with load(source, "float32", "cpu") as model:
        return said(model)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_checkpoint_says_what_the_class_that_computes_the_same_says(kind: str, tmp_path: Path) -> None:
    source = Source.parse(str(write(tmp_path / "old", kind)))
    assert "auto_map" not in source.raw
    assert not source.needs_code
    (note,) = source.notes
    assert f"its model type {kind!r} is read as {source.model_type}, without its own code" in note
    torch.testing.assert_close(said_by(source), said(model_of(kind)), rtol=1e-4, atol=1e-4)


def test_every_type_is_compared_and_documented() -> None:
    assert set(CONFIGS) == set(FORMERS)
    documented = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert all(f"`{model_type}`" in documented for model_type in FORMERS)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("stablelm_epoch", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor is 2.0; it must be 1.0, which is all that"),
    ("internlm", {"rotary": {"type": "linear"}}, "rotary is {'type': 'linear'}; it must be of type 'dynamic'"),
    ("internlm", {"bias": "yes"}, "bias is 'yes'"),
    ("internlm", {"max_position_embeddings": None}, "max_position_embeddings is None; it must be an integer above 0"),
    ("baichuan", {"max_position_embeddings": ...}, "it is a Baichuan-13B by its sizes"),
    ("baichuan", {"hidden_size": 5120}, "it is a Baichuan-13B by its sizes"),
    ("baichuan", {"vocab_size": 125696}, "the second, BaichuanForCausalLM of 125696 tokens, normalises its head"),
    ("baichuan", {"architectures": ["BaichuanForCausalLM"]}, "architectures is ['BaichuanForCausalLM']"),
    ("baichuan", {"architectures": None}, "architectures is None"),
    ("qwen", {"no_bias": False}, "no_bias is False; it must be True, which is all that transformers' class computes"),
    ("qwen", {"kv_channels": 16}, "kv_channels is 16; it must be 12"),
    ("qwen", {"visual": {"width": 8}}, "visual is {'width': 8}; it must be None"),
    ("qwen", {"seq_length": ...}, "seq_length is None; it must be an integer above 0"),
    ("Yi", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is {'type': 'linear'"),
    ("phi-msft", {"num_local_experts": 4}, "num_local_experts is 4; it must be None"),
    ("phi-msft", {"n_head_kv": 2}, "n_head_kv is 2; it must be None or 4"),
    ("phi-msft", {"n_embd": 392, "rotary_dim": 2}, "rotary_dim is 2, which no partial_rotary_factor of 98 dims gives"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED, ids=[f"{kind} {next(iter(one))}" for kind, one, _ in REFUSED])
def test_what_the_class_does_not_compute_is_refused(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {key: value for key, value in (config_of(kind) | changes).items() if value is not ...}
    with pytest.raises(Refusal) as caught:
        Source.parse(str(with_config(tmp_path, config))).raw  # noqa: B018
    assert message in str(caught.value)


def test_what_a_config_leaves_out_is_what_its_own_code_takes() -> None:
    def read(kind: str, *left_out: str) -> dict[str, Any]:
        former = former_of({key: value for key, value in config_of(kind).items() if key not in left_out}, "config.json")
        assert former is not None
        return former.config

    assert read("Yi", "rope_theta")["rope_theta"] == 5e6
    assert not read("RefinedWebModel", "parallel_attn", "multi_query")["parallel_attn"]
    assert read("phi-msft", "bos_token_id", "eos_token_id")["eos_token_id"] is None
    # Beyond that length, Qwen scales RoPE and queries.
    assert read("qwen")["max_position_embeddings"] == CONFIGS["qwen"]["seq_length"]


def with_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("pickled", [False, True])
def test_parts_of_a_stack_keep_their_bits_and_the_weights_say_their_dtype(pickled: bool, tmp_path: Path) -> None:
    before = {name: tensor.bfloat16() for name, tensor in tensors_of("baichuan").items()}
    path = write(tmp_path / "old", "baichuan", before, shards=1 if pickled else 3)
    with_config(path, {key: value for key, value in config_of("baichuan").items() if key != "torch_dtype"})
    if pickled:
        torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
    source = Source.parse(str(path))
    reader = source.reader()
    after = {name: reader[name] for name in reader.infos}
    assert source.dtype == "bfloat16"
    assert {name: tuple(tensor.shape) for name, tensor in after.items()} == {n: i.shape for n, i in reader.infos.items()}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn"
        parts = [after.pop(f"{name}.{part}_proj.weight") for part in "qkv"]
        assert torch.equal(torch.cat(parts), before.pop(f"{name}.W_pack.weight"))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)


def test_a_tensor_that_its_code_has_not_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("qwen") | {"transformer.h.0.attn.c_proj.bias": torch.ones(48)}
    with pytest.raises(Failure, match=r"this model type has tensors of other names than transformer\.h\.0\.attn\.c_proj\.bias"):
        Source.parse(str(write(tmp_path / "old", "qwen", tensors))).reader()
    tensors = tensors_of("baichuan") | {"model.layers.1.self_attn.W_pack.weight": torch.ones(100, 48)}
    with pytest.raises(Failure, match=r"W_pack\.weight is \[100, 48\], which does not stack 3 equal parts"):
        Source.parse(str(write(tmp_path / "odd", "baichuan", tensors))).reader()


def test_its_own_code_may_measure_what_is_refused(convert: Convert, tmp_path: Path) -> None:
    config = {key: value for key, value in config_of("baichuan").items() if key != "max_position_embeddings"}
    trusted = Source.parse(str(with_config(tmp_path, config)), trust_remote_code=True)
    assert (trusted.model_type, trusted.needs_code, trusted.notes, trusted.is_former) == ("baichuan", True, (), False)
    refused(convert("inspect", tmp_path), 2, "ALiBi")
    with_config(tmp_path, {key: value for key, value in config.items() if key != "auto_map"})
    with pytest.raises(Refusal, match="ALiBi"):
        Source.parse(str(tmp_path), trust_remote_code=True).raw  # noqa: B018  # there is no code


CODE = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "OwnTokenizer"}


def test_a_conversion_says_what_was_done_and_its_result_needs_no_code(convert: Convert, tmp_path: Path) -> None:
    path, note = write(tmp_path / "old", "internlm"), "its model type 'internlm' is read as llama, without its own code"
    save_tokenizer(path, TOKENS)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | CODE))
    assert note in ok(convert("plan", path)).stdout
    done = ok(convert("gqa", path, tmp_path / "out", "--groups", 4, "--no-text", "--heal", 0, "--force"))
    assert note in done.stdout
    assert note in (tmp_path / "out" / "README.md").read_text()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"], config["vocab_size"]) == ("llama", 4, TOKENS)
    before, after = (Source.parse(str(where)) for where in (path, tmp_path / "out"))
    assert torch.equal(said_by(before), said_by(after)), "as many groups as heads lose nothing"
    assert before.tokenizer()("a text")["input_ids"] == after.tokenizer()("a text")["input_ids"]
    assert "auto_map" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def test_a_tokenizer_that_only_its_own_code_reads_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "old", "qwen")
    (path / "tokenizer_config.json").write_text(json.dumps(CODE))
    (path / "qwen.tiktoken").write_text("")
    with pytest.raises(Failure, match="is code of its own, which is not run") as caught:
        Source.parse(str(path)).tokenizer()
    assert "tokenizer.json" in caught.value.hint
