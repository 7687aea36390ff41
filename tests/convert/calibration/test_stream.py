"""Layers one at a time: what they see is what the whole model shows them, and nothing of them stays behind."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import rows
from streams import WINDOWS, InMemory, model_of, observed, of_blocks, records_of, seen_by, stream_of
from tiny import ROPES, tiny_model
from tiny_mla import tokens
from written import raising

from attention.errors import Failure
from convert.calibration.stream import LayerStream
from convert.calibration.survey import Moments
from convert.families import FAMILIES
from convert.methods.blocks import Blocks
from eval.inputs.reader import Reader

# What else a model hands to its layers, or does before them.
CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "scaled embeddings, windows": ("gemma2", WINDOWS),
    "two rotary tables": ("gemma3_text", WINDOWS | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "a window": ("mistral", {"sliding_window": 4}),
    "a layer without RoPE": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "multipliers": ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "longrope": ("llama", {"rope_parameters": ROPES["longrope"] | {"original_max_position_embeddings": 8}}),
    "narrow embeddings": ("opt", {"word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    "alibi": ("falcon", {"alibi": True, "multi_query": False}),
}  # fmt: skip
PLAIN = {model_type: (model_type, dict[str, Any]()) for model_type in FAMILIES}
FAST = ["bloom", "codegen", "gpt2", "gpt_neox", "mixtral", "mpt", "opt", "phi", "qwen2"]


def close(found: list[torch.Tensor], expected: torch.Tensor) -> None:
    assert float((torch.cat(found) - expected).norm() / expected.norm()) < 1e-5


def unloaded(stream: LayerStream) -> bool:
    return all(parameter.device.type == "meta" for parameter in stream._model.parameters())


@pytest.mark.parametrize("case", rows([*CHANGED, *PLAIN], [*CHANGED, *FAST]))
def test_layers_see_what_they_see_in_the_whole_model(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.calibration.stream._TOKENS", 36)  # 7 blocks of 12 as 3, 3 and 1
    model_type, changes = (CHANGED | PLAIN)[case]
    model, blocks = model_of(model_type, **changes), tokens(7, 12)
    model.save_pretrained(tmp_path)
    stream = stream_of(model, tmp_path / "spool", blocks, Reader(tmp_path))
    stream.embed()
    expected = seen_by(model, blocks)
    assert stream.num_layers == len(expected)
    for layer, whole in enumerate(expected):
        seen, passing = observed(stream, layer), list[torch.Tensor]()
        assert [len(x) for x in seen] == [3, 3, 1]
        stream.advance(layer, lambda x, into=passing: into.append(x.clone()))
        close(seen, whole)
        assert torch.equal(torch.cat(seen), torch.cat(passing))
        assert stream.ready == {layer, layer + 1}
    assert unloaded(stream)


def test_arithmetic_is_fp32_whatever_the_weights_are_stored_in(tmp_path: Path) -> None:
    model, blocks = model_of(), tokens(7, 12)
    stored = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    stream = stream_of(model, tmp_path / "spool", blocks, InMemory(model, stored.__getitem__))
    stream.embed()
    stream.advance(0)
    (found,) = observed(stream, 1)
    assert found.dtype == torch.float32
    close([found], seen_by(model, blocks)[1])


def test_positions_may_skip(tmp_path: Path) -> None:
    """A mask shows what is before a skip, which transformers would take for another text."""
    model, rows = model_of("llama"), tokens(2, 12)
    positions = torch.stack((torch.arange(12), torch.arange(12) + 70 * (torch.arange(12) > 6)))
    expected = seen_by(model, rows, position_ids=positions, attention_mask=torch.ones_like(positions))
    hidden = rows.clone()
    hidden[1, :7] = 1
    changed = seen_by(model, hidden, position_ids=positions, attention_mask=torch.ones_like(positions))
    assert not torch.allclose(changed[2][1, 7:], expected[2][1, 7:]), "a query after the skip attends before it"
    stream = stream_of(model, tmp_path / "spool", Blocks(rows, positions))
    stream.embed()
    for layer in range(3):
        close(observed(stream, layer), expected[layer])
        moments = Moments(layer, stream, records_of(model)(layer))
        stream.advance(layer, moments.see)
    sample = moments.statistics().sample
    assert torch.equal(sample.positions, positions)


def test_blocks_see_nothing_of_each_other_in_whatever_batches_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.calibration.stream._TOKENS", 24)  # two rows
    model, rows = model_of("gemma2", **WINDOWS), tokens(7, 12)
    whole = seen_by(model, rows)
    stream = stream_of(model, tmp_path / "spool", rows)
    stream.embed()
    for layer in range(3):
        seen = observed(stream, layer)
        moments = Moments(layer, stream, records_of(model)(layer), 60, shown=False)  # five rows
        stream.advance(layer, moments.see)
        assert [tuple(x.shape[:2]) for x in seen] == [(2, 12), (2, 12), (2, 12), (1, 12)]
        close(seen, whole[layer])
        for block, x in zip(moments.statistics().sample.blocks, whole[layer][moments.sampled], strict=True):
            torch.testing.assert_close(block.x.float(), x, rtol=1e-2, atol=1e-2)
    assert stream.select(3, [6, 0]).hidden.shape == (2, 12, 64)


def test_what_a_checkpoint_keeps_as_buffers_counts(tmp_path: Path) -> None:
    model, blocks = model_of("apertus"), tokens(7, 12)
    for layer in model.model.layers:
        layer.mlp.act_fn.beta.copy_(torch.tensor(2.5))
    stream = stream_of(model, tmp_path / "spool", blocks)
    before = {name: buffer.clone() for name, buffer in stream._model.named_buffers()}
    stream.embed()
    stream.advance(0)
    close(observed(stream, 1), seen_by(model, blocks)[1])
    after = dict(stream._model.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_given_weights_replace_those_of_the_checkpoint(tmp_path: Path) -> None:
    model, blocks = model_of(), tokens(7, 12)
    other, name = tiny_model(model.config, seed=5), "model.layers.1.self_attn.q_proj.weight"
    given, stored = {n: t for n, t in other.state_dict().items() if ".layers.1.self_attn." in n}, model.state_dict()
    weights = InMemory(model, lambda name: pytest.fail(f"{name} is given") if name in given else stored[name])
    stream = stream_of(model, tmp_path / "spool", blocks, weights)
    stream.embed()
    stream.advance(0)
    with pytest.raises(Failure, match=f"tensor {name} holds NaN"):
        stream.advance(1, weights=given | {name: torch.full((64, 64), float("nan"))})
    assert unloaded(stream)
    stream.advance(1, weights=given)
    model.model.layers[1].self_attn = other.model.layers[1].self_attn
    close(observed(stream, 2), seen_by(model, blocks)[2])


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_an_open_layer_runs_with_whatever_attention_it_is_given(model_type: str, tmp_path: Path) -> None:
    model, blocks = model_of(model_type), tokens(7, 12)
    stream = stream_of(model, tmp_path / "spool", blocks)
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".layers.0.self_attn." in name}
    stream.embed()
    rest = stream.rest(0)
    read = stream.read(0, rest, stream.batch(0, 0), weights)
    attended: list[torch.Tensor] = []
    stream.advance(0, attended=lambda batch, inputs, added: attended.append(added))
    torch.testing.assert_close(read @ weights["model.layers.0.self_attn.o_proj.weight"].T, attended[0])
    assert unloaded(stream)


def test_one_layers_weights_are_in_memory_at_a_time_and_nothing_is_kept(tmp_path: Path) -> None:
    model, read_names, alive = model_of(), list[str](), list[Any]()
    weights = model.state_dict()

    def read(name: str) -> torch.Tensor:
        read_names.append(name)
        tensor = weights[name].clone()
        alive.append(weakref.ref(tensor))
        return tensor

    stream = stream_of(model, tmp_path / "spool", tokens(7, 12), InMemory(model, read))
    moments = Moments(0, of_blocks(3 * 2 * 7, 12, 64), records_of(model)(0))

    def resident() -> set[str]:
        return {name for name, parameter in stream._model.named_parameters() if parameter.device.type != "meta"}

    assert unloaded(stream)
    stream.embed()
    assert read_names == ["model.embed_tokens.weight", "model.norm.weight"]
    for layer in range(3):
        own = {name for name in weights if f".layers.{layer}." in name}
        for step, names in ((stream.observe, {name for name in own if "self_attn" not in name}), (stream.advance, own)):

            def see(x: torch.Tensor, names: set[str] = names) -> None:
                assert resident() == names
                alive.append(weakref.ref(x))
                moments.see(x)

            read_names.clear()
            step(layer, see)
            assert set(read_names) - {"model.norm.weight"} == names
            assert unloaded(stream)
        gc.collect()
        assert [reference for reference in alive if reference() is not None] == []


def test_weights_leave_memory_when_a_layer_fails(tmp_path: Path) -> None:
    stream = stream_of(model_of(), tmp_path / "spool", tokens(7, 12))
    stream.embed()
    for step in (stream.observe, stream.advance):
        with pytest.raises(Failure):
            step(0, raising(Failure("seen enough")))
        assert unloaded(stream)
        assert not stream._model.get_submodule("model.layers.0.self_attn")._forward_pre_hooks
    assert stream.ready == {0}, "its inputs stay"


def test_two_layers_inputs_are_on_disk_at_a_time(tmp_path: Path) -> None:
    stream = stream_of(model_of(), tmp_path / "spool", tokens(7, 12))
    assert stream.ready == set()
    stream.embed()
    for layer in range(3):
        stream.advance(
            layer, lambda x, layer=layer: pytest.fail("three") if (tmp_path / f"spool-{layer - 1}").exists() else None
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"spool-{layer}", f"spool-{layer + 1}"]
        assert (tmp_path / f"spool-{layer}").stat().st_size == 7 * 12 * 64 * 4 + 4, "and a checksum"
    (tmp_path / "other").touch()
    stream.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("damage", ["zeros", "a bit", "shorter"])
def test_damaged_inputs_do_not_count(damage: str, tmp_path: Path) -> None:
    model, blocks = model_of(), tokens(7, 12)
    stream_of(model, tmp_path / "spool", blocks).embed()
    path = tmp_path / "spool-0"
    data = path.read_bytes()
    flipped = data[:999] + bytes([data[999] ^ 1]) + data[1000:]
    path.write_bytes({"zeros": bytes(len(data)), "a bit": flipped, "shorter": data[:-4]}[damage])
    assert stream_of(model, tmp_path / "spool", blocks).ready == set()
    path.write_bytes(data)
    assert stream_of(model, tmp_path / "spool", blocks).ready == {0}
