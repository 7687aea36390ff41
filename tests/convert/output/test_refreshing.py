"""Renewing the code beside weights: both files, nothing else, and what is said of code of another version."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked, run_without_kvfold
from written import Convert, Find, Make, edit, ok, refused

from attention import load
from attention.models import CODE, code_version, unlike_ours
from convert import refresh
from convert.output.lock import exclusive
from eval.inputs.source import Source

NAMES = [file.name for file in CODE]
OURS, NEWER = code_version(CODE[0]), code_version(CODE[0]) + 1
NO_VERSION = "configuration_kvfold.py (no version) and modeling_kvfold.py (no version)"


@pytest.fixture
def result(finished: Find, tmp_path: Path) -> Path:
    """A result whose code is that of the time before versions."""
    out = Path(shutil.copytree(finished("one head of kvfold's class").path, tmp_path / "out"))
    for name in NAMES:
        date(out / name, None)
    return out


def date(file: Path, version: int | None) -> None:
    """Give a file another version, or none: then it checks nothing, either."""
    text = re.sub(r"^CODE_VERSION.*\n(_BESIDE(.|\n)*?\n    \)\n)?", "", file.read_text(), flags=re.MULTILINE)
    file.write_text(text if version is None else f"{text}\nCODE_VERSION = {version}\n")


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    """What each file holds, and its mode."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mode)
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_both_files_are_renewed_and_nothing_else_changes(result: Path, convert: Convert) -> None:
    (result / NAMES[1]).chmod(0o664)
    before = content(result)
    said = ok(convert("refresh", result)).stdout
    assert said == f"renewed {NO_VERSION}: the code in {result} is kvfold's, version {OURS}\n"
    assert content(result) == before | {file.name: (file.read_bytes(), before[file.name][1]) for file in CODE}
    assert json.loads(ok(convert("refresh", result, "--json")).stdout) == {
        "output": str(result), "code_version": OURS, "renewed": {}
    }  # fmt: skip
    assert str(refresh(result)) == f"there was nothing to renew: the code in {result} is kvfold's, version {OURS}"
    assert unlike_ours(result) is None


def test_a_conversion_takes_a_refreshed_result_for_finished(
    result: Path, finished: Find, convert: Convert, warned: Callable[[], list[str]]
) -> None:
    ok(convert("refresh", result))
    command, source, _, *options = finished("one head of kvfold's class").command
    done = ok(convert(command, source, result, *options, "--resume"))
    assert f"{result} is finished already" in done.stderr
    assert Source.parse(str(result)).code_note is None
    load(result)
    assert warned() == []


STOCK = """
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils
dynamic_module_utils.HF_MODULES_CACHE = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True).eval()
ids, asked = torch.arange(4, 20)[None], {"max_new_tokens": 8, "do_sample": False}
assert torch.equal(model.generate(ids, **asked), model.generate(ids, use_cache=False, **asked))
print(sys.modules[type(model).__module__].CODE_VERSION)
"""
KILLED = """
import os, sys
from pathlib import Path
from convert import refresh
replace = Path.replace
def killed(self, target):
    replace(self, target)
    os._exit(9)
Path.replace = killed
refresh(sys.argv[1])
"""


def test_a_kill_between_both_files_is_noticed_and_mended(result: Path, convert: Convert, tmp_path: Path) -> None:
    before = content(result)
    assert run_forked(KILLED, result).returncode == 9
    assert [(result / file.name).read_bytes() == file.read_bytes() for file in CODE] == [False, True]
    done = run_without_kvfold(STOCK, tmp_path / "modules", result)
    assert f"modeling_kvfold.py has version {OURS}, and configuration_kvfold.py beside it has none" in done.stderr
    assert "run `convert refresh` of kvfold on the directory of this checkpoint" in done.stderr
    said = ok(convert("refresh", result)).stdout
    assert said.startswith("renewed configuration_kvfold.py (no version): the code in")
    assert content(result).keys() == before.keys(), "no temporary file stays"
    done = run_without_kvfold(STOCK, tmp_path / "modules", result)
    assert done.stdout == f"{OURS}\n", done.stderr


def test_a_full_disk_leaves_both_files_as_they_were(result: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    before, copy = content(result), shutil.copyfile

    def failing(source: Path, target: Path) -> Any:
        if source == CODE[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", failing)
    refused(convert("refresh", result), 1, f"cannot renew the code in {result}: [Errno {errno.ENOSPC}]")
    assert content(result) == before


def test_a_file_that_is_missing_is_written(result: Path) -> None:
    for name in NAMES:
        (result / name).unlink()
    assert refresh(result)["renewed"] == dict.fromkeys(NAMES, 0)


def test_what_has_no_code_to_renew_is_refused(result: Path, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(convert("refresh"), 2, "Missing argument 'OUTPUT'")
    for there, message in (
        ("org/name", "there is no directory 'org/name' to refresh"),
        (result / "config.json", "there is no directory"),
        (tmp_path / "empty", "has no config.json"),
        (checkpoint(), "is of model type 'llama', which has no code of kvfold: nothing to refresh"),
        ("/", "has no config.json"),
    ):
        refused(convert("refresh", there), 2, message)
    with exclusive(result):
        refused(convert("refresh", result), 1, f"another run is writing {result}")
    date(result / NAMES[1], NEWER)
    before = content(result)
    message = f"the code in {result} has version {NEWER}, newer than kvfold's {OURS}\nhint: update kvfold"
    refused(convert("refresh", result), 2, message)
    assert content(result) == before
    for named in ({"AutoConfig": "evil.Config"}, {"AutoConfig": "org/name--configuration_kvfold.KvfoldConfig"}, None):
        refused(convert("refresh", edit(result, auto_map=named)), 2, f"auto_map in config.json of {result} is {named}")


@pytest.mark.parametrize(
    ("versions", "named", "said"),
    [
        ((None, None), NO_VERSION, "is older; `convert refresh OUT` renews it"),
        (
            (None, OURS),
            "configuration_kvfold.py (no version)",
            "does not fit the other file; `convert refresh OUT` renews both",
        ),
        ((NEWER, NEWER), f"modeling_kvfold.py (version {NEWER})", "is newer; update kvfold"),
        ((OURS, "edited"), f"modeling_kvfold.py (version {OURS})", "differs from it; `convert refresh OUT` renews it"),
    ],
)
def test_code_of_another_version_is_named(
    versions: tuple[Any, Any], named: str, said: str, result: Path, convert: Convert
) -> None:
    for file, version in zip(CODE, versions, strict=True):
        shutil.copyfile(file, result / file.name)
        if version == "edited":
            (result / file.name).write_text(file.read_text() + "# edited\n")
        elif version != OURS:
            date(result / file.name, version)
    note = unlike_ours(result)
    assert note.startswith(f"kvfold runs its own code, version {OURS}, in place of ")
    assert note.endswith(f"{named} in {result}: that code {said.replace('OUT', str(result))}")
    assert json.loads(ok(convert("inspect", result, "--json")).stdout)["notes"] == [note]
