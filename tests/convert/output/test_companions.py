"""What stands beside the weights: companions byte for byte, a config, and a tokenizer that splits text as the source's does."""

import errno
import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked, run_without_kvfold
from latents import SMALL
from transformers import AutoTokenizer, GPT2Tokenizer
from written import Convert, Find, Make, edit, ok, read, refused, without_tokenizer

from attention import load
from attention.errors import Failure
from attention.models import CODE, code_version, unlike_ours
from convert import refresh
from convert.output import companions
from convert.output.companions import copy_companions, tokenizer_class, write_config
from convert.output.destination import exclusive
from eval.inputs.source import Source


@pytest.mark.parametrize("code", [False, True])
def test_companions_are_copied_byte_for_byte_and_the_rest_is_not(code: bool, checkpoint: Make, tmp_path: Path) -> None:
    source, out = checkpoint(), tmp_path / "out"
    out.mkdir()
    copied = ["generation_config.json", "chat_template.jinja", "LICENSE", "tokenizer.json", "tokenizer_config.json"]
    (source / copied[0]).write_text('{"do_sample": false, "temperature": 0.6}')  # transformers refuses to save this
    for name in (*copied[1:3], "README.md", "modeling_evil.py", "optimizer.pt"):
        (source / name).write_text(name)
    copied += ["modeling_evil.py"] if code else []
    copy_companions(out, source, code)
    assert filecmp.cmpfiles(source, out, copied, shallow=False) == (copied, [], [])
    assert {path.name for path in out.iterdir()} == {*copied}


def test_a_result_has_what_a_conversion_writes(finished: Find) -> None:
    made = finished("heads")
    assert {path.name for path in made.path.iterdir()} == {
        "config.json", "conversion.json", "generation_config.json", "model.safetensors", "README.md", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_a_dtype_replaces_the_old_name_of_the_key(tmp_path: Path) -> None:
    write_config(tmp_path, {"torch_dtype": "float32", "a": [1]}, "bfloat16")
    assert read(tmp_path / "config.json") == {"a": [1], "dtype": "bfloat16"}


def test_the_config_changes_in_two_keys_only(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = edit(checkpoint("qwen2"), unknown_to_transformers=[1, 2])
    raw = read(source / "config.json")
    ok(convert("mqa", source, tmp_path / "out"))
    assert read(tmp_path / "out" / "config.json") == raw | {"num_key_value_heads": 1, "head_dim": 8}


SAID = "Once upon a  time, there was\nthe end. "


def ids(path: Path) -> list[int]:
    return AutoTokenizer.from_pretrained(path)(SAID).input_ids


def class_of(path: Path) -> str:
    return str(read(path / "tokenizer_config.json")["tokenizer_class"])


def test_a_class_that_only_the_source_gets_is_named(shelf: Make, finished: Find, convert: Convert, tmp_path: Path) -> None:
    """transformers loads any tokenizer of a qwen2 as a Qwen2Tokenizer, which splits words its own way."""
    source, plain, out = shelf("qwen2"), finished("latent in shards"), tmp_path / "out"
    assert ids(source) != ids(plain.source), "the same files"
    ok(convert("mla", source, out, *SMALL))
    assert (ids(out), class_of(out)) == (ids(source), "Qwen2Tokenizer")
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert tokenizer_class(Source.parse(str(source)), read(source / "config.json")) is None
    for name in ("tokenizer.json", "tokenizer_config.json"):  # what is loaded alike
        assert (plain.path / name).read_bytes() == (plain.source / name).read_bytes()
    assert ids(plain.path) == ids(plain.source)


@pytest.mark.parametrize("kept", ["tokenizer.json", "vocab.json"])
def test_special_tokens_of_a_class_stay(kept: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """GPT-2's tokenizer has an end of text that no file names; it may also have no tokenizer.json."""
    source = without_tokenizer(checkpoint("gpt2"))
    vocabulary = {chr(code): code - 33 for code in range(33, 120)} | {"Ġ": 90, "<|endoftext|>": 91}
    if kept == "vocab.json":
        (source / "vocab.json").write_text(json.dumps(vocabulary))
        (source / "merges.txt").write_text("#version: 0.2\n")
    else:
        GPT2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(source)
        (source / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    before, after = (AutoTokenizer.from_pretrained(path, trust_remote_code=False) for path in (source, tmp_path / "out"))
    assert before.eos_token == "<|endoftext|>"
    assert (after.eos_token, after("a b").input_ids) == (before.eos_token, before("a b").input_ids)
    assert class_of(tmp_path / "out") == "GPT2Tokenizer"


def test_a_checkpoint_without_a_tokenizer_needs_none(checkpoint: Make, finished: Find) -> None:
    source = without_tokenizer(checkpoint("qwen2"))
    assert tokenizer_class(Source.parse(str(source)), finished("latent in shards").config) is None


def test_a_tokenizer_that_no_name_makes_the_same_is_refused(
    shelf: Make, finished: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companions, "_loads_as", lambda result, expected: False)
    message = "a qwen2, as Qwen2Tokenizer; the result is a deepseek_v3, and with the same files transformers does not load"
    with pytest.raises(Failure, match=re.escape(message)):
        tokenizer_class(Source.parse(str(shelf("qwen2"))), finished("latent in shards").config)


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
