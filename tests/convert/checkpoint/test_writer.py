"""Writing checkpoint files: what is written reads back, has the checksum that is returned, and is synced before its name."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from written import TENSORS, raising

from attention.errors import Failure
from convert.checkpoint import writer as checkpoint
from convert.checkpoint.writer import shard_names, write_index, write_shard
from eval.inputs.reader import TensorInfo
from eval.inputs.sealed import checksum, sync_tree, write_whole


def write(path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> str:
    """`write_shard`, with floats in `dtype`."""
    infos = {name: TensorInfo(tuple(t.shape), t.dtype).stored_as(dtype) for name, t in tensors.items()}
    return write_shard(path, tensors, {name: info.dtype for name, info in infos.items()})


@pytest.mark.parametrize("chunk", [2**20, 8, 3])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_what_is_written_is_what_safetensors_reads(
    dtype: torch.dtype | None, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dtype casts floats and nothing else; views are written as they look; the checksum is that of the file."""
    monkeypatch.setattr("convert.checkpoint.writer._CHUNK", chunk)
    file, matrix = tmp_path / "model.safetensors", torch.randn(6, 4)
    tensors = TENSORS | {"transposed": matrix.T, "strided": matrix[::2], "odd": torch.arange(9).to(torch.bfloat16)[1:8]}
    found, back = write(file, tensors, dtype), load_file(file)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        assert back[name].dtype == expected.dtype
        assert torch.equal(back[name], expected), name
    assert found == checksum(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert list(tmp_path.iterdir()) == [file]


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


def test_an_index_lists_every_tensor(tmp_path: Path) -> None:
    names = shard_names(2)
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write_index(tmp_path, {names[0]: ["b"], names[1]: ["a", "c"]}, 12)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 12}, "weight_map": {"a": names[1], "b": names[0], "c": names[1]}}
    assert shard_names(1) == ["model.safetensors"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is synced and renamed, in order, by name."""
    seen: list[tuple[str, str]] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        seen.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        sync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        seen.append(("name", target.name))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    return seen


@pytest.mark.parametrize("written", [lambda path: write(path, TENSORS), lambda path: write_whole(path, b"{}")])
def test_a_file_gets_its_name_when_it_is_on_the_disk(
    written: Callable[[Path], object], tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    written(tmp_path / "file")
    assert events == [("sync", "file.tmp"), ("name", "file"), ("sync", tmp_path.name)]
    assert (tmp_path / "file").stat().st_size


def test_a_tree_is_synced_with_its_directories(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (tmp_path / name).write_text(name)
    sync_tree(tmp_path)
    assert sorted(events) == sorted(("sync", name) for name in (tmp_path.name, "a", "b", "x", "y", "z"))


def test_a_disk_that_fails_to_sync_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
    for attempt in (lambda: write(tmp_path / "m.safetensors", TENSORS), lambda: write_whole(tmp_path / "m", b"")):
        with pytest.raises(OSError, match="Input/output error"):
            attempt()
    assert {path.suffix for path in tmp_path.iterdir()} == {".tmp"}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_do_not_sync_directories_will_do(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def only_files(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    write(tmp_path / "m.safetensors", TENSORS)
    assert load_file(tmp_path / "m.safetensors").keys() == TENSORS.keys()
