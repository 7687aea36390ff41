"""Writes a checkpoint of a former model type as one of transformers' class, once, into the user's cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eval.inputs import former_tokenizers
from eval.inputs.former import Former
from eval.inputs.reader import PICKLES, SAFETENSORS, TOKENIZER_FILES, Reader
from eval.inputs.unpacked import unpacked

if TYPE_CHECKING:
    from eval.inputs.former import Parts

_INDEXES = tuple(f"{single}.index.json" for single in (SAFETENSORS, PICKLES))
_TOKENIZERS = (*TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "chat_template*")
_COMPANIONS = (*_TOKENIZERS, "*.json", "*.txt", "LICENSE*", "NOTICE*", "USE_POLICY*", "README.md")
_NEEDED = ("config.json", "generation_config.json", *_TOKENIZERS, "model*.safetensors*", "pytorch_model*.bin*")


def rewritten(former: Former, source: Path) -> Path:
    """The checkpoint in transformers' form; the first call writes it, shard by shard.

    Raises:
        Refusal: Its tokenizer is of a kind that is not read.
        Failure: It cannot be read or written, or has a tensor that its former code does not have.
    """
    return unpacked(source, _found(source, _NEEDED), lambda: _Rewriting(former, source), former.identity).directory


def _found(source: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in source.glob(pattern) if path.is_file()})


@dataclass(frozen=True)
class _Rewriting:
    """A checkpoint of a former type, in a directory."""

    former: Former
    source: Path

    @property
    def note(self) -> str:
        return self.former.note

    def unpack(self, directory: Path) -> None:
        reader = Reader(self.source)
        made = {name: self.former.becomes(name) for name in reader.infos}
        if all(becomes == ((name,), None) for name, becomes in made.items()):
            self._link(reader.files, directory)
        else:
            self._write(reader, made, directory)
        for path in _found(self.source, _COMPANIONS):
            if path.name not in _INDEXES:
                shutil.copyfile(path, directory / path.name)
        (directory / "config.json").write_text(json.dumps(self.former.config, indent=2), encoding="utf-8")
        former_tokenizers.carry_over(directory)

    def _link(self, files: list[str], directory: Path) -> None:
        """Weights that stay as they are, beside another config."""
        for path in (self.source / name for name in (*files, *_INDEXES)):
            if path.is_file():
                (directory / path.name).symlink_to(path.resolve())

    def _write(self, reader: Reader, made: Mapping[str, tuple[tuple[str, ...], Parts | None]], directory: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        weight_map: dict[str, str] = {}
        nbytes = 0
        for position, file in enumerate(reader.files, 1):
            shard = f"model-{position:05}-of-{len(reader.files):05}.safetensors" if len(reader.files) > 1 else SAFETENSORS
            tensors = {
                new: part.clone(memory_format=torch.contiguous_format)  # of a stack, or of a tied `.bin`
                for name in reader.infos
                if reader.file(name) == file
                for new, part in _parted(*made[name], reader[name])
            }
            try:
                save_file(tensors, directory / shard, {"format": "pt"})
            except SafetensorError as error:  # where a disk is full
                raise OSError(str(error)) from error
            weight_map |= dict.fromkeys(tensors, shard)
            nbytes += sum(tensor.nbytes for tensor in tensors.values())
        if len(reader.files) > 1:
            index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
            (directory / f"{SAFETENSORS}.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _parted(names: tuple[str, ...], parts: Parts | None, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield from zip(names, parts(tensor) if parts else (tensor,) * len(names), strict=True)
