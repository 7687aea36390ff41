"""Layers one at a time: what they see is what the whole model shows them, and nothing of them stays behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from streams import CPU, MODELS, attentions, blocks_of, model_of, of_blocks, records_of, seen_by, stream_of
from tiny import tiny_config, tiny_model

from attention.errors import Failure
from convert.calibration.stream import LayerStream
from convert.calibration.survey import Moments
from convert.families import FAMILIES
from convert.methods.blocks import Blocks
from eval.inputs.reader import Reader

# Classes that no family reads yet: what they run before their layers, and where their attentions are.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2, learned positions": ("gpt2", "transformer.h.{}.attn", {}),
    "opt, positions from the mask": ("opt", "model.decoder.layers.{}.self_attn", {"word_embed_proj_dim": 64, "ffn_dim": 32}),
    "opt, narrow embeddings": ("opt", "model.decoder.layers.{}.self_attn", {
        "word_embed_proj_dim": 24, "ffn_dim": 32, "do_layer_norm_before": False}),
    "bloom, a norm behind the embedding": ("bloom", "transformer.h.{}.self_attention", {}),
    "gpt_neox": ("gpt_neox", "gpt_neox.layers.{}.attention", {"intermediate_size": 32}),
    "gptj": ("gptj", "transformer.h.{}.attn", {"rotary_dim": 4}),
    "falcon": ("falcon", "transformer.h.{}.self_attention", {"new_decoder_architecture": True}),
    "falcon, alibi": ("falcon", "transformer.h.{}.self_attention", {"alibi": True, "multi_query": False}),
    "mpt": ("mpt", "transformer.blocks.{}.attn", {"max_seq_len": 128}),
}  # fmt: skip


# ---- what layers see -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MODELS)
def test_layers_see_what_they_see_in_the_whole_model(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.calibration.stream._TOKENS", 36)  # 7 blocks of 12 as 3, 3 and 1
    model, blocks = model_of(case), blocks_of()
    expected, stream = seen_by(model, blocks), stream_of(model, tmp_path / "spool", blocks)
    stream.embed()
    for layer, whole in enumerate(expected):
        observed: list[torch.Tensor] = []
        passing: list[torch.Tensor] = []
        stream.observe(layer, lambda x, into=observed: into.append(x.clone()))
        assert [len(x) for x in observed] == [3, 3, 1]
        stream.advance(layer, lambda x, into=passing: into.append(x.clone()))
        torch.testing.assert_close(torch.cat(observed), whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
        assert torch.equal(torch.cat(observed), torch.cat(passing))
        assert stream.ready == {layer + 1}


def test_the_size_of_a_batch_changes_nothing(batched: int, tmp_path: Path) -> None:
    model, blocks = model_of(), blocks_of()
    stream = stream_of(model, tmp_path / "spool", blocks)
    stream.embed()
    for layer, whole in enumerate(seen_by(model, blocks)):
        observed: list[torch.Tensor] = []
        stream.observe(layer, lambda x, into=observed: into.append(x.clone()))
        assert {len(x) for x in observed} == {48: {4, 3}, 4096: {7}, 5: {1}}[batched]
        stream.advance(layer)
        torch.testing.assert_close(torch.cat(observed), whole, rtol=1e-4, atol=1e-4)


def test_arithmetic_is_fp32_whatever_the_weights_are_stored_in(tmp_path: Path) -> None:
    model, blocks = model_of(), blocks_of()
    stored = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    expected, stream = seen_by(model, blocks), stream_of(model, tmp_path / "spool", blocks, stored.__getitem__)
    stream.embed()
    stream.advance(0)
    found: list[torch.Tensor] = []
    stream.observe(1, lambda x: found.append(x.clone()))
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(torch.cat(found), expected[1], rtol=1e-4, atol=1e-4)


def test_some_rows_are_cut_into_shorter_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each starts at position 0 and sees nothing of the one before it, in whatever batches they run."""
    monkeypatch.setattr("convert.calibration.stream._TOKENS", 24)  # two rows
    model, rows = model_of("gemma2, sliding layers and scaled embeddings"), blocks_of(7, 12)
    text = Blocks(rows, (1, 1, 1, 3, 3, 3, 3))
    whole, short = seen_by(model, rows[:3]), seen_by(model, rows[3:].reshape(-1, 4))
    stream = stream_of(model, tmp_path / "spool", text)
    stream.embed()
    for layer in range(3):
        seen: list[torch.Tensor] = []
        moments = Moments(layer, stream, records_of(model)(layer), 60, shown=False)  # five rows

        def see(x: torch.Tensor, into: list[torch.Tensor] = seen, moments: Moments = moments) -> None:
            into.append(x.clone())
            moments.see(x)

        stream.advance(layer, see)
        assert [tuple(x.shape[:2]) for x in seen] == [(2, 12), (1, 12), (6, 4), (6, 4)]
        torch.testing.assert_close(torch.cat(seen[:2]), whole[layer], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.cat(seen[2:]), short[layer], rtol=1e-4, atol=1e-4)
        sample = moments.statistics().sample
        assert sample is not None
        assert sample.cuts == (1, 1, 3, 3, 3)
        expected = [whole[layer][0], whole[layer][2], *short[layer][:6], *short[layer][9:]]
        for block, x in zip(sample.blocks, expected, strict=True):
            torch.testing.assert_close(block.float(), x, rtol=1e-2, atol=1e-2)
    one, other = stream.select(3, [6, 0])
    assert (one.shape, other.shape) == ((1, 12, 64), (3, 4, 64))


# ---- any checkpoint, any class ---------------------------------------------------------------------------------------


def from_files(model: Any, paths: list[str], directory: Path, blocks: torch.Tensor) -> LayerStream:
    model.save_pretrained(directory)
    reader = Reader(directory)
    return LayerStream(model.config, paths, reader.__getitem__, reader.infos, Blocks.whole(blocks), directory / "spool", CPU)


def sees_the_same(stream: LayerStream, expected: list[torch.Tensor]) -> None:
    stream.embed()
    assert stream.num_layers == len(expected)
    for layer, whole in enumerate(expected):
        observed: list[torch.Tensor] = []
        stream.observe(layer, lambda x, into=observed: into.append(x.clone()))
        stream.advance(layer)
        assert float((torch.cat(observed) - whole).norm() / whole.norm()) < 1e-5, f"layer {layer}"
    assert all(parameter.device.type == "meta" for parameter in stream._model.parameters())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_layers_of_every_family_see_what_their_checkpoint_says(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.calibration.stream._TOKENS", 36)
    model, blocks = tiny_model(tiny_config(model_type)), blocks_of()
    paths = [FAMILIES[model_type].module(layer) for layer in range(3)]
    sees_the_same(from_files(model, paths, tmp_path, blocks), seen_by(model, blocks, paths))


@pytest.mark.parametrize("case", OTHERS)
def test_what_a_class_runs_before_its_layers_is_its_own(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    monkeypatch.setattr("convert.calibration.stream._TOKENS", 36)
    model_type, path, changes = OTHERS[case]
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "vocab_size": 96,
        "max_position_embeddings": 128,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model, blocks = tiny_model(AutoConfig.for_model(model_type, **(sizes | ids | changes))), blocks_of()
    paths = [path.format(layer) for layer in range(5)]
    sees_the_same(from_files(model, paths, tmp_path, blocks), seen_by(model, blocks, paths))


def test_a_checkpoint_of_the_model_without_its_head_will_do(tmp_path: Path) -> None:
    model, blocks = model_of(), blocks_of()
    expected, paths = seen_by(model, blocks), attentions(model)
    model.model.save_pretrained(tmp_path)
    reader = Reader(tmp_path)
    assert "embed_tokens.weight" in reader.infos
    stream = LayerStream(model.config, paths, reader.__getitem__, reader.infos, Blocks.whole(blocks), tmp_path / "spool", CPU)
    sees_the_same(stream, expected)


def test_what_a_checkpoint_keeps_as_buffers_counts(tmp_path: Path) -> None:
    model, blocks = tiny_model(tiny_config("apertus")), blocks_of()
    buffers = [layer.mlp.act_fn.beta for layer in model.model.layers]
    for buffer in buffers:
        buffer.copy_(torch.tensor(2.5))
    stream = from_files(model, attentions(model), tmp_path, blocks)
    before = {name: buffer.clone() for name, buffer in stream._model.named_buffers()}
    sees_the_same(stream, seen_by(model, blocks))
    after = dict(stream._model.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_given_weights_replace_those_of_the_checkpoint(tmp_path: Path) -> None:
    model, blocks = model_of(), blocks_of()
    stream, other = stream_of(model, tmp_path / "spool", blocks), tiny_model(model.config, seed=5)
    given = {name: tensor for name, tensor in other.state_dict().items() if ".layers.1.self_attn." in name}
    read = stream._read
    stream._read = lambda name: pytest.fail(f"{name} is given") if name in given else read(name)
    model.model.layers[1].self_attn = other.model.layers[1].self_attn
    expected = seen_by(model, blocks)
    stream.embed()
    stream.advance(0)
    stream.advance(1, weights=given)
    found: list[torch.Tensor] = []
    stream.observe(2, lambda x: found.append(x.clone()))
    torch.testing.assert_close(torch.cat(found), expected[2], rtol=1e-4, atol=1e-4)


def test_given_weights_must_be_finite(tmp_path: Path) -> None:
    model = model_of()
    stream = stream_of(model, tmp_path / "spool", blocks_of())
    stream.embed()
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(Failure, match=f"tensor {name} holds NaN"):
        stream.advance(0, weights={name: torch.full((64, 64), float("nan"))})
    assert all(parameter.device.type == "meta" for parameter in stream._model.parameters())


@pytest.mark.parametrize("case", ["llama", "mixtral, experts"])
def test_an_open_layer_runs_with_whatever_attention_it_is_given(case: str, tmp_path: Path) -> None:
    model, blocks = model_of(case), blocks_of()
    stream = from_files(model, attentions(model), tmp_path, blocks)
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".layers.0.self_attn." in name}
    stream.embed()
    with stream.opened(0) as run:
        for weight in weights.values():
            weight.requires_grad_(True)
        hidden = run(stream.batch(0, 0), weights)
        gradients = torch.autograd.grad(hidden.square().sum(), list(weights.values()))
        assert all(gradient.any() for gradient in gradients)
        read = run.into(stream.batch(0, 0), weights, "model.layers.0.self_attn.o_proj")
        assert read.shape == (7, 12, 64)
    stream.advance(0)
    torch.testing.assert_close(hidden, stream.batch(1, 0), rtol=1e-4, atol=1e-4)
    assert all(parameter.device.type == "meta" for parameter in stream._model.parameters())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model, blocks = model_of("mixtral, experts"), blocks_of()
    model.save_pretrained(tmp_path)
    reader = Reader(tmp_path)
    infos = {name: info for name, info in reader.infos.items() if ".1.block_sparse_moe.experts.1." not in name}
    stream = LayerStream(
        model.config, attentions(model), reader.__getitem__, infos, Blocks.whole(blocks), tmp_path / "spool", CPU
    )
    stream.embed()
    stream.advance(0)
    message = r"model\.layers\.1\.mlp\.experts\.gate_up_proj is \[1, 64, 64\].*by the config it is \[2, 64, 64\]"
    with pytest.raises(Failure, match=message):
        stream.advance(1)


# ---- what is in memory and on disk -----------------------------------------------------------------------------------


def test_one_layers_weights_are_in_memory_at_a_time(tmp_path: Path) -> None:
    model, read_names = model_of(), []
    weights = model.state_dict()

    def read(name: str) -> torch.Tensor:
        read_names.append(name)
        return weights[name].clone()

    stream = stream_of(model, tmp_path / "spool", blocks_of(), read)
    inner = stream._model

    def resident() -> set[str]:
        return {name for name, parameter in inner.named_parameters() if parameter.device.type != "meta"}

    assert resident() == set()
    stream.embed()
    assert read_names == ["model.embed_tokens.weight", "model.norm.weight"]
    assert resident() == set()
    for layer in range(3):
        own = {name for name in weights if f".layers.{layer}." in name}
        before_attention = {name for name in own if "self_attn" not in name}
        read_names.clear()
        stream.observe(
            layer, lambda x, expected=before_attention: pytest.fail("others are in memory") if resident() != expected else None
        )
        assert resident() == set()
        assert set(read_names) - {"model.norm.weight"} == before_attention
        read_names.clear()
        stream.advance(layer, lambda x, expected=own: pytest.fail("others are in memory") if resident() != expected else None)
        assert resident() == set()
        assert sorted(read_names) == sorted(own)


def test_weights_leave_memory_when_a_layer_fails(tmp_path: Path) -> None:
    model = model_of()
    stream = stream_of(model, tmp_path / "spool", blocks_of())
    stream.embed()

    def fail(x: torch.Tensor) -> None:
        raise Failure("seen enough")

    for step in (stream.observe, stream.advance):
        with pytest.raises(Failure):
            step(0, fail)
        assert all(parameter.device.type == "meta" for parameter in stream._model.parameters())
        assert not stream._model.get_submodule("model.layers.0.self_attn")._forward_pre_hooks
    assert stream.ready == {0}, "its inputs stay"
    stream.advance(0)
    assert stream.ready == {1}


def test_nothing_of_a_layer_is_kept(tmp_path: Path) -> None:
    model, alive = model_of(), []
    weights = model.state_dict()

    def read(name: str) -> torch.Tensor:
        tensor = weights[name].clone()
        alive.append(weakref.ref(tensor))
        return tensor

    stream = stream_of(model, tmp_path / "spool", blocks_of(), read)
    stream.embed()
    moments = Moments(0, of_blocks(3 * 2 * 7, 12, 64), records_of(model)(0))

    def see(x: torch.Tensor) -> None:
        alive.append(weakref.ref(x))
        moments.see(x)

    for layer in range(3):
        stream.observe(layer, see)
        stream.advance(layer, see)
        gc.collect()
        assert len(alive) > 8
        assert [reference for reference in alive if reference() is not None] == []


def test_one_layers_inputs_are_on_disk_at_a_time(tmp_path: Path) -> None:
    stream = stream_of(model_of(), tmp_path / "spool", blocks_of())
    assert stream.ready == set()
    stream.embed()
    for layer in range(3):
        assert [path.name for path in tmp_path.iterdir()] == [f"spool-{layer}"]
        assert (tmp_path / f"spool-{layer}").stat().st_size == 7 * 12 * 64 * 4 + 4, "and a checksum"
        stream.advance(layer)
    (tmp_path / "other").touch()
    stream.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_another_stream_goes_on_where_one_was_cut_off(tmp_path: Path) -> None:
    model, blocks = model_of(), blocks_of()
    first = stream_of(model, tmp_path / "spool", blocks)
    first.embed()
    first.advance(0)

    def fail(x: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.advance(1, fail)
    second, found = stream_of(model, tmp_path / "spool", blocks), []
    assert second.ready == {1}
    second.advance(1)
    second.observe(2, lambda x: found.append(x.clone()))
    torch.testing.assert_close(torch.cat(found), seen_by(model, blocks)[2], rtol=1e-4, atol=1e-4)
