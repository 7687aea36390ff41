"""Reading and writing checkpoint files: source shards mapped, never loaded; output shards streamed, then read back.

It knows tensors by name, and nothing of attention. safetensors' own `save_file` copies a whole shard into memory
first; the format is a JSON header and the bytes, and writing them here keeps what is merely copied out of memory.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from attention.errors import Failure

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_AGAIN = "the files are not of one checkpoint; get it again from where it came from"
SAFETENSORS, _PICKLES = "model.safetensors", "pytorch_model.bin"


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def stored_as(self, dtype: torch.dtype | None) -> TensorInfo:
        """The same under `--dtype`: floats are cast, everything else stays."""
        return TensorInfo(self.shape, dtype) if dtype and self.dtype in _CASTABLE else self


class Reader:
    """The tensors of a checkpoint directory, single file or sharded, `.safetensors` or weights-only `.bin`.

    Attributes:
        infos: Every tensor's shape and dtype, in file order.
        files: The weight files, in order.
        aliases: Tensors of a `.bin` that are an earlier one under another name, and that one's name.

    Raises:
        Failure: A shard is missing, damaged or not what the index says.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._place: dict[str, str] = {}
        self._open: tuple[str, Any] | None = None
        self.infos: dict[str, TensorInfo] = {}
        self.aliases: dict[str, str] = {}
        self.files, index = _weight_files(directory)
        for file in self.files:
            for name, info in self._headers(file):
                self.infos[name], self._place[name] = info, file
        if index is not None:
            self._check_index(index)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor, as a view of its mapped file. One file is open at a time."""
        return self._shard(self._place[name]).get_tensor(name)

    def fingerprint(self) -> dict[str, list[int]]:
        """Size and modification time of each file: what a resumed run must find unchanged."""
        stats = {file: (self._directory / file).stat() for file in self.files}
        return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}

    def _headers(self, file: str) -> Iterator[tuple[str, TensorInfo]]:
        shard = self._shard(file)
        if isinstance(shard, _Pickle):
            self.aliases |= shard.aliases
            yield from ((name, TensorInfo(tuple(t.shape), t.dtype)) for name, t in shard.tensors.items())
            return
        for name in shard.offset_keys():
            part = shard.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise Failure(f"{file}: tensor {name} has dtype {part.get_dtype()}, which kvfold cannot copy")
            yield name, TensorInfo(tuple(part.get_shape()), DTYPES[part.get_dtype()])

    def _shard(self, file: str) -> Any:
        if self._open is None or self._open[0] != file:
            self._open = None  # unmap the last file before the next is mapped
            path = self._directory / file
            self._open = (file, _Pickle(path) if file.endswith(".bin") else open_safetensors(path))
        return self._open[1]

    def _check_index(self, index: Mapping[str, str]) -> None:
        for name, file in index.items():
            if self._place.get(name) != file:
                raise Failure(f"the index puts tensor {name} into {file}, and that file has no such tensor", hint=_AGAIN)
        if extra := sorted(set(self.infos) - set(index)):
            raise Failure(f"{self._place[extra[0]]} holds tensor {extra[0]}, and the index does not list it", hint=_AGAIN)


class _Pickle:
    """A `.bin` shard read with weights_only, mapped where its format allows; equal views of one storage are aliases."""

    def __init__(self, path: Path) -> None:
        try:
            # Files from before torch 1.6 are no zip archives, and cannot be mapped.
            loaded = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        except Exception as error:  # unpickling can fail in any way
            reason = " ".join(str(error).split())[:160]
            raise Failure(
                f"{path.name} is no weights-only pickle: {reason}", hint="convert it to safetensors where it came from"
            ) from None
        if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
            raise Failure(
                f"{path.name} holds more than named tensors", hint="save the model's state_dict alone, as safetensors"
            )
        self.tensors: dict[str, torch.Tensor] = loaded
        self.aliases: dict[str, str] = {}
        seen: dict[Any, str] = {}
        for name, tensor in loaded.items():
            first = seen.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), name)
            if first != name:
                self.aliases[name] = first

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def open_safetensors(path: Path) -> Any:
    """A file, mapped. Raises `Failure` if it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Failure(
            f"{path.name} is truncated or damaged: {error}", hint="compare its size with where it came from, and get it again"
        ) from None


def _weight_files(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """The weight files that transformers would load, and the index if there is one."""
    for single in (SAFETENSORS, _PICKLES):
        index_path = directory / f"{single}.index.json"
        if (directory / single).is_file():
            return [single], None
        if index_path.is_file():
            try:
                index = dict(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError):
                raise Failure(f"{index_path.name} is no weight index: it needs a weight_map", hint=_AGAIN) from None
            if not all(isinstance(file, str) for file in index.values()):
                raise Failure(f"{index_path.name} is no weight index: it must name a file for each tensor", hint=_AGAIN)
            files = sorted(set(index.values()))
            if missing := [file for file in files if not (directory / file).is_file()]:
                named = ", ".join(missing[:3]) + (", …" if missing[3:] else "")
                raise Failure(f"{directory} lacks {len(missing)} of {len(files)} weight files: {named}", hint="get them again")
            return files, index
    raise Failure(
        f"{directory} holds neither {SAFETENSORS} nor {_PICKLES}, nor an index of either",
        hint="kvfold reads checkpoints as transformers' save_pretrained writes them",
    )
