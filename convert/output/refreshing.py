"""Renews the code that lies beside the weights of a result of kvfold's class. Nothing else in its directory changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attention.errors import Failure, Refusal
from attention.models import AUTO_MAP, CODE, code_version, names_ours, provides
from convert.output.companions import copy_code
from convert.output.lock import exclusive
from eval.inputs.source import Source


def refresh(output: Path) -> dict[str, Any]:
    """Replace the files, if any differs from this version's.

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
