"""GGUF files as sources: what transformers reads in one, dequantised.

transformers ignores the keys and tensors of a file that it does not know, such as scaled RoPE, and takes its class's defaults
for what it does not read. Here both are refused, by what the file says and what the config of transformers would compute.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from attention.errors import Failure, Refusal, one_line
from eval.inputs import config_rules

_log = logging.getLogger("kvfold")
# Keys of a header, without the architecture before them, and the names that configs have for what they say, of which the first
# that is there counts. Other keys are refused.
_MEANS = {
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_used_count": ("num_experts_per_tok",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "rope.dimension_count": ("rotary_dims",),
    "rope.freq_base": ("rope_theta",),
}
# Sizes that tensors have: where they are wrong, weights do not fit. (The class need not be made for so many positions.)
_SIZES = {
    "context_length", "block_count", "embedding_length", "feed_forward_length", "vocab_size", "expert_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length",
}  # fmt: skip
# What llama.cpp takes for keys that are not there.
_ABSENT = {"rope.freq_base": 10000.0, "attention.sliding_window": None}
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TOKENS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type"))
_TOKENIZER = "its tokenizer is as transformers reads it, which may split some text otherwise than the original's"
_ORIGINAL = "convert the checkpoint that it was made from"
# Bounds of a header.
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value of each type, but of
_STRING, _ARRAY = 8, 9  # which say theirs
_MOST_ENTRIES = 2**16  # keys, or tensors
_MOST_VALUES = 2**21  # of all lists together; a vocabulary of 262,144 tokens takes 1.3 million
_MOST_DIMENSIONS = 4


@dataclass(eq=False)
class GgufFile:
    """A file, by its header.

    Attributes:
        path: The file.
        keys: Its keys; True in place of lists of tokens.
        tensors: Its tensors' names.
        quantisation: What most bytes of its weights are: "Q4_1"; if all are plain floats, what most of these are.
        dtype: What the weights become; bfloat16 if they are quantised.
    """

    path: Path
    keys: Mapping[str, Any]
    tensors: Sequence[str]
    quantisation: str
    dtype: str

    @classmethod
    def of(cls, path: Path) -> GgufFile:
        """Read a header.

        Raises:
            Refusal: The package gguf is missing, the file is not a GGUF file, or its header is damaged.
            Failure: It cannot be read.
        """
        try:
            from gguf import GGUFReader
        except ImportError:
            hint = "pip install 'kvfold[gguf]'"
            raise Refusal(f"{path} is a GGUF file, for which the package gguf is missing", hint=hint) from None
        try:
            _require_sound(path)
            reader = GGUFReader(path)
            keys = {name: name in _TOKENS or field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise Failure(f"cannot read {path}: {error}") from None
        except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
            said = f"{path} is not a GGUF file, or is incomplete: {one_line(error)}"
            raise Refusal(said, hint="download it again") from None
        sizes: Counter[str] = Counter()
        for tensor in reader.tensors:
            if len(tensor.shape) > 1:
                sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
        if not isinstance(keys.get("general.architecture"), str) or not sizes:
            raise Refusal(f"{path} holds no weights, or names no architecture", hint="download it again")
        layers = keys.get(f"{keys['general.architecture']}.block_count")
        if not isinstance(layers, int) or not 0 < layers <= config_rules.MAX_LAYERS:  # of which a config makes lists
            said = f"{path} is damaged: block_count is {layers!r}; it must be from 1 to {config_rules.MAX_LAYERS:,}"
            raise Refusal(said, hint="download it again")
        if keys.get("split.count", 1) > 1:
            raise Refusal(f"{path} is one of {keys['split.count']} parts", hint="merge them with llama-gguf-split --merge")
        quantised = Counter({kind: size for kind, size in sizes.items() if kind not in _PLAIN})
        most = (quantised or sizes).most_common(1)[0][0]
        return cls(path, keys, [tensor.name for tensor in reader.tensors], most, _PLAIN.get(most, "bfloat16"))

    @property
    def note(self) -> str:
        changed = "" if self.quantisation in _PLAIN else f": {self.quantisation} weights were dequantised to {self.dtype}"
        return f"the source is a GGUF file{changed}; {_TOKENIZER}"

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The config.json that transformers makes of it.

        Raises:
            Refusal: transformers does not read the architecture, or ignores something in the file.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

        with self._read_by_transformers() as where:
            config = transformers.AutoConfig.from_pretrained(**where)
        if config.model_type not in CLASSES or getattr(config, "num_attention_heads", None) is None:
            raise Refusal(f"{self.path} is a {config.model_type}, not a decoder with attention", hint="choose another model")
        config.architectures, config.dtype = [CLASSES[config.model_type]], getattr(torch, self.dtype)
        raw: dict[str, Any] = json.loads(config.to_json_string())
        config_rules.check_raw(raw, f"the header of {self.path}")
        self._refuse([*self._differences(config), *(f"it has a tensor {name}" for name in self._without_place(config))])
        return raw

    @cached_property
    def directory(self) -> Path:
        """The checkpoint in a temporary directory, which is removed with this object, or when the process ends.

        It takes the memory of all weights.

        Raises:
            Refusal: transformers does not read all of it.
            Failure: The disk is full.
        """
        _ = self.raw  # refuses what transformers ignores, before weights are read
        quiet = contextlib.redirect_stderr(io.StringIO())  # transformers draws bars that no setting hides
        with self._read_by_transformers() as where, quiet:
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                **where,
                dtype=getattr(torch, self.dtype),
                quantization_config=transformers.GgufConfig(dequantize=True),
                output_loading_info=True,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        self._refuse([f"{len(names)} tensors are {kind.removesuffix('_keys')}" for kind, names in loaded.items() if names])
        model.config.architectures = [type(model).__name__]
        directory = Path(tempfile.mkdtemp(prefix="kvfold-gguf-"))
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        try:
            with quiet:
                model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            if licence := self.keys.get("general.license"):
                (directory / "README.md").write_text(f"---\nlicense: {json.dumps(licence)}\n---\n", encoding="utf-8")
        except (SafetensorError, OSError) as error:
            raise Failure(
                f"cannot dequantise {self.path} into {directory}: {error}",
                hint="is the disk full? TMPDIR may name a directory on another one",
            ) from None
        size = sum(path.stat().st_size for path in directory.glob("*")) / 1e9
        _log.warning("%s is dequantised into %s (%.2f GB), which is removed at the end", self.path, directory, size)
        return directory

    @contextlib.contextmanager
    def _read_by_transformers(self) -> Iterator[dict[str, Any]]:
        """The arguments by which transformers reads the file, and nothing beside it or in the working directory.

        Raises:
            Refusal: transformers raises an error within the block.
        """
        with tempfile.TemporaryDirectory() as nothing:
            try:
                where = {"pretrained_model_name_or_path": nothing, "gguf_file": str(self.path.absolute())}
                yield {**where, "local_files_only": True}
            except Exception as error:  # transformers raises several exception types of its own
                raise Refusal(f"transformers cannot read {self.path}: {one_line(error, 300)}", hint=_ORIGINAL) from error

    def _differences(self, config: Any) -> Iterator[str]:
        """The keys that say something else than the config computes."""
        architecture, computed = self.keys["general.architecture"], _computed(config)
        prefix = f"{architecture}."
        own = {name.removeprefix(prefix): value for name, value in self.keys.items() if name.startswith(prefix)}
        absent = {name: value for name, value in _ABSENT.items() if _MEANS[name][0] in computed}
        for name, said in (absent | own).items():
            read: Any = next((computed[attribute] for attribute in _MEANS.get(name, ()) if attribute in computed), None)
            numbers = isinstance(said, float) and isinstance(read, int | float)
            same = math.isclose(said, read, rel_tol=1e-6) if numbers else said == read  # a header's floats have 32 bits
            if same or name in _SIZES or (name == "rope.scaling.type" and said == "none"):
                continue
            stated = f"is {said}" if name in own else f"is not there, which means {said}"
            yield f"its key {architecture}.{name} {stated}" + (f", and {read} was read" if name in _MEANS else "")
        # Headers do not say by what Gemma scales logits; llama.cpp knows it of each size.
        if (scale := computed.get("query_pre_attn_scalar")) not in (None, computed["head_dim"]):
            yield f"logits would be scaled for {scale} dims, and heads have {computed['head_dim']}"

    def _without_place(self, config: Any) -> list[str]:
        """The tensors that transformers would leave out."""
        try:
            from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
        except ImportError:  # internals of another version, which reports them on loading
            return []
        with self._read_by_transformers():
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            processor = TENSOR_PROCESSORS.get(self.keys["general.architecture"], TensorProcessor)({})
            places = get_gguf_hf_weights_map(model, processor)
        return [name for name in self.tensors if not {name, name.removesuffix(".weight")} & places.keys()]

    def _refuse(self, problems: Sequence[str]) -> None:
        if problems:
            listed = ", ".join(problems[:3]) + (f", and {len(problems) - 3} more" if len(problems) > 3 else "")
            raise Refusal(f"transformers does not read all of {self.path}: {listed}", hint=_ORIGINAL)


def _computed(config: Any) -> dict[str, Any]:
    """The values of a config by its own names, and what it makes of RoPE: `rope_theta`, and the rotary dims of a head."""
    values = dict(config.to_dict())
    head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope  # of classes in which layers differ
    values |= {"num_attention_heads": config.num_attention_heads, "head_dim": head_dim}
    if "rope_theta" in rope:
        dims = int(head_dim * (rope.get("partial_rotary_factor") or 1))
        values |= {"rope_theta": rope["rope_theta"], "rotary_dims": dims}
    return values


def _require_sound(path: Path) -> None:
    """Walk over a header before a library reads it: counts that no model has would keep that busy for hours.

    Raises:
        ValueError: It runs beyond the end of the file, or says something that no writer of GGUF files does.
        OSError: The file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:

        def number(width: int) -> int:
            """The next unsigned integer of so many bytes, little-endian."""
            found = file.read(width)
            if len(found) < width:
                raise ValueError("its header ends too soon")
            return int.from_bytes(found, "little")

        def skip(width: int) -> None:
            if file.tell() + width > size:
                raise ValueError("its header ends too soon")
            file.seek(width, 1)

        def skip_values(kind: int, count: int) -> None:
            if kind == _STRING:
                for _ in range(count):
                    skip(number(8))
            elif kind in _WIDTHS:
                skip(count * _WIDTHS[kind])
            else:
                raise ValueError(f"it has a value of type {kind}, which does not exist")

        if file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := number(4)) not in (2, 3):
            raise ValueError(f"it is of version {version}, or written for machines of another byte order")
        tensors, keys, listed = number(8), number(8), 0
        for what, count in (("tensors", tensors), ("keys", keys)):
            if count > _MOST_ENTRIES:
                raise ValueError(f"it has {count} {what}, more than {_MOST_ENTRIES}")
        for _ in range(keys):
            skip(number(8))
            kind, count = number(4), 1
            if kind == _ARRAY:
                kind, count = number(4), number(8)
                listed += count
            if kind == _ARRAY:
                raise ValueError("it has a list of lists")
            if listed > _MOST_VALUES:
                raise ValueError(f"its lists have more than {_MOST_VALUES} values")
            skip_values(kind, count)
        for _ in range(tensors):
            skip(number(8))
            if (dimensions := number(4)) > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions, more than {_MOST_DIMENSIONS}")
            skip(8 * dimensions + 4 + 8)  # its sizes, its type and its place
