"""Reading checkpoints: single files and shards, indices, pickles, and everything that can be wrong with them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from written import Convert, Make, edit, left_nothing, ok, weights

from attention.errors import Failure, Refusal
from eval.inputs.reader import Reader, TensorInfo


def sharded(path: Path, shards: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    weight_map = index or {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def two_shards(path: Path, index: dict[str, str] | None = None) -> Path:
    return sharded(path, {"one.safetensors": {"x": torch.ones(3)}, "two.safetensors": {"y": torch.zeros(2, 2)}}, index)


def test_shards_are_read_by_what_they_hold_and_those_that_lack_or_are_cut_are_named(tmp_path: Path) -> None:
    reader = Reader(two_shards(tmp_path, {"x": "two.safetensors", "w": "one.safetensors"}))  # as transformers reads them
    assert torch.equal(reader["y"], torch.zeros(2, 2))
    assert torch.equal(reader["x"], torch.ones(3))
    assert reader.files == ["one.safetensors", "two.safetensors"]
    assert (set(reader.infos), reader.file("y")) == ({"x", "y"}, "two.safetensors")
    whole = (tmp_path / "two.safetensors").read_bytes()
    (tmp_path / "two.safetensors").write_bytes(whole[:-3])
    with pytest.raises(Failure, match=r"two\.safetensors is truncated or damaged"):
        Reader(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(Failure, match=r"lacks 1 of 2 weight files: two\.safetensors"):
        Reader(tmp_path)


def test_a_tensor_in_two_shards_has_to_be_the_same(tmp_path: Path) -> None:
    shards = {"one.safetensors": {"w": torch.ones(3), "x": torch.ones(3)}, "two.safetensors": {"x": torch.ones(3)}}
    assert torch.equal(Reader(sharded(tmp_path, shards))["x"], torch.ones(3))
    shards["two.safetensors"]["x"] = torch.zeros(3)
    with pytest.raises(Failure, match=r"one\.safetensors and two\.safetensors both hold tensor x"):
        Reader(sharded(tmp_path, shards))


def test_other_files_than_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"holds neither model\.safetensors nor pytorch_model\.bin, nor an index of either$"):
        Reader(tmp_path)
    (tmp_path / "consolidated.00.pth").write_text("{}")
    with pytest.raises(Refusal, match=r"but weights in their maker's own layout \(consolidated\.00\.pth\)") as caught:
        Reader(tmp_path)
    assert "get the same model" in str(caught.value.hint)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "from before torch 1.6"])
def test_a_weights_only_pickle_is_read_and_shared_tensors_once(zipped: bool, tmp_path: Path) -> None:
    shared, square = torch.randn(3, 2), torch.randn(3, 3)
    views = {"a": square, "b": square.T, "c": square[:2], "e": torch.empty(0, 2), "f": torch.empty(0, 2)}
    tensors = {"embed": shared, "own": torch.ones(2), "head": shared, **views}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    reader = Reader(tmp_path)
    assert list(reader.infos) == list(tensors)
    assert all(torch.equal(reader[name], tensor) for name, tensor in tensors.items())
    assert reader.aliases == {"head": "embed"}


def test_a_pickle_that_runs_code_is_refused_unrun(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (str(tmp_path / "ran"),)

    torch.save({"x": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        Failure, match="does not hold weights alone, or is damaged: Unsupported global: GLOBAL getattr"
    ) as error:
        Reader(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert "weights_only" not in str(error.value), "torch advises to run it"


@pytest.mark.parametrize(
    "file",
    ["../two.safetensors", "{}/two.safetensors", "sub/two.safetensors", "sub\\two.safetensors", "..", ".", "", "C:two", "a\0b",
     "\x1b[31mtwo.safetensors"],
)  # fmt: skip
def test_an_index_may_name_files_beside_it_only(file: str, tmp_path: Path) -> None:
    inside = tmp_path / "model"
    (inside / "sub").mkdir(parents=True)
    for directory in (tmp_path, inside / "sub"):
        save_file({"y": torch.ones(1)}, directory / "two.safetensors")
    file = file.format(tmp_path)
    sharded(inside, {"one.safetensors": {"x": torch.ones(3)}}, {"x": "one.safetensors", "y": file})
    with pytest.raises(Failure, match="which is not a file name") as caught:
        Reader(inside)
    assert str(caught.value).isprintable()


def test_a_shard_may_be_a_link(tmp_path: Path) -> None:
    """As the Hub's cache has them."""
    (tmp_path / "model").mkdir()
    two_shards(tmp_path / "model")
    (tmp_path / "model" / "two.safetensors").rename(tmp_path / "blob")
    (tmp_path / "model" / "two.safetensors").symlink_to(tmp_path / "blob")
    assert torch.equal(Reader(tmp_path / "model")["y"], torch.zeros(2, 2))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"null", b"5", b'"x"', b"[[]]", b'{"weight_map": 5}', b'{"weight_map": []}', b'{"weight_map": {"x": 5}}',
     b'{"weight_map": [[1, "x"]]}', b"[" * 100_000],
    ids=range(11),
)  # fmt: skip
def test_any_other_json_is_no_index(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(Failure, match="is not a weight index"):
        Reader(tmp_path)


def entry(shape: list[int], offsets: tuple[int, int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def headed(path: Path, header: Any, data: int, length: int | None = None) -> Path:
    """A safetensors file with this header, JSON or bytes, and so many bytes of zeros behind it."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(encoded) if length is None else length) + encoded + bytes(data)
    )
    return path


ONE = entry([2], (0, 8))
DAMAGED = {
    "no header": (b"", 0, 0),
    "no JSON": (b"\xff\xfe{", 8, None),
    "a length beyond the file": ({"a": ONE}, 8, 2**62),
    "a length of nothing": ({"a": ONE}, 8, 0),
    "overlapping tensors": ({"a": ONE, "b": entry([2], (4, 12))}, 12, None),
    "two tensors in one place": ({"a": ONE, "b": ONE}, 8, None),
    "one name twice": (b'{"a": %s, "a": %s}' % (json.dumps(ONE).encode(), json.dumps(entry([2], (8, 16))).encode()), 16, None),
    "a hole": ({"a": entry([2], (8, 16))}, 16, None),
    "offsets backwards": ({"a": entry([2], (8, 0))}, 8, None),
    "too few bytes": ({"a": ONE}, 7, None),
    "too many bytes": ({"a": ONE}, 9, None),
    "a negative size": ({"a": entry([-2], (0, 8))}, 8, None),
    "a product that overflows": ({"a": entry([2**40, 2**40], (0, 8))}, 8, None),
    "a size beyond 63 bits": ({"a": entry([2**63, 0], (0, 0))}, 0, None),
    "more dims than torch takes": ({"a": entry([1] * 65, (0, 4))}, 4, None),
    "an unknown dtype": ({"a": entry([2], (0, 8), "F99")}, 8, None),
    "a dtype that torch has and kvfold does not copy": ({"a": entry([1], (0, 8), "C64")}, 8, None),
    "half bytes": ({"a": entry([2], (0, 1), "F4")}, 1, None),
    "deep JSON": (b"[" * 100_000, 0, None),
    "a terminal escape in a name": ({"a\x1b[31m\n": ONE}, 8, None),
    "a terminal escape in a dtype": ({"a": entry([2], (0, 8), "\x1b[31m")}, 8, None),
    "letters that run backwards in a name": ({"a\u202e": ONE}, 8, None),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_one_line(case: str, tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"^model\.safetensors") as caught:
        Reader(headed(tmp_path, *DAMAGED[case]))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_tensors_without_dims_or_values_are_read(tmp_path: Path) -> None:
    reader = Reader(headed(tmp_path, {"a": entry([], (0, 4)), "b": entry([0, 3], (4, 4)), "c": entry([2, 0], (4, 4))}, 4))
    assert {name: info.shape for name, info in reader.infos.items()} == {"a": (), "b": (0, 3), "c": (2, 0)}
    assert [reader[name].shape for name in "abc"] == [(), (0, 3), (2, 0)]


@pytest.mark.filterwarnings("ignore:.*(quantized|quantization|sparse).*")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.ones(3, dtype=torch.complex64), "complex64"),
        (lambda: torch.ones(3, dtype=torch.uint32), "uint32"),
    ],
)
def test_tensors_that_safetensors_cannot_hold_are_refused(make: Callable[[], torch.Tensor], kind: str, tmp_path: Path) -> None:
    torch.save({"x": make()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Failure, match=f"tensor x is of kind {kind}, which kvfold cannot copy"):
        Reader(tmp_path)


@pytest.mark.parametrize(
    "content", [{5: torch.ones(1)}, {"x\n": torch.ones(1)}, [torch.ones(1)], {"state": {"x": torch.ones(1)}}]
)
def test_other_names_and_values_in_a_pickle_are_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(Failure, match=r"holds more than named tensors|holds control characters"):
        Reader(tmp_path)


def test_floats_are_told_from_what_is_quantised() -> None:
    floats = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    for dtype in (*floats, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64, torch.bool):
        assert TensorInfo((2,), dtype).is_float == (dtype in floats)


@pytest.mark.parametrize("said", ["float64", None], ids=["in config.json", "in the weights alone"])
def test_a_float64_checkpoint_needs_another_dtype(said: str | None, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = edit(checkpoint(), dtype=said)
    save_file({name: tensor.double() for name, tensor in weights(source).items()}, source / "model.safetensors")
    sizes = ["--kv-lora-rank", 24, "--qk-rope-head-dim", 8]
    for command in (["gqa", source, tmp_path / "out", "--groups", 4], ["mla", source, tmp_path / "out", *sizes]):
        left_nothing(convert(*command), 2, "is stored in float64", tmp_path / "out")
    done = ok(convert("gqa", source, tmp_path / "out", "--groups", 4, "--dtype", "float32"))
    assert "1536 → 768 bytes per token" in done.stdout
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.float32}
