"""Writes the files beside the weights of a checkpoint: its config, its source's own text, and files copied from the source."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.inputs.reader import TOKENIZER_FILES
from eval.inputs.sealed import seal_tensors, sync_directory, sync_file
from eval.inputs.text import OWN_TEXT

# Copied byte for byte; `convert.output.tokenizer` may name a class in one of them. config.json, the card and the weights are
# written anew.
_COMPANIONS = (
    *TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template*", "additional_chat_templates", "*processor_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip


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
