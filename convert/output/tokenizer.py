"""Keeps the tokenizer of a result the same as its source's where the model type changes.

transformers chooses a tokenizer's class by `tokenizer_class` in tokenizer_config.json and by the config's model type, and for
some model types (qwen2, ernie4_5, …) it ignores the former. The same files may then split text differently.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from attention.errors import Failure
from convert.output.companions import copy_companions, write_config
from eval.inputs.source import Source

_FILE, _FIELD = "tokenizer_config.json", "tokenizer_class"
_SETTINGS = ("special_tokens_map", "model_max_length", "padding_side", "chat_template")


def tokenizer_class(source: Source, config: dict[str, Any]) -> str | None:
    """The class that the result's tokenizer_config.json has to name; None if it can stay as it is.

    Args:
        source: The checkpoint whose tokenizer it is.
        config: The result's config.json.

    Raises:
        Failure: Whatever it names, transformers would load another tokenizer than the source's.
    """
    if config.get("model_type") == source.config.model_type or not source.has_tokenizer:
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
    try:
        return _same(result.tokenizer(), expected)
    except Failure:
        return False


def _same(one: Any, other: Any) -> bool:
    """Whether two tokenizers split and join text alike, and have the same special tokens and settings."""
    if any(getattr(one, name, None) != getattr(other, name, None) for name in _SETTINGS):
        return False
    backend, other_backend = (getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (one, other))
    if backend is None or other_backend is None:
        return type(one) is type(other)
    return bool(backend.to_str() == other_backend.to_str())
