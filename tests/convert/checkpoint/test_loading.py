"""What a class takes of a checkpoint is what transformers takes: names, shapes, complaints and every bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import rows
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY, tiny_config, tiny_model
from written import ok

from attention.errors import Failure
from convert.checkpoint.loading import ClassTensors, empty_model
from convert.families import FAMILIES
from eval.inputs.reader import Reader, TensorInfo

Tensors = dict[str, torch.Tensor]

EXPERTS = [name for name in FAMILIES if ("moe" in name or name == "mixtral") and name != "granitemoe"]  # one by one in files
SWITCHES = dict.fromkeys(
    ("attention_bias", "use_bias", "use_qkv_bias", "qkv_bias", "attention_out_bias", "qk_layernorm", "use_qk_norm", "mlp_bias"),
    True,
)


def changed(path: Path, change: Callable[[Tensors], object], **config: Any) -> Path:
    """The checkpoint with other tensors, and other values in its config."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | config))
    return path


def tensors_of(path: Path) -> tuple[ClassTensors, Reader]:
    from transformers import AutoConfig

    reader = Reader(path)
    return ClassTensors(empty_model(AutoConfig.from_pretrained(path)), reader.infos), reader


def agreed(path: Path, renamed: dict[str, str] | None = None) -> ClassTensors:
    """What is said of a checkpoint, once it is found to be what transformers says and makes of it.

    `renamed` has unexpected tensors by their names in the checkpoint, where transformers reports another.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
    )
    found, reader = tensors_of(path)
    assert set(found.missing) == set(info["missing_keys"])
    assert {(renamed or {}).get(name, name) for name in found.unexpected} == set(info["unexpected_keys"])
    mismatched = {(wrong.parameter, wrong.found, wrong.wanted) for wrong in found.mismatched}
    assert mismatched == {(name, tuple(got), tuple(wants)) for name, got, wants in info["mismatched_keys"]}
    loaded = model.state_dict()
    assert tuple(loaded) == found.names
    for name in set(found.names) - set(found.missing) - {wrong.parameter for wrong in found.mismatched}:
        assert torch.equal(found.tensor(name, reader.__getitem__), loaded[name]), name
    given = {source for name in found.names for source in found.sources(name)}
    assert given | set(found.unexpected) | set(found.ignored) == reader.infos.keys()
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(model_type: str, **changes: Any) -> Path:
        tiny_model(tiny_config(model_type, **changes)).save_pretrained(tmp_path / model_type)
        return tmp_path / model_type

    return save


# ---- every family ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", rows(FAMILIES))
def test_intact_checkpoints(model_type: str, saved: Callable[..., Path]) -> None:
    found = agreed(saved(model_type, **SWITCHES))
    assert (found.missing, found.unexpected, found.ignored, found.mismatched) == ((), (), (), ())


@pytest.mark.parametrize("model_type", rows(FAMILIES, ["llama", "gpt2", "mixtral", "phi", "falcon", "olmo"]))
def test_missing_strange_and_misshaped_tensors(model_type: str, saved: Callable[..., Path]) -> None:
    roles = (f"layers.1.mlp.{part}.weight" for part in ("down", "experts.0.down", "experts.down"))
    places = [place.name for role in roles if (place := FAMILIES[model_type].names.holding(role))]

    def damage(tensors: Tensors) -> None:
        del tensors[next(name for name in places if name in tensors)]
        norms = [name for name in sorted(tensors) if ("norm" in name or "ln_" in name) and "self_attn" not in name]
        misshaped = norms or [name for name in sorted(tensors) if "up_proj" in name]  # olmo's norms have no gains
        tensors[misshaped[0]] = torch.ones(64, 1)
        tensors[misshaped[-1]] = torch.ones(32)
        tensors["model.layers.1.strange.weight"] = torch.ones(3)
        tensors["strange"] = torch.ones(())
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    found = agreed(changed(saved(model_type), damage))
    strange = ("model.layers.1.strange.weight", "strange")
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"  # classes with several rotary tables do not know that name
    assert (found.ignored, found.unexpected) in (((frequencies,), strange), ((), (frequencies, *strange)))
    assert len(found.mismatched) + len(found.missing) == 3


@pytest.mark.parametrize(
    "model_type", rows(["llama", "mixtral", "gemma2", "phi", "cohere", "glm4", "granitemoe"], ["llama", "gemma2"])
)
def test_heads_and_embeddings_that_are_tied_or_not(model_type: str, saved: Callable[..., Path]) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    path = saved(model_type)
    tensors = load_file(path / "model.safetensors")
    matrix = tensors.get(head, tensors[embedding])
    for there in ({embedding, head}, {embedding}, {head}, set()):
        for tied in (True, False):

            def change(tensors: Tensors, there: set[str] = there) -> None:
                for name in (embedding, head):
                    tensors.pop(name, None)
                tensors.update({name: matrix.clone() for name in there})

            found = agreed(changed(path, change, tie_word_embeddings=tied))
            lost = {embedding, head} - there
            assert {name for name in found.missing if name in lost} == (set() if tied and there else lost)


@pytest.mark.parametrize("model_type", rows(EXPERTS, ["mixtral", "olmoe"]))
def test_experts(model_type: str, saved: Callable[..., Path]) -> None:
    path = saved(model_type)
    whole = load_file(path / "model.safetensors")
    second = [name for name in whole if "layers.1." in name and ".experts.1." in name]
    assert len(second) == 3

    found = agreed(changed(path, lambda tensors: [tensors.pop(name) for name in second]))
    assert {wrong.parameter.rpartition(".")[2] for wrong in found.mismatched} == {"down_proj", "gate_up_proj"}
    assert [wrong.found[0] for wrong in found.mismatched if wrong.found] == [1, 1]

    deeper = [name.replace("layers.1.", "layers.7.") for name in second]

    def deepen(tensors: Tensors) -> None:
        tensors.update(whole | {name: torch.ones(2, 2) for name in deeper})

    names = {"w1": "gate_up_proj", "w3": "gate_up_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    renamed = {name: f"model.layers.7.mlp.experts.{names.get(name.split('.')[-2], 'down_proj')}" for name in deeper}
    found = agreed(changed(path, deepen), renamed)
    assert sorted(found.unexpected) == sorted(deeper)


@pytest.mark.parametrize("model_type", rows(EXPERTS, ["mixtral"]))
def test_experts_that_cannot_be_stacked(model_type: str, saved: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    path = saved(model_type)
    lost = next(name for name in load_file(path / "model.safetensors") if ".experts.0.w1" in name or ".experts.0.gate" in name)
    changed(path, lambda tensors: tensors.pop(lost))
    with pytest.raises(RuntimeError, match="automatic conversion"):
        AutoModelForCausalLM.from_pretrained(path, ignore_mismatched_sizes=True)
    found, reader = tensors_of(path)
    (wrong,) = found.mismatched
    assert wrong.found is None
    assert wrong.parameter.endswith("mlp.experts.gate_up_proj")
    assert len(wrong.names) == 3
    with pytest.raises(Failure, match=r"disagree: .*gate_up_proj cannot be made of its 3 tensors, .*by the config it is \[2,"):
        found.tensor(wrong.parameter, reader.__getitem__)


# ---- other checkpoints -----------------------------------------------------------------------------------------------


def test_latent_attention_as_it_is_converted(
    checkpoint: Callable[..., Path], convert: Callable[..., Any], tmp_path: Path
) -> None:
    ok(convert("mla", checkpoint(), tmp_path / "out", "--method", "svd", "--kv-lora-rank", 16, "--qk-rope-head-dim", 8))
    found = agreed(tmp_path / "out")
    assert (found.missing, found.unexpected, found.mismatched) == ((), (), ())

    def damage(tensors: Tensors) -> None:
        del tensors["model.layers.0.self_attn.kv_a_layernorm.weight"]
        tensors["model.layers.1.self_attn.kv_b_proj.weight"] = torch.ones(3, 3)

    found = agreed(changed(tmp_path / "out", damage))
    assert found.missing == ("model.layers.0.self_attn.kv_a_layernorm.weight",)
    assert [wrong.found for wrong in found.mismatched] == [(3, 3)]


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_checkpoints_of_the_model_without_its_head(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(model_type))
    model.base_model.save_pretrained(tmp_path)
    found = agreed(tmp_path)
    assert found.missing == (("lm_head.weight",) if model_type == "llama" else ())
    name = next(name for name in found.names if "layers.2." in name or "h.2." in name)
    assert found.sources(name) == (name.partition(".")[2],)


def test_gpt2_as_it_was_first_published(tmp_path: Path) -> None:
    """Without a prefix, and with causal masks that nothing reads any more."""
    model = tiny_model(tiny_config("gpt2"))
    model.base_model.save_pretrained(tmp_path)

    def change(tensors: Tensors) -> None:
        tensors.update({f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(3)})

    assert agreed(changed(tmp_path, change)).ignored == ("h.0.attn.bias", "h.1.attn.bias", "h.2.attn.bias")


def test_of_two_tensors_with_one_new_name_the_first_is_taken(tmp_path: Path) -> None:
    tiny_model(tiny_config("bert", is_decoder=True)).save_pretrained(tmp_path)

    def change(tensors: Tensors) -> None:
        tensors["bert.embeddings.LayerNorm.gamma"] = torch.full((64,), 7.0)

    found, reader = tensors_of(changed(tmp_path, change))
    assert found.sources("bert.embeddings.LayerNorm.weight") == ("bert.embeddings.LayerNorm.gamma",)
    assert found.tensor("bert.embeddings.LayerNorm.weight", reader.__getitem__)[0] == 7


def test_one_tensor_for_several_parameters(tmp_path: Path) -> None:
    tiny_model(tiny_config("hrm_text")).save_pretrained(tmp_path)
    found = agreed(tmp_path)
    converted = {name: found.sources(name) for name in found.names if found.is_converted(name)}
    assert len(set(converted.values())) < len(converted)


# ---- without reading -------------------------------------------------------------------------------------------------


def test_no_weights_are_read_and_only_what_is_asked_for_is_made(saved: Callable[..., Path]) -> None:
    found, reader = tensors_of(saved("mixtral"))
    read: list[str] = []

    def note(name: str) -> torch.Tensor:
        read.append(name)
        return reader[name]

    made = found.tensor("model.layers.1.mlp.experts.down_proj", note)
    assert made.shape == (2, 64, 32)
    assert sorted(read) == [f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(2)]
    assert sorted(read) == sorted(found.sources("model.layers.1.mlp.experts.down_proj"))
    assert found.is_converted("model.layers.1.mlp.experts.down_proj")
    assert not found.is_converted("model.layers.1.mlp.gate.weight")


def test_what_is_stored_stays_as_it_is(saved: Callable[..., Path]) -> None:
    found, _ = tensors_of(saved("llama"))
    given = torch.ones(VOCABULARY, 64, dtype=torch.bfloat16, requires_grad=True)
    assert found.tensor("lm_head.weight", {"lm_head.weight": given}.__getitem__) is given


def test_missing_and_misshaped_parameters_are_not_given(saved: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = torch.ones(5, 64)

    found, reader = tensors_of(changed(saved("llama"), change))
    with pytest.raises(Failure, match=r"the checkpoint lacks tensor model\.norm\.weight"):
        found.tensor("model.norm.weight", reader.__getitem__)
    with pytest.raises(Failure, match=rf"lm_head\.weight is \[5, 64\], by the config it is \[{VOCABULARY}, 64\]"):
        found.tensor("lm_head.weight", reader.__getitem__)
    assert found.sources("model.norm.weight") == ()


def test_experts_are_stacked_in_the_order_of_their_numbers() -> None:
    model = empty_model(tiny_config("qwen3_moe", num_hidden_layers=12, num_experts=64, num_local_experts=64))
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in model.state_dict().items() if ".experts." not in name}
    for layer in range(12):
        for expert in range(64):
            for part, shape in (("gate", (16, 64)), ("up", (16, 64)), ("down", (64, 16))):
                infos[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"] = TensorInfo(shape, torch.bfloat16)
    found = ClassTensors(model, infos)
    assert (found.missing, found.unexpected, found.mismatched) == ((), (), ())
    assert found.sources("model.layers.3.mlp.experts.down_proj")[10] == "model.layers.3.mlp.experts.10.down_proj.weight"
