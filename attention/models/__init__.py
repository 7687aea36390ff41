"""The model class of our own, for results that no stock class can hold. transformers' Auto classes know it after `register`."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL_TYPE = "kvfold"
# All that a checkpoint of that type needs.
CODE = tuple(Path(__file__).with_name(f"{part}_kvfold.py") for part in ("configuration", "modeling"))
AUTO_MAP = {"AutoConfig": f"{CODE[0].stem}.KvfoldConfig", "AutoModelForCausalLM": f"{CODE[1].stem}.KvfoldForCausalLM"}


def provides(model_type: str) -> bool:
    """Whether the class of that model type is this one, so that the code beside the weights is not needed."""
    return model_type == MODEL_TYPE


def unlike_ours(directory: Path) -> str | None:
    """A remark on a checkpoint of kvfold's class that comes with other code than this version's, or None.

    Where kvfold runs a checkpoint of its class, it runs its own code. Those who load it without kvfold run what lies beside it.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or config.get("model_type") != MODEL_TYPE:
        return None
    if not names_ours(config):
        return f"kvfold runs its own code in place of the code that auto_map names in {directory}, which differs from it"
    there = {file: found for file in CODE if (found := directory / file.name).is_file()}
    versions = {file: code_version(found) for file, found in there.items()}
    other = [file for file, found in there.items() if found.read_bytes() != file.read_bytes()]
    if not other:
        return None
    newest, ours = max(versions.values()), code_version(CODE[0])
    named = " and ".join(f"{file.name} ({f'version {versions[file]}' if versions[file] else 'no version'})" for file in other)
    said = f"kvfold runs its own code, version {ours}, in place of {named} in {directory}: that code"
    if newest > ours:
        return f"{said} is newer; update kvfold"
    if len(set(versions.values())) > 1:
        return f"{said} does not fit the other file; `convert refresh {directory}` renews both"
    return f"{said} {'is older' if newest < ours else 'differs from it'}; `convert refresh {directory}` renews it"


def code_version(file: Path) -> int:
    """The `CODE_VERSION` that one of the files states; 0 for those that were written before there was one."""
    found = re.search(rb"^CODE_VERSION = (\d{1,9})\b", file.read_bytes(), re.MULTILINE)
    return int(found[1]) if found else 0


def names_ours(config: Mapping[str, Any]) -> bool:
    """Whether the `auto_map` of a config, if it has one, names kvfold's classes."""
    named = config.get("auto_map", AUTO_MAP)
    return isinstance(named, dict) and {key: named.get(key) for key in AUTO_MAP} == AUTO_MAP


def make_known(model_type: str) -> None:
    """Let transformers' Auto classes know a model type, if its class is this one."""
    if provides(model_type):
        register()


@functools.cache
def register() -> None:
    """Make transformers' Auto classes know it, and its code be copied to where it is saved."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from attention.models.configuration_kvfold import KvfoldConfig
    from attention.models.modeling_kvfold import KvfoldForCausalLM, KvfoldModel

    KvfoldConfig.register_for_auto_class()
    KvfoldForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    AutoConfig.register(MODEL_TYPE, KvfoldConfig, exist_ok=True)
    AutoModel.register(KvfoldConfig, KvfoldModel, exist_ok=True)
    AutoModelForCausalLM.register(KvfoldConfig, KvfoldForCausalLM, exist_ok=True)
