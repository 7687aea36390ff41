"""GGUF files as sources: an ordinary checkpoint of what transformers reads in one, dequantised.

transformers ignores the keys and tensors of a file that it does not know, such as scaled RoPE. Here they are refused. What it
makes of a tokenizer may split text in another way than the original; the note says where that is known.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.errors import Failure, Refusal, one_line
from eval.inputs.gguf_header import require_sound
from eval.inputs.unpacked import Unpacked, unpacked

# Architectures whose weights were compared with what had been written.
_READ = ("LLAMA", "QWEN2", "QWEN3")  # by the names of gguf.MODEL_ARCH
# Keys that transformers reads, and those that a config of these architectures implies.
_KEYS = {
    "context_length", "block_count", "feed_forward_length", "embedding_length", "rope.dimension_count", "rope.freq_base",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "vocab_size",
}  # fmt: skip
_TENSORS = re.compile(
    r"(token_embd|output|output_norm|blk\.\d+\.(attn_(norm|q|k|v|output|q_norm|k_norm)|ffn_(norm|gate|up|down)))\.(weight|bias)"
)
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_HEAD_DIMS = ("rope.dimension_count", "attention.key_length", "attention.value_length")
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTISED = "bfloat16"  # what quantised weights become
_MERGES = "tokenizer.ggml.merges"  # of byte pairs; SentencePiece has none
_TOKENS = ("tokenizer.ggml.tokens", _MERGES, "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
_ORIGINAL = "convert the checkpoint that it was made from"


@dataclass(frozen=True)
class Described:
    """The header of a file.

    Attributes:
        path: The file.
        keys: Its keys; True in place of lists of tokens.
        tensors: Its tensors' names, and their sizes as the file has them: columns first.
        quantisation: What most bytes of its weights are: "Q4_1"; if all are plain floats, what most of these are.
        dtype: What the weights become.
    """

    path: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]
    quantisation: str
    dtype: str

    @classmethod
    def of(cls, path: Path) -> Described:
        """Read a header.

        Raises:
            Refusal: It cannot be read, or is of an architecture whose reading was not checked.
        """
        try:
            from gguf import GGUFReader
        except ImportError:
            hint = "pip install 'kvfold[gguf]'"
            raise Refusal(f"{path} is a GGUF file, for which the package gguf is missing", hint=hint) from None
        try:
            require_sound(path)
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
        if str(keys.get("general.architecture")).upper() not in _READ or not sizes:
            found = f"the architecture {keys.get('general.architecture')!r} and {len(reader.tensors)} tensors"
            raise Refusal(f"{path} has {found}; kvfold reads GGUF files of {', '.join(_READ).lower()}", hint=_ORIGINAL)
        quantised = Counter({kind: size for kind, size in sizes.items() if kind not in _PLAIN})
        most = (quantised or sizes).most_common(1)[0][0]
        tensors = {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors}
        return cls(path, keys, tensors, most, _PLAIN.get(most, _QUANTISED))

    @property
    def note(self) -> str:
        changed = "" if self.quantisation in _PLAIN else f": {self.quantisation} weights were dequantised to {self.dtype}"
        return "; ".join((f"the source is a GGUF file{changed}", *self._cautions()))

    def _cautions(self) -> list[str]:
        """Where transformers' tokenizer is known to differ from the file's."""
        found, pre = [], self.keys.get("tokenizer.ggml.pre", "default")
        if _MERGES in self.keys and pre not in {"gpt-2", *_pre_tokenizers()}:
            rules = f"its tokenizer splits text by the rules {pre!r}, which transformers does not read"
            found.append(f"{rules}: some text becomes other tokens")
        elif _MERGES not in self.keys and self.keys.get("tokenizer.ggml.add_space_prefix") is False:
            found.append("its tokenizer adds no space before a text, and transformers' does")
        return found

    def check_keys(self) -> None:
        """Refuse what transformers would leave out, before weights are read."""
        architecture = self.keys["general.architecture"]
        if self.keys.get("split.count", 1) > 1:
            hint = "merge them with llama-gguf-split --merge"
            raise Refusal(f"{self.path} is one of {self.keys['split.count']} parts", hint=hint)
        self._require_sizes()
        strange = [name for name in self._own() if name not in _KEYS and name not in _HEAD_DIMS]
        problems = [f"its key {architecture}.{name} is {self._own()[name]}" for name in strange]
        problems += [f"it has a tensor {name}" for name in self.tensors if not _TENSORS.fullmatch(name)]
        self._refuse(problems)

    def _require_sizes(self) -> None:
        """Refuse sizes that are not those of the tensors, before a model of these sizes is made."""
        blocks = {int(found[1]) for name in self.tensors if (found := _BLOCK.match(name))}
        own, wide = self._own(), self.tensors.get("token_embd.weight", ())
        sizes = {"block_count": len(blocks) if blocks == set(range(len(blocks))) else None}
        if len(wide) == 2:
            sizes |= {"embedding_length": wide[0]}
        if "vocab_size" in own and len(wide) == 2:
            sizes |= {"vocab_size": wide[1]}
        if len(up := self.tensors.get("blk.0.ffn_up.weight", ())) == 2:
            sizes |= {"feed_forward_length": up[1]}
        for name, size in sizes.items():
            if (said := own.get(name)) != size or isinstance(said, bool):
                raise Refusal(
                    f"{self.path} is damaged: its key {self.keys['general.architecture']}.{name} is {said!r}, and its tensors "
                    f"say {'no number' if size is None else size}",
                    hint="download it again",
                )

    def unpack(self, directory: Path) -> None:
        """Write the checkpoint of a file into an empty directory; it takes the memory of all its weights.

        Raises:
            Refusal: transformers does not read all of it.
            OSError: The disk is full.
        """
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        path = self.path
        # By an absolute path and from an empty directory: nothing beside the file or in the working directory is read.
        with tempfile.TemporaryDirectory(dir=directory.parent) as nothing:
            where = {"pretrained_model_name_or_path": nothing, "gguf_file": str(path.absolute()), "local_files_only": True}
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # transformers' bar, which no setting hides
                    model, loaded = AutoModelForCausalLM.from_pretrained(
                        **where,
                        dtype=getattr(torch, self.dtype),
                        quantization_config=GgufConfig(dequantize=True),
                        output_loading_info=True,
                    )
                tokenizer = AutoTokenizer.from_pretrained(**where)
            except Exception as error:  # transformers raises several exception types of its own
                raise Refusal(f"transformers cannot read {path}: {one_line(error, 300)}", hint=_ORIGINAL) from error
        self.check_read(model, loaded)
        model.config.architectures = [type(model).__name__]
        try:
            model.save_pretrained(directory)
        except SafetensorError as error:  # where a disk is full
            raise OSError(str(error)) from error
        tokenizer.save_pretrained(directory)
        if licence := self.keys.get("general.license"):
            (directory / "README.md").write_text(f"---\nlicense: {json.dumps(licence)}\n---\n", encoding="utf-8")

    def check_read(self, model: Any, loaded: Mapping[str, Any]) -> None:
        """Refuse a file of which transformers has not read everything."""
        config, architecture = model.config, self.keys["general.architecture"]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        problems = [
            f"its key {architecture}.{name} is {value}, and {head_dim} was read"
            for name in _HEAD_DIMS
            if (value := self._own().get(name, head_dim)) != head_dim
        ]
        problems += [f"{len(names)} tensors are {kind.removesuffix('_keys')}" for kind, names in loaded.items() if names]
        unread = len(self.tensors) - len(dict(model.named_parameters())) + len(loaded.get("missing_keys", ()))
        problems += [f"{unread} of its tensors have no place in the model"] if unread else []
        self._refuse(problems)

    def _own(self) -> dict[str, Any]:
        prefix = f"{self.keys['general.architecture']}."
        return {name.removeprefix(prefix): value for name, value in self.keys.items() if name.startswith(prefix)}

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            listed = ", ".join(problems[:3]) + (f", and {len(problems) - 3} more" if len(problems) > 3 else "")
            raise Refusal(f"transformers does not read all of {self.path}: {listed}", hint=_ORIGINAL)


def unpacked_file(path: Path) -> Unpacked:
    """The checkpoint of a file; the first call makes it, and takes the memory of all its weights.

    Raises:
        Refusal: The package gguf is missing, the file is not a GGUF file, or it has something that transformers does not read.
        Failure: The file cannot be read, or the checkpoint cannot be written.
    """

    def checked() -> Described:
        described = Described.of(path)
        described.check_keys()
        return described

    return unpacked(path, [path], checked)


def _pre_tokenizers() -> set[str]:
    """The rules of splitting that transformers reads from a file."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # an internal module of another version: say nothing that may be wrong
        return set()
    return set(GGUF_PRE_TOKENIZER_SPLITS)
