"""What lies where no checkpoint of transformers does: a directory without its config or its weights, and what can be done."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from attention.auto import ADAPTER

_MERGE = (
    "merge it into its base model with PEFT, and copy the tokenizer: "
    "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(DIR)"
)
_OTHER_FORM = "get the same model as safetensors"
# Of a name, what the files are, and the next step; the first counts.
_LAYOUTS = (
    (r"adapter_config\.json", "an adapter", _MERGE),
    (
        r"(model\.safetensors|pytorch_model\.bin)(\.index\.json)?",
        "weights alone",
        "get config.json, and what else lies beside the weights, from where they came from",
    ),
    (
        r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)",
        "shards without an index (….index.json), which says what each of them holds",
        "get the index from where they came from",
    ),
    (
        r"consolidated\..+",
        "weights in their maker's own layout",
        "get the same model in transformers' layout: config.json and model*.safetensors",
    ),
    (r"[^/]+\.gguf", "GGUF files", "name one of them as MODEL: DIR/FILE.gguf"),
    (r"zero_to_fp32\.py", "a state of DeepSpeed", "run the zero_to_fp32.py in it, which writes weights"),
    (r"[^/]+\.safetensors", "weights under another name", "rename them to model.safetensors"),
    (r"[^/]+\.h5", "weights of TensorFlow", _OTHER_FORM),
    (r"[^/]+\.msgpack", "weights of Flax", _OTHER_FORM),
    (r"[^/]+/config\.json", "checkpoints one level deeper", "name one of them as MODEL"),
)


def names_in(directory: Path) -> list[str]:
    """The names of the files in a directory and one level deeper."""
    return sorted(
        path.relative_to(directory).as_posix() for pattern in ("*", "*/config.json") for path in directory.glob(pattern)
    )


def found_among(names: Collection[str], directory: Path | None) -> tuple[str, str] | None:
    """The first known layout that files of these names have: in words, and what to do next, as a hint; None if there is none.

    Args:
        names: The names of files, with the folders that they are in.
        directory: Where they lie, if they are on this machine.
    """
    for pattern, what, step in _LAYOUTS:
        if found := [name for name in sorted(names) if re.fullmatch(pattern, name)]:
            return f"{what} ({_base(directory) if found == [ADAPTER] else _listed(found)})", step
    return None


def _base(directory: Path | None) -> str:
    """What an adapter's config says of its base model."""
    try:
        base = json.loads((directory / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"] if directory else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None
    return f"{ADAPTER}; its base model is {str(base)[:100]}" if base else f"{ADAPTER} names its base model"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if names[3:] else "")
