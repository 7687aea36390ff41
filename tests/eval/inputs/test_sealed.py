"""Layers on a shelf: what was put there comes back bit for bit, and what has changed since then does not count."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from written import TENSORS

from attention.errors import Failure
from eval.inputs.sealed import Shelf

NOTE = {"tokens": 7, "name": "é"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Shelf(tmp_path, "layer").put(0, TENSORS, NOTE)
    return tmp_path / "layer-00000.safetensors"


def test_what_was_put_there_comes_back(file: Path) -> None:
    shelf = Shelf(file.parent, "layer")
    assert shelf.has(0)
    tensors, note = shelf.get(0)
    assert note == NOTE
    assert tensors.keys() == TENSORS.keys()
    assert all(tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    assert not shelf.has(1)


def test_the_same_layer_is_the_same_bytes(file: Path, tmp_path: Path) -> None:
    first = file.read_bytes()
    Shelf(tmp_path, "layer").put(0, dict(reversed(TENSORS.items())), NOTE)
    assert file.read_bytes() == first


def test_no_flipped_bit_goes_unnoticed(file: Path) -> None:
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 if place % 2 else 128)]) + whole[place + 1 :])
        assert not Shelf(file.parent, "layer").has(0), place
    with pytest.raises(Failure, match="is damaged"):
        Shelf(file.parent, "layer").get(0)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a directory": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    **{f"metadata: {metadata}": lambda file, metadata=metadata: file.write_bytes(save(TENSORS, metadata)) for metadata in (
        None, {"noted": "[]"}, {"noted": "x"}, {"noted": '{"note": 5, "sha256": 5}'}, {"a": "b"}
    )},
    **{f"cut off at {end}": lambda file, end=end: file.write_bytes(file.read_bytes()[:end]) for end in (0, 7, 8, 100, -1)},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_as_it_was_put_there_does_not_count(change: str, file: Path) -> None:
    CHANGES[change](file)
    assert not Shelf(file.parent, "layer").has(0)


def test_what_was_removed_since_is_missed(file: Path) -> None:
    shelf = Shelf(file.parent, "layer")
    assert shelf.has(0)
    file.unlink()
    assert not shelf.has(0)
    with pytest.raises(Failure, match=r"layer-00000\.safetensors is damaged, or was removed"):
        shelf.get(0)
