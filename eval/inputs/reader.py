"""Reads checkpoint files: shards are mapped, never loaded. It knows tensors by name, and nothing about attention.

A checkpoint may come from anywhere: any error in its files becomes a `Failure` that names the file.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from attention.errors import Failure, Refusal
from eval.inputs.misfits import found_among, names_in

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_DIMS = 64  # the most dims of a torch tensor
_FLOATS_ONLY = "convert a checkpoint of the model in float32, bfloat16 or float16"
_AGAIN = "the files are not of one checkpoint; get it again from where it came from"
_AS_SAVED = "kvfold reads checkpoints as transformers' save_pretrained writes them"
SAFETENSORS, PICKLES = "model.safetensors", "pytorch_model.bin"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class TensorInfo:
    """The shape and dtype of a tensor, from its file's header."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_float(self) -> bool:
        """Whether it holds floats of 16, 32 or 64 bits, i.e. values that are not quantised.

        Weights stored as integers or 8-bit floats are quantised, and mean nothing without their scales.
        """
        return self.dtype.is_floating_point and self.dtype.itemsize > 1

    def stored_as(self, dtype: torch.dtype | None) -> TensorInfo:
        """The tensor under `--dtype`: floats are cast, everything else stays."""
        return TensorInfo(self.shape, dtype) if dtype and self.is_float else self


class Reader:
    """Reads the tensors of a checkpoint directory: one file or shards, `.safetensors` or weights-only `.bin`.

    As transformers does, it takes from an index the files alone: every tensor in them counts, and no other.

    Args:
        directory: The directory.
        renamed: Maps the names in the files to other ones, by which its tensors are known here.

    Attributes:
        infos: Every tensor's shape and dtype, in file order.
        files: The weight files, in order.
        aliases: Tensors of a `.bin` that repeat an earlier one, mapped to the name of that one.

    Raises:
        Refusal: There are no weights; with what there is.
        Failure: A shard is missing or damaged, or two hold other values for one tensor.
    """

    def __init__(self, directory: Path, renamed: Callable[[Collection[str]], Mapping[str, str]] | None = None) -> None:
        self._directory = directory
        self._places: dict[str, tuple[str, str]] = {}  # the file of each tensor, and its name there
        self._open: tuple[str, Any] | None = None
        self.infos: dict[str, TensorInfo] = {}
        self.aliases: dict[str, str] = {}
        self.files = weight_files(directory)
        for file in self.files:
            for name, info in self._headers(file):
                self._add(file, name, info)
        if renamed and (names := renamed(self.infos)):
            self._places = {names.get(name, name): place for name, place in self._places.items()}
            self.infos = {names.get(name, name): info for name, info in self.infos.items()}
            self.aliases = {names.get(name, name): names.get(first, first) for name, first in self.aliases.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor as a view of its mapped file. One file is open at a time."""
        file, stored = self._places[name]
        tensor: torch.Tensor = self._shard(file).get_tensor(stored)
        return tensor

    def file(self, name: str) -> str:
        """The weight file that a tensor is in."""
        return self._places[name][0]

    def _headers(self, file: str) -> Iterator[tuple[str, TensorInfo]]:
        shard = self._shard(file)
        if isinstance(shard, _Pickle):
            self.aliases |= shard.aliases
            yield from ((name, TensorInfo(tuple(t.shape), t.dtype)) for name, t in shard.tensors.items())
            return
        for name in shard.offset_keys():
            part = shard.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise Failure(
                    f"{file}: tensor {name} has dtype {part.get_dtype()}, which kvfold does not read", hint=_FLOATS_ONLY
                )
            yield name, TensorInfo(tuple(part.get_shape()), DTYPES[part.get_dtype()])

    def _add(self, file: str, name: str, info: TensorInfo) -> None:
        if not name.isprintable():
            raise Failure(f"{file}: the tensor name {name!r} holds control characters", hint=_AGAIN)
        if len(info.shape) > _DIMS or math.prod(max(1, size) for size in info.shape) >= 2**63:
            shape = ", ".join(map(str, info.shape[:8])) + (", …" if info.shape[8:] else "")
            raise Failure(f"{file}: tensor {name} has a shape that no tensor can have: [{shape}]", hint=_AGAIN)
        if name in self.infos:
            first, second = (self._shard(each).get_tensor(name) for each in (self.file(name), file))
            if first.dtype != second.dtype or not torch.equal(first, second):
                raise Failure(f"{self.file(name)} and {file} both hold tensor {name}, with other values", hint=_AGAIN)
        self.infos[name], self._places[name] = info, (file, name)

    def _shard(self, file: str) -> Any:
        if self._open is None or self._open[0] != file:
            self._open = None  # unmap the last file before the next is mapped
            path = self._directory / file
            self._open = (file, _Pickle(path) if file.endswith(".bin") else open_safetensors(path))
        return self._open[1]


class _Pickle:
    """A `.bin` shard read with weights_only, mapped where its format allows; equal views of one storage are aliases."""

    def __init__(self, path: Path) -> None:
        try:
            # Files from before torch 1.6 are not zip archives and cannot be mapped.
            loaded = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        except Exception as error:  # unpickling can fail in any way
            raise Failure(
                f"{path.name} does not hold weights alone, or is damaged: {_reason(error)}",
                hint="get it again, or have who made it save it as safetensors",
            ) from None
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
        ):
            raise Failure(
                f"{path.name} holds more than named tensors", hint="save the model's state_dict alone, as safetensors"
            )
        self.tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        seen: dict[Any, str] = {}
        for name, stored in loaded.items():
            layout = stored.layout if stored.layout is not torch.strided else None
            # Sparse or quantised, …: safetensors cannot hold it.
            if stored.is_quantized or layout or stored.device.type != "cpu" or stored.dtype not in DTYPES.values():
                what = layout or (stored.device.type if stored.device.type != "cpu" else stored.dtype)
                kind = str(what).removeprefix("torch.")
                raise Failure(f"{path.name}: tensor {name} is of kind {kind}, which kvfold cannot copy", hint=_FLOATS_ONLY)
            self.tensors[name] = tensor = stored.detach().resolve_neg()
            first = seen.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), name)
            if first != name and tensor.numel():  # all empty tensors have the same address
                self.aliases[name] = first

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def _reason(error: Exception) -> str:
    """Torch's reason for refusing a pickle, without its advice to run the code in it."""
    said = " ".join(str(error).split())
    found = re.search(r"unsupported (global: )?GLOBAL \S+|Unsupported operand \d+", said, re.IGNORECASE)
    if found or "weights_only" in said:
        return found[0] if found else "torch refuses it"
    return f"{type(error).__name__}: {said[:160]}"


def open_safetensors(path: Path) -> Any:
    """Map a file. Raises `Failure` if it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Failure(
            f"{path.name} is truncated or damaged: {' '.join(str(error).split())[:200]}",
            hint="compare its size with where it came from, and get it again",
        ) from None


def weight_files(directory: Path) -> list[str]:
    """The names of the weight files that transformers would load. Raises as `Reader`."""
    for single in (SAFETENSORS, PICKLES):
        index_path = directory / f"{single}.index.json"
        if (directory / single).is_file():
            return [single]
        if index_path.is_file():
            files = _indexed(index_path)
            if missing := [file for file in files if not (directory / file).is_file()]:
                named = ", ".join(missing[:3]) + (", …" if missing[3:] else "")
                raise Failure(f"{directory} lacks {len(missing)} of {len(files)} weight files: {named}", hint="get them again")
            return files
    what, step = found_among(names_in(directory)) or ("", _AS_SAVED)
    there = what and f", but {what}"
    raise Refusal(f"{directory} holds neither {SAFETENSORS} nor {PICKLES}, nor an index of either{there}", hint=step)


def _indexed(path: Path) -> list[str]:
    """The files that an index names, in order.

    Raises:
        Failure: It is not a weight index, or names a file outside its directory.
    """
    try:
        index = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError):
        index = {}
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}", hint="see to its permissions, and to the disk") from None
    if not index or not all(isinstance(text, str) for item in index.items() for text in item):
        raise Failure(f"{path.name} is not a weight index: its weight_map must name a file for each tensor", hint=_AGAIN)
    for name, file in index.items():
        # Refuse backslashes and drives on every system. Links inside the directory are its owner's choice.
        if file in ("", ".", "..") or not file.isprintable() or set(file) & set("/\\:"):
            raise Failure(
                f"{path.name} puts tensor {name} into {file!r}, which is not a file name",
                hint="weight files lie beside their index; get the checkpoint again from where it came from",
            )
    return sorted(set(index.values()))
