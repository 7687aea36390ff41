"""Writes what lies beside the weights of a checkpoint: its config, its code, its source's own text, and copied files.

Where the model type changes, the tokenizer has to stay the same: transformers chooses its class by `tokenizer_class` in
tokenizer_config.json and by the config's model type, and for some model types (qwen2, ernie4_5, …) it ignores the former. The
same files may then split text differently.
"""

import fnmatch
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attention.errors import Failure, Refusal
from attention.models import AUTO_MAP, CODE, code_version, names_ours, provides
from convert.output.destination import exclusive
from eval.inputs.reader import TOKENIZER_FILES
from eval.inputs.sealed import seal_tensors, sync_directory, sync_file
from eval.inputs.source import Source
from eval.inputs.text import OWN_TEXT

# Copied byte for byte; `name_tokenizer_class` may name a class in one of them. config.json, the card and the weights are
# written anew.
_COMPANIONS = (
    *TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template*", "additional_chat_templates", "*processor_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
_FILE, _FIELD = "tokenizer_config.json", "tokenizer_class"
_SETTINGS = ("special_tokens_map", "model_max_length", "padding_side", "chat_template")


def write_config(path: Path, config: Mapping[str, Any], dtype: str | None) -> None:
    """Write config.json.

    Args:
        path: The checkpoint's directory.
        config: Its content.
        dtype: The dtype of the weights, if it differs from the one in `config`.
    """
    if dtype:
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_companions(path: Path, source: Path, code: bool) -> None:
    """Copy tokenizer, generation config, licence and the like from the source's directory; with `code`, Python files too."""
    patterns = (*_COMPANIONS, "*.py") if code else _COMPANIONS
    for item in sorted(source.iterdir()):
        if not any(fnmatch.fnmatch(item.name, pattern) for pattern in patterns):
            continue
        if item.is_dir():
            shutil.copytree(item, path / item.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(item, path / item.name)


def tokenizer_class(source: Source, config: dict[str, Any]) -> str | None:
    """The class that the result's tokenizer_config.json has to name; None if it can stay as it is.

    Args:
        source: The checkpoint whose tokenizer it is.
        config: The result's config.json.

    Raises:
        Failure: Whatever it names, transformers would load another tokenizer than the source's.
    """
    if config.get("model_type") == source.config.model_type or not source.tokenizer_files:
        return None
    try:
        expected = source.tokenizer()
    except Failure:
        return None  # that does not work in the source either
    name = type(expected).__name__
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        write_config(path, config, None)
        copy_companions(path, source.files, source.trust_remote_code)
        result = source.beside(directory)
        if _loads_as(result, expected):
            return None
        name_tokenizer_class(path, name)
        if _loads_as(result, expected):
            return name
    raise Failure(
        f"transformers loads the tokenizer of {source.reference}, a {source.config.model_type}, as {name}; the result is a "
        f"{config['model_type']}, and with the same files transformers does not load the same tokenizer for it",
        hint=f"save the tokenizer again with AutoTokenizer.from_pretrained({source.reference!r}).save_pretrained(…), as "
        "one that does not depend on the model type",
    )


def name_tokenizer_class(path: Path, name: str) -> None:
    """Write the class into the tokenizer_config.json of a directory."""
    file = path / _FILE
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(values | {_FIELD: name}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _loads_as(result: Source, expected: Any) -> bool:
    """Whether a checkpoint's tokenizer splits and joins text as another does, and has its special tokens and settings."""
    try:
        found = result.tokenizer()
    except Failure:
        return False
    if any(getattr(found, name, None) != getattr(expected, name, None) for name in _SETTINGS):
        return False
    backend, other_backend = (getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (found, expected))
    if backend is None or other_backend is None:
        return type(found) is type(expected)
    return bool(backend.to_str() == other_backend.to_str())


def copy_code(path: Path, files: Sequence[Path]) -> None:
    """Copy Python files that a checkpoint is loaded with into its directory.

    They get their names from the last one on: a new `modeling_kvfold.py` refuses an older config beside it, and an older one
    may not refuse a new config. To copy again completes what was stopped between two of them.

    Raises:
        OSError: There is no room for the files; the directory is as it was.
    """
    places = {path / file.name: path / f"{file.name}.tmp" for file in reversed(files)}
    try:
        for file, (place, temporary) in zip(reversed(files), places.items(), strict=True):
            shutil.copyfile(file, temporary)
            if place.exists():
                shutil.copymode(place, temporary)
            sync_file(temporary)
        for place, temporary in places.items():
            temporary.replace(place)
        sync_directory(path)
    finally:
        for temporary in places.values():
            temporary.unlink(missing_ok=True)


def write_own_text(path: Path, ids: torch.Tensor) -> None:
    """Write the tokens that the source wrote for its calibration, `[rows, context]`.

    They lie in a directory of their own: engines load every file of weights beside a config.
    """
    (path / OWN_TEXT).parent.mkdir(exist_ok=True)
    seal_tensors(path / OWN_TEXT, {"ids": ids.to(torch.int32)}, {})


def refresh(output: Path) -> dict[str, Any]:
    """Renew the code beside the weights of a result of kvfold's class, if any of its files differs from this version's.

    Nothing else in its directory changes.

    Returns:
        `output`, its `code_version` from now on, and `renewed`: the version before of each file that was replaced, 0 if none.

    Raises:
        Refusal: It is no directory or not of kvfold's class, its config names other code, or its code is newer.
        Failure: Another run writes it; or its files cannot be replaced.
    """
    _require_ours(output)
    with exclusive(output):
        _require_ours(output)  # again, now that no other run writes
        ours, there = code_version(CODE[0]), {file: output / file.name for file in CODE}
        try:
            before = {file: code_version(found) if found.is_file() else 0 for file, found in there.items()}
            if (newest := max(before.values())) > ours:
                raise Refusal(f"the code in {output} has version {newest}, newer than kvfold's {ours}", hint="update kvfold")
            other = [file for file, found in there.items() if not found.is_file() or found.read_bytes() != file.read_bytes()]
            if other:
                copy_code(output, CODE)
            return {"output": str(output), "code_version": ours, "renewed": {file.name: before[file] for file in other}}
        except OSError as error:
            raise Failure(f"cannot renew the code in {output}: {error}", hint="mend that, then run it again") from None


def _require_ours(output: Path) -> None:
    """Refuse what is no directory with a checkpoint of kvfold's class, whose config names its files."""
    if not output.is_dir():
        raise Refusal(
            f"there is no directory {str(output)!r} to refresh",
            hint="give the directory of a result; of one on the Hub, get it with `hf download ID --local-dir DIR`",
        )
    source = Source.parse(str(output))
    if not provides(source.model_type):
        raise Refusal(f"{output} is of model type {source.model_type!r}, which has no code of kvfold: nothing to refresh")
    named = source.raw.get("auto_map")
    if not named or not names_ours(source.raw):
        raise Refusal(
            f"auto_map in config.json of {output} is {named}; kvfold's files are named by {AUTO_MAP}",
            hint="the code that it names is not kvfold's to renew",
        )
