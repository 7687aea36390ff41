"""Checkpoint files: what is read, what is refused, what is written reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.errors import Failure
from convert.checkpoint.reader import Reader, TensorInfo
from convert.checkpoint.writer import shard_names, write_index, write_shard

TENSORS = {
    "a.weight": torch.randn(4, 6),
    "b.weight": torch.randn(5).to(torch.bfloat16),
    "c.flags": torch.tensor([True, False, True]),
    "d.ids": torch.arange(7),
    "e.scalar": torch.tensor(2.5),
    "f.empty": torch.empty(0, 3),
}


def write(path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    """`write_shard`, with floats in `dtype`."""
    infos = {name: TensorInfo(tuple(t.shape), t.dtype).stored_as(dtype) for name, t in tensors.items()}
    write_shard(path, tensors, {name: info.dtype for name, info in infos.items()})


def sharded(path: Path, shards: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    weight_map = index or {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def two_shards(path: Path, index: dict[str, str] | None = None) -> Path:
    return sharded(path, {"one.safetensors": {"x": torch.ones(3)}, "two.safetensors": {"y": torch.zeros(2, 2)}}, index)


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", TENSORS)
    back = load_file(tmp_path / "model.safetensors")
    assert back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_writing_in_small_chunks_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "whole.safetensors", TENSORS, torch.bfloat16)
    monkeypatch.setattr("convert.checkpoint.writer._CHUNK", 8)
    write(tmp_path / "chunks.safetensors", TENSORS, torch.bfloat16)
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "chunks.safetensors").read_bytes()


def test_a_dtype_casts_floats_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", TENSORS, torch.float16)
    back = load_file(tmp_path / "m.safetensors")
    assert torch.equal(back["a.weight"], TENSORS["a.weight"].half())
    assert torch.equal(back["b.weight"], TENSORS["b.weight"].half())
    assert back["c.flags"].dtype == torch.bool
    assert back["d.ids"].dtype == torch.int64


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    views = {"transposed": whole.T, "strided": whole[::2]}
    write(tmp_path / "m.safetensors", views)
    back = load_file(tmp_path / "m.safetensors")
    assert torch.equal(back["transposed"], whole.T)
    assert torch.equal(back["strided"], whole[::2])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    bad = torch.ones(40)
    bad[-1] = value
    with pytest.raises(Failure, match="tensor bad holds NaN or infinite values"):
        write(tmp_path / "m.safetensors", {"good": torch.ones(2), "bad": bad})
    assert not (tmp_path / "m.safetensors").exists()


def test_a_cast_that_overflows_says_so(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="tensor big overflows in float16: its largest value is 100000") as caught:
        write(tmp_path / "m.safetensors", {"big": torch.tensor([1e5])}, torch.float16)
    assert "bfloat16" in str(caught.value.hint)


def test_a_file_that_does_not_read_back_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from convert.checkpoint import writer as checkpoint

    opened = checkpoint.open_safetensors

    def flip_last_byte(path: Path) -> object:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return opened(path)

    monkeypatch.setattr(checkpoint, "open_safetensors", flip_last_byte)
    with pytest.raises(Failure, match="does not read back: x differs"):
        write(tmp_path / "m.safetensors", {"x": torch.ones(9)})
    assert not (tmp_path / "m.safetensors").exists()


def test_reading_a_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    reader = Reader(tmp_path)
    assert reader.infos.keys() == TENSORS.keys()
    assert reader.infos["b.weight"].nbytes == 10
    for name, tensor in TENSORS.items():
        assert torch.equal(reader[name], tensor)


def test_reading_shards(tmp_path: Path) -> None:
    reader = Reader(two_shards(tmp_path))
    assert torch.equal(reader["y"], torch.zeros(2, 2))
    assert torch.equal(reader["x"], torch.ones(3))
    assert reader.files == ["one.safetensors", "two.safetensors"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(Failure, match=r"lacks 1 of 2 weight files: two\.safetensors"):
        Reader(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    data = (tmp_path / "two.safetensors").read_bytes()
    (tmp_path / "two.safetensors").write_bytes(data[:-3])
    with pytest.raises(Failure, match=r"two\.safetensors is truncated or damaged"):
        Reader(tmp_path)


def test_a_tensor_missing_from_the_index_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"y": torch.ones(1), "z": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(Failure, match=r"two\.safetensors holds tensor z, and the index does not list it"):
        Reader(tmp_path)


def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    two_shards(tmp_path, {"x": "one.safetensors", "y": "one.safetensors", "w": "two.safetensors"})
    with pytest.raises(Failure, match=r"the index puts tensor y into one\.safetensors"):
        Reader(tmp_path)


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(Failure, match="is no weight index"):
        Reader(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"holds neither model\.safetensors nor pytorch_model\.bin"):
        Reader(tmp_path)


def test_a_weights_only_pickle_is_read_and_shared_tensors_once(tmp_path: Path) -> None:
    shared = torch.randn(3, 2)
    torch.save({"embed": shared, "own": torch.ones(2), "head": shared}, tmp_path / "pytorch_model.bin")
    reader = Reader(tmp_path)
    assert torch.equal(reader["embed"], shared)
    assert list(reader.infos) == ["embed", "own", "head"]
    assert reader.aliases == {"head": "embed"}


def test_other_views_of_one_storage_are_no_aliases(tmp_path: Path) -> None:
    square = torch.randn(3, 3)
    torch.save({"a": square, "b": square.T, "c": square[:2]}, tmp_path / "pytorch_model.bin")
    assert Reader(tmp_path).aliases == {}


def test_a_pickle_from_before_zip_archives_is_read(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(5.0)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(Reader(tmp_path)["x"], torch.arange(5.0))


def test_a_training_state_is_not_taken_for_weights(tmp_path: Path) -> None:
    torch.save({"state_dict": {"x": torch.ones(1)}, "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Failure, match="holds more than named tensors"):
        Reader(tmp_path)


def test_a_view_at_an_odd_offset_is_written(tmp_path: Path) -> None:
    whole = torch.arange(9).to(torch.bfloat16)
    write(tmp_path / "m.safetensors", {"x": whole[1:8]})
    assert torch.equal(load_file(tmp_path / "m.safetensors")["x"], whole[1:8])


def test_a_pickle_that_runs_code_is_refused_unrun(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (str(tmp_path / "ran"),)

    torch.save({"x": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Failure, match="is no weights-only pickle"):
        Reader(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_index_lists_every_tensor(tmp_path: Path) -> None:
    names = shard_names(2)
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write_index(tmp_path, {names[0]: ["b"], names[1]: ["a", "c"]}, 12)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 12}, "weight_map": {"a": names[1], "b": names[0], "c": names[1]}}
    assert shard_names(1) == ["model.safetensors"]
