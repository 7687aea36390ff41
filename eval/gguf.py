"""GGUF files as sources: an ordinary checkpoint of what transformers reads in one, dequantised, kept in a cache.

transformers ignores the keys and tensors of a file that it does not know, such as scaled RoPE. Here they are refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.errors import Failure, Refusal

_log = logging.getLogger("kvfold")

# Architectures whose weights were compared with what had been written.
_READ = ("llama", "qwen2", "qwen3")
# Keys that transformers reads, and those that a config of these architectures implies.
_KEYS = {
    "context_length", "block_count", "feed_forward_length", "embedding_length", "rope.dimension_count", "rope.freq_base",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "vocab_size",
}  # fmt: skip
_HEAD_DIMS = ("rope.dimension_count", "attention.key_length", "attention.value_length")
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTISED = "bfloat16"  # what quantised weights become


@dataclass(frozen=True)
class Unpacked:
    """The checkpoint that a GGUF file became.

    Attributes:
        directory: Where it is.
        quantisation: What most of its weights were: "Q4_1".
        dtype: What they are.
    """

    directory: Path
    quantisation: str
    dtype: str

    @property
    def note(self) -> str:
        """For plans and cards."""
        changed = "" if self.quantisation in _PLAIN else f" {self.quantisation} weights were dequantised to {self.dtype}."
        return f"the source is a GGUF file.{changed} Its tokenizer is as transformers reads it"


def unpacked(path: Path) -> Unpacked:
    """The checkpoint of a file; the first call makes it, and takes the memory of all its weights.

    Raises:
        Refusal: The package gguf is missing, the file is no GGUF file, or it has something that transformers does not read.
        Failure: It cannot be written.
    """
    found = path.stat()
    identity = f"{path.resolve()} {found.st_size} {found.st_mtime_ns}"
    place = _cache() / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not place.is_dir():
        _log.warning("%s is unpacked into %s, where later commands find it", path, place)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="unfinished-", dir=place.parent) as directory:
                whole = Path(directory) / "whole"
                _unpack(path, whole)
                if not place.is_dir():  # another process may have been faster
                    whole.rename(place)
        except OSError as error:
            raise Failure(
                f"cannot unpack {path} into {place}: {error}", hint="free some space, or set XDG_CACHE_HOME to another disk"
            ) from None
    facts = json.loads((place / "gguf.json").read_text(encoding="utf-8"))
    return Unpacked(place / "checkpoint", facts["quantisation"], facts["dtype"])


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kvfold" / "gguf"


def _unpack(path: Path, place: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    keys, types, count = _described(path)
    quantisation = types.most_common(1)[0][0]
    dtype = _PLAIN.get(quantisation, _QUANTISED)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            **where, dtype=getattr(torch, dtype), output_loading_info=True, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(**where, local_files_only=True)
    except OSError:
        raise
    except Exception as error:  # transformers raises several exception types of its own
        reason = " ".join(str(error).split())[:300]
        raise Refusal(
            f"transformers cannot read {path}: {reason}", hint="convert the checkpoint that it was made from"
        ) from error
    _check(path, keys, model.config, loaded, count - len(dict(model.named_parameters())))
    del model.config.quantization_config
    model.hf_quantizer = None
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(place / "checkpoint")
    tokenizer.save_pretrained(place / "checkpoint")
    if licence := keys.get("general.license"):
        (place / "checkpoint" / "README.md").write_text(f"---\nlicense: {json.dumps(licence)}\n---\n", encoding="utf-8")
    (place / "gguf.json").write_text(json.dumps({"quantisation": quantisation, "dtype": dtype}), encoding="utf-8")


def _described(path: Path) -> tuple[dict[str, Any], Counter[str], int]:
    """The file's keys but those of its tokenizer, the bytes of its tensors by their type, and how many tensors it has.

    Raises:
        Refusal: It cannot be read, or is of an architecture whose reading was not checked.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise Refusal(
            f"{path} is a GGUF file, for which the package gguf is missing", hint="pip install 'kvfold[gguf]'"
        ) from None
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} is no GGUF file: {error}") from None
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    types: Counter[str] = Counter()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_bytes)
    architecture = keys.get("general.architecture")
    if architecture not in _READ or not types:
        raise Refusal(
            f"{path} has the architecture {architecture!r} and {len(reader.tensors)} tensors; kvfold reads GGUF files of "
            f"{', '.join(_READ)}",
            hint="convert the checkpoint that it was made from",
        )
    if keys.get("split.count", 1) > 1:
        raise Refusal(f"{path} is one of {keys['split.count']} parts", hint="merge them with llama-gguf-split --merge")
    return keys, types, len(reader.tensors)


def _check(path: Path, keys: Mapping[str, Any], config: Any, loaded: Mapping[str, Any], unread: int) -> None:
    """Refuse a file of which transformers has not read everything."""
    architecture = keys["general.architecture"]
    own = {name.removeprefix(f"{architecture}."): value for name, value in keys.items() if name.startswith(f"{architecture}.")}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    strange = {name: value for name, value in own.items() if name not in _KEYS and name not in _HEAD_DIMS}
    strange |= {name: own[name] for name in _HEAD_DIMS if own.get(name, head_dim) != head_dim}
    problems = [f"its key {architecture}.{name} is {value}" for name, value in strange.items()]
    problems += [f"{len(names)} tensors are {kind.removesuffix('_keys')}" for kind, names in loaded.items() if names]
    problems += [f"{unread} of its tensors have no place in the model"] if unread else []
    if problems:
        raise Refusal(
            f"transformers does not read all of {path}: {', '.join(problems)}",
            hint="convert the checkpoint that it was made from",
        )
