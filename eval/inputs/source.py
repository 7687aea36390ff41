"""Resolves a MODEL argument: a directory, a Hub id with an optional `@revision`, or a GGUF file."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers

from attention import models
from attention.auto import refuse_adapter
from attention.calibrated import Calibrated
from attention.errors import Failure, KvfoldError, Refusal, one_line
from eval.inputs import config_rules, misfits
from eval.inputs.gguf import GgufFile
from eval.inputs.reader import DTYPES, TOKENIZER_FILES, Reader, weight_files

_DEFAULT_CONTEXT = 2048
# Keys that say how one machine computes attention: another may not have it, and save_pretrained writes none of them.
_OF_A_RUN = ("attn_implementation", "_attn_implementation")

# The files of a Hub repository that a conversion or an evaluation needs: no other formats, no folders of other models.
_WANTED = [
    "model*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja", "*.tiktoken",
    "additional_chat_templates/*.jinja", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*", "README.md",
]  # fmt: skip
_UNWANTED = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "model.fp*"]  # all folders except additional_chat_templates; variants
_PICKLES = ["pytorch_model*.bin"]
_FLOATS = ("bfloat16", "float16", "float32", "float64")
# Model types of code from before transformers had a class for such models.
_FORMER = ("RefinedWeb", "RefinedWebModel", "Yi", "baichuan", "internlm", "phi-msft", "qwen", "stablelm_epoch")


@dataclass(frozen=True)
class Source:
    """A checkpoint as the user named it.

    Attributes:
        reference: The argument as typed.
        directory: The local directory, or None for a Hub id.
        repository: The Hub id, or None.
        revision: The part after the `@`, or None.
        trust_remote_code: Whether Python code that comes with the checkpoint may run.
        label: Its name in tables; None for the last part of the path or id.
        gguf: The GGUF file, or None.
    """

    reference: str
    directory: Path | None
    repository: str | None
    revision: str | None
    trust_remote_code: bool = False
    label: str | None = None
    gguf: GgufFile | None = None

    @classmethod
    def parse(cls, reference: str, trust_remote_code: bool = False) -> Source:
        """Distinguish a directory, a GGUF file and a Hub id, without network access. No weights are read.

        Raises:
            Refusal: It looks like a path, and no such directory exists; or as `GgufFile.of`.
            Failure: As `GgufFile.of`.
        """
        path = Path(reference)
        with contextlib.suppress(RuntimeError):  # ~ of an unknown user
            path = path.expanduser()
        if reference and path.is_dir():
            return cls(reference, path, None, None, trust_remote_code)
        if path.suffix == ".gguf" and path.is_file():
            return cls(reference, None, None, None, trust_remote_code, path.stem, GgufFile.of(path))
        repository, _, revision = reference.partition("@")
        looks_local = reference.startswith((".", "/", "~")) or repository.count("/") > 1 or path.exists() or not repository
        if looks_local:
            raise Refusal(
                f"no model directory {reference!r}", hint="give a directory with a config.json, a GGUF file or a Hub id"
            )
        return cls(reference, None, repository, revision or None, trust_remote_code)

    def beside(self, reference: str | Path, label: str | None = None) -> Source:
        """Another checkpoint, such as one made of this one, with the same consent to code. Raises as `parse`."""
        return replace(Source.parse(str(reference), self.trust_remote_code), label=label)

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.label is not None:
            return self.label
        if self.directory:
            return self.directory.name or self.directory.resolve().name  # "." and ".." have no name
        return str(self.repository).split("/")[-1] + (f"@{self.revision}" if self.revision else "")

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The content of config.json, without an `auto_map` that is not followed (`unused_code`).

        Raises:
            Refusal: As of `_stated`.
        """
        return {key: value for key, value in self._stated.items() if key != "auto_map" or not self.unused_code}

    @cached_property
    def _stated(self) -> dict[str, Any]:
        """What config.json says.

        Raises:
            Refusal: It is missing, is not a config, is of a former model type whose own code may not run, or has a value that
                breaks a rule of `eval.inputs.config_rules`; or an adapter lies beside it; or as `GgufFile.raw`.
        """
        if self.gguf:
            return self.gguf.raw
        path = self._config_path
        try:
            raw = json.loads(path.read_text(encoding="utf-8"), object_hook=_object)
        except FileNotFoundError:
            names = misfits.names_in(self.directory) if self.directory else self._listed(self.revision) or []
            what, step = misfits.found_among(names) or ("", "is it a Hugging Face checkpoint?")
            raise Refusal(f"{self.reference} has no config.json{what and f': it holds {what}'}", hint=step) from None
        except (ValueError, OSError, RecursionError) as error:
            raise Refusal(f"cannot read {path}: {error}", hint="it must be a JSON object") from None
        if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
            raise Refusal(f"{path} names no model_type", hint="is it the config of a Hugging Face checkpoint?")
        refuse_adapter(path.parent, self.reference)
        config_rules.check_raw(raw, self._where)
        former = raw["model_type"]
        if former in _FORMER and not (self.trust_remote_code and raw.get("auto_map")):
            raise Refusal(
                f"transformers has no class for model type {former!r} of {self.reference}",
                hint="get a later revision, or a copy of it that was converted to a class of transformers",
            )
        return raw

    @property
    def model_type(self) -> str:
        return str(self._stated["model_type"])

    @property
    def needs_code(self) -> bool:
        """Whether it names code of its own (`auto_map`), and no other class reads it."""
        return self._names_code(known=False)

    @property
    def unused_code(self) -> str | None:
        """A remark where transformers' class takes the place of its own code, as in transformers without trust_remote_code."""
        if self.trust_remote_code or not self._names_code(known=True):
            return None
        return f"its own code (auto_map in config.json) is not used: transformers' class for {self.model_type} reads it"

    def _names_code(self, known: bool) -> bool:
        """Whether it names code of its own, for a model type that transformers knows or does not know."""
        if not self._stated.get("auto_map") or models.provides(self.model_type):
            return False
        return known == (self.model_type in transformers.CONFIG_MAPPING)

    @property
    def quantisation(self) -> tuple[str, str] | None:
        """By what it is quantised, and the key of its config that says so ("text_config.quantization_config"); None if none."""
        parts = [("", self.raw), *((f"{name}.", part) for name, part in self.raw.items() if isinstance(part, dict))]
        for path, values in parts:
            for key in ("quantization_config", "quantization"):
                if stated := values.get(key):
                    kind = stated
                    if isinstance(stated, dict):
                        kind = stated.get("quant_method") or ("MLX" if "group_size" in stated else "unknown method")
                    return str(kind), path + key
        return None

    def refuse_stale_quantisation(self) -> None:
        """Raise `Refusal` if its config says that it is quantised, and the headers of its files show only plain weights."""
        if self.quantisation is None:
            return
        try:
            plain = all(info.is_float for info in self.reader().infos.values())
        except KvfoldError:  # of a damaged file, or of numbers that only quantised weights have
            return
        if plain:
            kind, key = self.quantisation
            raise Refusal(
                f"{self._where} says in {key} that it is quantised ({kind}), and none of its weights is",
                hint=f"if they were merged or dequantised, take {key} out",
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of it, for plans and cards."""
        notes = (self.gguf and self.gguf.note, self.unused_code)
        return tuple(note for note in notes if note)

    @cached_property
    def code_note(self) -> str | None:
        """A remark on kvfold's own files in it (`attention.models.unlike_ours`)."""
        return models.unlike_ours(self.files) if models.provides(self.model_type) else None

    @cached_property
    def config(self) -> Any:
        """The transformers config, with defaults filled in.

        Raises:
            Refusal: It needs its own code, transformers does not accept it, or a value breaks a rule of
                `eval.inputs.config_rules`.
        """
        if self.needs_code and not self.trust_remote_code:
            raise Refusal(
                f"{self.reference} wants to run code of its own (auto_map in config.json)",
                hint="read that code, then give --trust-remote-code",
            )
        models.make_known(self.model_type)
        if self.raw.get("auto_map") and not models.provides(self.model_type):
            build = partial(transformers.AutoConfig.from_pretrained, str(self._config_path.parent), trust_remote_code=True)
        elif self.model_type not in transformers.CONFIG_MAPPING:
            raise Refusal(
                f"transformers does not accept the config of {self.reference}: it has no model type {self.model_type!r}",
                hint="is it the config of a Hugging Face checkpoint?",
            )
        else:  # by type and values, not by path: a Hub config needs no second look at the network
            kind = transformers.CONFIG_MAPPING[self.model_type]
            config_rules.check_keys(self.raw, kind, self._where)
            build = partial(kind, **{key: value for key, value in self.raw.items() if key != "model_type"})
        try:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # about keys with newer names
                config = build()
        except KeyError as error:
            said = "".join(map(str, error.args))  # without the quotes that str() puts around it
            raise Refusal(f"config.json of {self.reference} lacks {said}", hint="complete it") from None
        except Exception as error:  # transformers raises several exception types of its own
            said = f"transformers does not accept the config of {self.reference}: {one_line(error, 300)}"
            raise Refusal(said, hint="correct its config.json") from error
        config_rules.check_config(config, self._where)
        return config

    @cached_property
    def dtype(self) -> str:
        """The dtype of the weights: from the config, else from its files, else float32."""
        named = self.raw.get("dtype") or self.raw.get("torch_dtype")
        if not named:
            with contextlib.suppress(KvfoldError, OSError):  # no files, or a damaged one: whoever reads its weights names it
                held = {str(dtype).removeprefix("torch.") for dtype in self._stored_dtypes()}
                named = next((name for name in _FLOATS if name in held), None)
        return str(named or "float32").removeprefix("torch.")

    def _stored_dtypes(self) -> set[torch.dtype]:
        """The dtypes of its tensors: of a Hub repository by the headers there, or by what was downloaded before."""
        if (files := self.directory) is None:
            where: Any = {"repo_id": str(self.repository), "revision": self.commit}
            with contextlib.suppress(Exception):  # no network, or pickled weights
                held = huggingface_hub.get_safetensors_metadata(**where).files_metadata.values()
                return {DTYPES[one.dtype] for file in held for one in file.tensors.values() if one.dtype in DTYPES}
            files = Path(huggingface_hub.snapshot_download(**where, local_files_only=True))
        return {info.dtype for info in Reader(files).infos.values()}

    @property
    def max_positions(self) -> int | None:
        """The most positions that the model supports, or None if its config does not say."""
        value = getattr(self.decoder, "max_position_embeddings", None) or getattr(self.decoder, "max_seq_len", None)
        return value if isinstance(value, int) and value > 0 else None  # XLNet has -1

    @property
    def longest_context(self) -> int:
        """The context at which KV bytes count where none is given: all positions, or 2048 if the config does not say."""
        return self.max_positions or _DEFAULT_CONTEXT

    @property
    def calibrated(self) -> Calibrated | None:
        """For how many positions a conversion has calibrated it; None for any other model, and where that is for all."""
        return Calibrated.of_config(self.config)

    @property
    def run_positions(self) -> int | None:
        """The most positions that it can be run at: those of its source, if it is calibrated for fewer."""
        return self.calibrated.of if self.calibrated else self.max_positions

    @property
    def tokenizer_files(self) -> list[Path]:
        """The files that a tokenizer is made from."""
        files = (file for file in self.files.iterdir() if file.is_file())
        return [file for file in files if any(fnmatch(file.name, pattern) for pattern in TOKENIZER_FILES)]

    def tokenizer(self) -> Any:
        """Its own tokenizer.

        Raises:
            Failure: It cannot be loaded.
        """
        files = self.files
        try:
            models.make_known(self.model_type)
            return transformers.AutoTokenizer.from_pretrained(files, trust_remote_code=self.trust_remote_code)
        except Exception as error:
            said = f"cannot load the tokenizer of {self.reference}: {one_line(error, 300)}"
            raise Failure(said, hint="copy the tokenizer's files beside the weights") from error

    @property
    def decoder(self) -> Any:
        """The part of its config that describes the decoder layers."""
        return self.config.get_text_config(decoder=True)

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the model knows."""
        return int(self.decoder.vocab_size)

    @property
    def fingerprint(self) -> dict[str, list[int]]:
        """Size and modification time of each weight file, by name, which tell of a change. Raises as `Reader`."""
        paths = [self.gguf.path] if self.gguf else [self.files / file for file in weight_files(self.files)]
        return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}

    @cached_property
    def files(self) -> Path:
        """The directory with all files, downloaded if necessary, or dequantised from a GGUF file (`GgufFile.directory`).

        Raises:
            Refusal: As of `refuse_adapter`, or as `GgufFile.directory`.
            Failure: The Hub cannot be reached, or has no such repository, revision or weights; or as `GgufFile.directory`.
        """
        if self.gguf:
            return self.gguf.directory
        found = self.directory
        if found is None:
            listed = self._listed(self.commit)
            unwanted = {name for name in listed or () if any(fnmatch(name, pattern) for pattern in _UNWANTED)}
            whole = listed is None or any(fnmatch(name, _WANTED[0]) for name in {*listed} - unwanted)
            found = self._download(_WANTED if whole else _WANTED + _PICKLES, self.commit)
        refuse_adapter(found, self.reference)  # of a Hub repository, which the config's directory may lack
        return found

    def reader(self, renamed: Callable[[Collection[str]], Mapping[str, str]] | None = None) -> Reader:
        """Reads its tensors. As `Reader`."""
        return Reader(self.files, renamed)

    @property
    def commit(self) -> str | None:
        """The Hub commit that `raw` was read from, or None for a directory."""
        return self._config_path.parent.name if self.repository else None

    @property
    def _where(self) -> str:
        return f"config.json of {self.reference}"

    @cached_property
    def _config_path(self) -> Path:
        if self.directory:
            return self.directory / "config.json"
        code = ["*.py"] if self.trust_remote_code else []  # a custom config needs its class
        return self._download(["config.json", *code], self.revision) / "config.json"

    def _listed(self, revision: str | None) -> list[str] | None:
        """The files of a Hub repository; None offline or after a network error: what is in the local cache is used."""
        try:
            return list(huggingface_hub.HfApi().list_repo_files(str(self.repository), revision=revision))
        except Exception:
            return None

    def _download(self, patterns: list[str], revision: str | None) -> Path:
        try:
            path = huggingface_hub.snapshot_download(
                str(self.repository), revision=revision, allow_patterns=patterns, ignore_patterns=_UNWANTED
            )
        except Exception as error:
            raise Failure(
                f"cannot get {self.reference!r} from the Hub: {one_line(error)}",
                hint="no directory of that name exists either; check the spelling, the network and `hf auth login`",
            ) from None
        return Path(path)


def position_limit(sources: Sequence[Source]) -> int | None:
    """The most positions that all of these models can be run at, or None if no config says."""
    return min((limit for source in sources if (limit := source.run_positions)), default=None)


def _object(value: dict[str, Any]) -> Any:
    """An object of a config without `_OF_A_RUN`, or a number that JSON cannot hold, as transformers writes it."""
    tag = value.get("__float__") if len(value) == 1 else None
    if tag in ("Infinity", "-Infinity", "NaN"):
        return float(tag)
    return {key: entry for key, entry in value.items() if key not in _OF_A_RUN}


def require_contexts(sources: Sequence[Source], wanted: Sequence[int]) -> tuple[int, ...]:
    """`wanted`, or min(2048, the smallest position limit of the models) if it is empty.

    Raises:
        Refusal: A context exceeds a model's positions.
    """
    limit = position_limit(sources)
    if limit is not None and max(wanted, default=0) > limit:
        raise Refusal(
            f"a context of {max(wanted)} tokens exceeds the {limit} positions of the model",
            hint=f"use --context {limit} or less",
        )
    return tuple(wanted) or (min(_DEFAULT_CONTEXT, limit or _DEFAULT_CONTEXT),)
