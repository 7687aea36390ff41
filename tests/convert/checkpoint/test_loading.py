"""What a class takes of a checkpoint is what transformers takes: names, shapes, complaints and every bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import SMALL
from rows import REPRESENTATIVES, rows
from safetensors.torch import load_file
from tiny import SWITCHES, VOCABULARY, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from written import Convert, Make, damage, edit, left_nothing, ok, weights

from attention.errors import Failure
from convert.checkpoint.loading import ClassTensors, empty_model, require_loadable
from convert.families import FAMILIES
from convert.planning.base import Plan
from eval.inputs.reader import Reader, TensorInfo
from eval.inputs.source import Source

Tensors = dict[str, torch.Tensor]

EXPERTS = [name for name in FAMILIES if ("moe" in name or name == "mixtral") and name != "granitemoe"]  # one by one in files


def tensors_of(path: Path) -> tuple[ClassTensors, Reader]:
    reader = Reader(path)
    return ClassTensors(empty_model(AutoConfig.from_pretrained(path)), reader.infos), reader


def agreed(path: Path, renamed: dict[str, str] | None = None) -> ClassTensors:
    """What is said of a checkpoint, once it is found to be what transformers says and makes of it.

    `renamed` has unexpected tensors by their names in the checkpoint, where transformers reports another.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
    )
    found, reader = tensors_of(path)
    assert set(found.missing) == set(info["missing_keys"])
    assert {(renamed or {}).get(name, name) for name in found.unexpected} == set(info["unexpected_keys"])
    mismatched = {(name, *shapes) for name, shapes in found.mismatched.items()}
    assert mismatched == {(name, tuple(got), tuple(wants)) for name, got, wants in info["mismatched_keys"]}
    loaded = model.state_dict()
    assert tuple(loaded) == found.names
    for name in set(found.names) - set(found.missing) - found.mismatched.keys():
        assert torch.equal(found.tensor(name, reader.__getitem__), loaded[name]), name
    given = {source for name in found.names for source in found.sources(name)}
    assert given | set(found.unexpected) | set(found.ignored) == reader.infos.keys()
    return found


@pytest.mark.parametrize("model_type", rows(FAMILIES, [*REPRESENTATIVES, "deepseek_v3"]))
def test_intact_checkpoints(model_type: str, checkpoint: Make) -> None:
    found = agreed(checkpoint(model_type, **dict.fromkeys((*SWITCHES, "mlp_bias"), True)))
    assert (found.missing, found.unexpected, found.ignored, found.mismatched) == ((), (), (), {})


@pytest.mark.parametrize("model_type", rows(FAMILIES, ["llama", "gpt2", "mixtral", "phi", "falcon", "olmo", "deepseek_v3"]))
def test_missing_strange_and_misshaped_tensors(model_type: str, checkpoint: Make) -> None:
    roles = (f"layers.1.mlp.{part}.weight" for part in ("down", "experts.0.down", "experts.down"))
    places = [place.name for role in roles if (place := FAMILIES[model_type].names.holding(role))]

    def spoil(tensors: Tensors) -> None:
        del tensors[next(name for name in places if name in tensors)]
        norms = [name for name in sorted(tensors) if ("norm" in name or "ln_" in name) and "self_attn" not in name]
        misshaped = norms or [name for name in sorted(tensors) if "up_proj" in name]  # olmo's norms have no gains
        tensors[misshaped[0]] = torch.ones(64, 1)
        tensors[misshaped[-1]] = torch.ones(32)
        tensors["model.layers.1.strange.weight"] = torch.ones(3)
        tensors["strange"] = torch.ones(())
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    found = agreed(damage(checkpoint(model_type), spoil))
    strange = ("model.layers.1.strange.weight", "strange")
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"  # classes with several rotary tables do not know that name
    assert (found.ignored, found.unexpected) in (((frequencies,), strange), ((), (frequencies, *strange)))
    assert len(found.mismatched) + len(found.missing) == 3


@pytest.mark.parametrize(
    "model_type", rows(["llama", "mixtral", "gemma2", "phi", "cohere", "glm4", "granitemoe"], ["llama", "gemma2"])
)
def test_heads_and_embeddings_that_are_tied_or_not(model_type: str, checkpoint: Make) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    path = checkpoint(model_type)
    tensors = load_file(path / "model.safetensors")
    matrix = tensors.get(head, tensors[embedding])
    for there in ({embedding, head}, {embedding}, {head}, set()):
        for tied in (True, False):

            def change(tensors: Tensors, there: set[str] = there) -> None:
                for name in (embedding, head):
                    tensors.pop(name, None)
                tensors.update({name: matrix.clone() for name in there})

            found = agreed(edit(damage(path, change), tie_word_embeddings=tied))
            lost = {embedding, head} - there
            assert {name for name in found.missing if name in lost} == (set() if tied and there else lost)


@pytest.mark.parametrize("model_type", rows(EXPERTS, ["mixtral", "olmoe"]))
def test_experts(model_type: str, checkpoint: Make) -> None:
    path = checkpoint(model_type)
    whole = load_file(path / "model.safetensors")
    second = [name for name in whole if "layers.1." in name and ".experts.1." in name]
    assert len(second) == 3

    found = agreed(damage(path, lambda tensors: [tensors.pop(name) for name in second]))
    assert {name.rpartition(".")[2] for name in found.mismatched} == {"down_proj", "gate_up_proj"}
    assert [shape[0] for shape, _ in found.mismatched.values() if shape] == [1, 1]

    deeper = [name.replace("layers.1.", "layers.7.") for name in second]

    def deepen(tensors: Tensors) -> None:
        tensors.update(whole | {name: torch.ones(2, 2) for name in deeper})

    names = {"w1": "gate_up_proj", "w3": "gate_up_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    renamed = {name: f"model.layers.7.mlp.experts.{names.get(name.split('.')[-2], 'down_proj')}" for name in deeper}
    found = agreed(damage(path, deepen), renamed)
    assert sorted(found.unexpected) == sorted(deeper)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_checkpoints_of_the_model_without_its_head(model_type: str, tmp_path: Path) -> None:
    """As GPT-2 was first published: without a prefix, and with causal masks that nothing reads any more."""
    tiny_model(tiny_config(model_type)).base_model.save_pretrained(tmp_path)
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(3)} if model_type == "gpt2" else {}
    found = agreed(damage(tmp_path, lambda tensors: tensors.update(masks)))
    assert (found.missing, found.ignored) == (("lm_head.weight",) if model_type == "llama" else (), tuple(masks))
    name = next(name for name in found.names if "layers.2." in name or "h.2." in name)
    assert found.sources(name) == (name.partition(".")[2],)


def test_of_two_tensors_with_one_new_name_the_first_is_taken(tmp_path: Path) -> None:
    tiny_model(tiny_config("bert", is_decoder=True)).save_pretrained(tmp_path)

    def change(tensors: Tensors) -> None:
        tensors["bert.embeddings.LayerNorm.gamma"] = torch.full((64,), 7.0)

    found, reader = tensors_of(damage(tmp_path, change))
    assert found.sources("bert.embeddings.LayerNorm.weight") == ("bert.embeddings.LayerNorm.gamma",)
    assert found.tensor("bert.embeddings.LayerNorm.weight", reader.__getitem__)[0] == 7


def test_one_tensor_for_several_parameters(tmp_path: Path) -> None:
    tiny_model(tiny_config("hrm_text")).save_pretrained(tmp_path)
    found = agreed(tmp_path)
    converted = {name: found.sources(name) for name in found.names if found.is_converted(name)}
    assert len(set(converted.values())) < len(converted)


def test_no_weights_are_read_and_only_what_is_asked_for_is_made(checkpoint: Make) -> None:
    found, reader = tensors_of(checkpoint("mixtral"))
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


def test_what_is_stored_stays_as_it_is(checkpoint: Make) -> None:
    found, _ = tensors_of(checkpoint("llama"))
    given = torch.ones(VOCABULARY, 64, dtype=torch.bfloat16, requires_grad=True)
    assert found.tensor("lm_head.weight", {"lm_head.weight": given}.__getitem__) is given


def test_missing_and_misshaped_parameters_are_not_given(checkpoint: Make) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = torch.ones(5, 64)

    found, reader = tensors_of(damage(checkpoint("llama"), change))
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
    assert (found.missing, found.unexpected, found.mismatched) == ((), (), {})
    assert found.sources("model.layers.3.mlp.experts.down_proj")[10] == "model.layers.3.mlp.experts.10.down_proj.weight"


MLP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"


def reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def disagree(name: str, found: list[int], wanted: list[int]) -> str:
    return f"config.json and the weights disagree: {name} is {found}, by the config it is {wanted}"


# What is done to the weights, what to the config, and what is said.
BROKEN: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any], str]] = {
    "an MLP tensor is missing": (lambda t: t.pop(MLP), {}, f"lacks {MLP}, which LlamaForCausalLM with this config has"),
    "an MLP of another width": (reshaped(MLP, (16, 64)), {}, disagree(MLP, [16, 64], [32, 64])),
    "a norm with an axis too many": (reshaped(NORM, (64, 1)), {}, disagree(NORM, [64, 1], [64])),
    "MLP biases in the config alone": (
        lambda t: None, {"mlp_bias": True}, "lacks model.layers.0.mlp.gate_proj.bias and 8 others, which LlamaForCausalLM",
    ),
    "more layers in the weights": (
        lambda t: t.update({MLP.replace("1", "3"): t[MLP].clone()}), {}, "has tensor model.layers.3.mlp.up_proj.weight, which",
    ),
    "a tensor that no class knows": (
        lambda t: t.update({"model.extra": torch.ones(3)}), {}, "has tensor model.extra, which LlamaForCausalLM with this",
    ),
    "a classifier": (
        lambda t: t.update({"score.weight": t.pop("lm_head.weight")[:1].clone()}), {},
        "lacks lm_head.weight, which LlamaForCausalLM with this config has; it has score.weight, as classifiers",
    ),
    "a classifier with a head": (
        lambda t: t.update({"score.weight": torch.ones(1, 64)}), {},
        "has tensor score.weight, as classifiers and reward models do, which LlamaForCausalLM with this config has not",
    ),
    "a tied head that the config does not tie": (
        lambda t: t.pop("lm_head.weight"), {}, "config.json does not tie the head to the embedding",
    ),
    "an MLP of integers": (
        lambda t: t.update({MLP: torch.ones(32, 64, dtype=torch.int8)}), {}, f"{MLP} holds int8, which means nothing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_would_not_load_whole_is_refused(case: str, checkpoint: Make) -> None:
    change, config, message = BROKEN[case]
    source = Source.parse(str(edit(damage(checkpoint(tie_word_embeddings=False), change), **config)))
    with pytest.raises(Failure) as failed:
        require_loadable(source.config, source.reader().infos, "it")
    assert message in str(failed.value)
    assert failed.value.hint
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("target", [("gqa", "--groups", 2), ("mla", *SMALL), ("gqa", "--groups", 4, "--force")], ids=str)
def test_it_is_refused_before_any_work(
    target: tuple[Any, ...], checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, _, message = BROKEN["an MLP tensor is missing"]
    source = damage(checkpoint(tie_word_embeddings=False), change)
    monkeypatch.setattr("convert.converting.writing", lambda *_: pytest.fail("the work has begun"))
    command, *options = target
    result = convert(command, source, tmp_path / "out", *options)
    left_nothing(result, 1, message, tmp_path / "out")
    assert len(result.stderr.splitlines()) == 2, "an error and a hint"


def test_an_activation_that_no_class_knows_is_refused_at_the_door(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = edit(checkpoint(), hidden_act="magic")
    result = convert("gqa", source, tmp_path / "out", "--groups", 2)
    left_nothing(result, 1, "'magic'", tmp_path / "out")
    assert not (tmp_path / "out.lock").exists()
    assert len(result.stderr.splitlines()) <= 2


def test_a_tied_head_may_be_stored_or_not(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(tie_word_embeddings=True)
    assert "lm_head.weight" not in weights(source)
    ok(convert("gqa", source, tmp_path / "without", "--groups", 2))
    damage(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    ok(convert("gqa", source, tmp_path / "with", "--groups", 2))


def test_what_was_written_is_held_against_its_class(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Plan.config
    monkeypatch.setattr(Plan, "config", lambda self, *given: config(self, *given) | {"intermediate_size": 48})
    result = convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2)
    left_nothing(result, 1, "config.json and the weights disagree: model.layers.0.mlp", tmp_path / "out")


def test_experts_that_are_stacked_when_they_are_loaded_are_checked(checkpoint: Make) -> None:
    source = Source.parse(str(checkpoint("mixtral")))
    infos = dict(source.reader().infos)
    require_loadable(source.config, infos, "it")
    halves = {name: TensorInfo(info.shape, torch.bfloat16) for name, info in infos.items()}
    require_loadable(source.config, halves, "it")
    name = next(name for name in infos if ".experts.0.w1" in name)
    missing = {other: info for other, info in infos.items() if other != name}
    for wrong, message in (
        (missing, "do not fit together"),
        (infos | {name: TensorInfo((16, 60), torch.float32)}, "disagree"),
        (infos | {name: TensorInfo(infos[name].shape, torch.uint8)}, "holds uint8"),
    ):
        with pytest.raises(Failure, match=message):
            require_loadable(source.config, wrong, "it")
    found, reader = ClassTensors(empty_model(source.config), missing), source.reader()
    (mismatched,) = found.mismatched
    assert (found.mismatched[mismatched][0], len(found.sources(mismatched))) == (None, 3)
    with pytest.raises(Failure, match=r"disagree: .*gate_up_proj cannot be made of its 3 tensors, .*by the config it is \[2,"):
        found.tensor(mismatched, reader.__getitem__)
