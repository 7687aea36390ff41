"""The order of work: what an interruption, a full disk or bad data leave behind, and that `--resume` changes no byte."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from latents import SMALL, WAYS, method_options
from rows import rows
from transformers import AutoConfig
from written import damage, edit, left_nothing, ok, same_but_for_the_run, weights

from attention.spec import AttentionSpec
from convert.calibration.stream import LayerStream
from convert.checkpoint.shelf import Shelf
from convert.execute.layer import Layer
from eval import evaluate

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]


def test_two_runs_write_the_same_bytes(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    for name in ("a", "b"):
        ok(convert("gqa", source, tmp_path / name, "--groups", 2))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("method", WAYS)
def test_two_runs_to_a_latent_write_the_same_bytes(
    method: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    for name in "ab":
        ok(convert("mla", source, tmp_path / name, *SMALL, *method_options(method, words)))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")


# ---- interruption ----------------------------------------------------------------------------------------------------


INTERRUPTED = """
import os, signal, sys
import convert.execute.weights as execute
from convert.command.cli import main
write, count = execute.write_shard, 0
def interrupted(path, *rest):
    global count
    count += 1
    if count == 3:
        path.with_name(path.name + ".tmp").write_bytes(b"half of a sha")
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return write(path, *rest)
execute.write_shard = interrupted
main(sys.argv[2:], prog_name="convert")
"""


@pytest.mark.parametrize(("kill", "code"), [("SIGINT", 130), ("SIGKILL", -signal.SIGKILL)])
def test_an_interrupted_run_leaves_nothing_loadable_and_resumes(
    kill: str, code: int, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source, out = checkpoint(), tmp_path / "out"
    command = ["gqa", source, out, "--groups", 2, "--method", "mean", "--max-shard-size", "20KB"]
    done = run_forked(INTERRUPTED, kill, *command)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    partial = tmp_path / "out.partial"
    unfinished = partial / "checkpoint"
    assert not out.exists()
    assert len(list(unfinished.glob("*.safetensors"))) == 2
    assert not (unfinished / "config.json").exists()

    refused = convert(*command)
    assert refused.exit_code == 2
    assert "holds an unfinished conversion" in refused.stderr
    different = convert(*command[:4], 1, *command[5:], "--resume")
    assert different.exit_code == 2
    assert "groups: 2 then, 1 now" in different.stderr

    finished = {path.name: path.stat().st_mtime_ns for path in unfinished.glob("*.safetensors")}
    assert finished
    ok(convert(*command, "--resume"))
    assert not partial.exists()
    assert all((out / name).stat().st_mtime_ns == when for name, when in finished.items()), "a finished shard was written again"
    uninterrupted = [source, tmp_path / "whole", *command[3:]]
    ok(convert("gqa", *uninterrupted))
    same_but_for_the_run(out, tmp_path / "whole")


def test_a_config_that_changed_is_not_resumed(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, command = checkpoint(), ["--groups", 2, "--max-shard-size", "20KB", "--no-text"]
    arguments = [str(a) for a in ("gqa", source, tmp_path / "out", *command)]
    assert run_forked(INTERRUPTED, "SIGKILL", *arguments).returncode == -signal.SIGKILL
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 0.5}))
    result = convert(*arguments, "--resume")
    assert result.exit_code == 2
    assert "config" in result.stderr
    (source / "config.json").write_text(json.dumps(raw))
    (tmp_path / "out.partial" / "inputs.json").write_text("")  # as a power failure may leave it: begin again
    ok(convert(*arguments, "--resume"))


def test_a_source_that_changed_is_not_resumed(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "inputs.json").write_text(json.dumps({"recipe": {}, "files": {}}))
    result = convert("gqa", source, tmp_path / "out", "--groups", 2, "--resume")
    assert result.exit_code == 2
    assert "was begun with other settings" in result.stderr
    assert "groups: None then, 2 now" in result.stderr


def test_a_text_is_known_by_its_tokens_wherever_it_lies(
    checkpoint: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    source, options = checkpoint(), ["--groups", 2, *on[2:]]
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("convert.execute.weights.write_shard", interrupted)
        assert convert("gqa", source.name, "out", *options, "--text", letters.name).exit_code == 130
    (tmp_path / "elsewhere").mkdir()
    letters.rename(tmp_path / "elsewhere" / "same.txt")
    letters.write_text("another text\n" * 100)
    refused = convert("gqa", source, tmp_path / "out", *options, "--resume", "--text", letters)
    assert refused.exit_code == 2
    assert "calibration_hash" in refused.stderr
    ok(convert("gqa", source, tmp_path / "out", *options, "--resume", "--text", tmp_path / "elsewhere" / "same.txt"))


# ---- interruption with text ------------------------------------------------------------------------------------------


KILLED_AT = """
import os, signal, sys
import convert.execute.weights as execute
from convert.command.cli import main
from convert.checkpoint.shelf import Shelf
from convert.calibration.stream import LayerStream
place, count = sys.argv[1], int(sys.argv[2])
def dying(function, half=None, kind=""):
    def wrapped(*args, **kwargs):
        global count
        count -= not kind or args[0]._name == kind
        if count == 0:
            if half:
                half(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped
def half_spool(stream, *rest):
    stream._spool.with_name(stream._spool.name + "-unfinished").write_bytes(b"half of it")
if place == "inputs":
    LayerStream.advance = dying(LayerStream.advance, half_spool)
elif place in ("statistics", "layers"):
    kind = {"statistics": "source", "layers": "layer"}[place]
    Shelf.put = dying(
        Shelf.put, lambda shelf, layer, *_: shelf._path(layer).with_suffix(".tmp").write_bytes(b"half"), kind
    )
else:
    execute.write_shard = dying(
        execute.write_shard, lambda path, *_: path.with_name(path.name + ".tmp").write_bytes(b"half of a sha")
    )
main(sys.argv[3:], prog_name="convert")
"""


IN_SEQUENCE = {
    "pca": ["--method", "pca"],
    "refitted": ["--method", "weighted"],
    "refined": ["--method", "svd", "--no-refit", "--refine", 2],
    "all": ["--method", "weighted", "--refine", 2],
}


# The survey, where the method needs one, advances twice and puts three layers on the shelf. Then the result advances twice,
# and where it has the source beside it, that one three times; three converted layers are put on a shelf of their own.
KILLS = [
    ("inputs", 2, "pca"), ("statistics", 3, "pca"), ("shards", 3, "pca"), ("layers", 2, "all"),
]  # fmt: skip


STOPPED = [
    *KILLS, ("layers", 1, "refitted"), ("layers", 3, "refined"),
    ("inputs", 5, "refitted"), ("inputs", 6, "refined"), ("inputs", 5, "all"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "count", "way"), rows(KILLS, [("statistics", 3, "pca"), ("layers", 2, "all")]))
def test_a_killed_run_leaves_nothing_loadable_and_resumes(
    place: str, count: int, way: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source, out = checkpoint(), tmp_path / "out"
    options = [*SMALL, *IN_SEQUENCE[way], "--text", words, "--calibration-tokens", 256, "--max-shard-size", "20KB"]
    command = ["mla", source, out, *options]
    done = run_forked(KILLED_AT, place, count, *command)
    assert done.returncode == -signal.SIGKILL, done.stderr
    resumed(convert, source, out, options, tmp_path)


@pytest.mark.parametrize(
    ("place", "count", "way"),
    rows(STOPPED, [("inputs", 2, "pca"), ("shards", 3, "pca"), ("inputs", 5, "all"), ("layers", 2, "all")]),
)
def test_an_interrupted_run_says_how_to_go_on(
    place: str, count: int, way: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from convert.execute import weights as execute

    source, out, left = checkpoint(), tmp_path / "out", [count]
    options = [*SMALL, *IN_SEQUENCE[way], "--text", words, "--calibration-tokens", 256, "--max-shard-size", "20KB"]
    where: dict[str, tuple[Any, str]] = {
        "inputs": (LayerStream, "advance"), "statistics": (Shelf, "put"), "shards": (execute, "write_shard"),
        "layers": (Layer, "of"),
    }  # fmt: skip
    owner, name = where[place]
    function = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        result = convert("mla", source, out, *options)
    assert result.exit_code == 130, result.output
    assert "interrupted" in result.stderr
    assert "--resume" in result.stderr
    resumed(convert, source, out, options, tmp_path)


def resumed(convert: Convert, source: Path, out: Path, options: list[Any], tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    assert not out.exists()
    assert not (partial / "checkpoint" / "config.json").exists()
    refused = convert("mla", source, out, *options)
    assert refused.exit_code == 2
    assert "holds an unfinished conversion" in refused.stderr
    different = convert("mla", source, out, "--kv-lora-rank", 12, *options[2:], "--resume")
    assert different.exit_code == 2
    assert "kv_lora_rank: 16 then, 12 now" in different.stderr
    finished = {path: path.stat().st_mtime_ns for path in (partial / "checkpoint").glob("*.safetensors")}
    ok(convert("mla", source, out, *options, "--resume"))
    assert not partial.exists()
    assert all((out / path.name).stat().st_mtime_ns == when for path, when in finished.items()), "written again"
    ok(convert("mla", source, tmp_path / "whole", *options))
    same_but_for_the_run(out, tmp_path / "whole")


def test_a_resumed_survey_does_no_layer_twice(
    checkpoint: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options, seen = checkpoint(), [*SMALL, "--method", "pca", "--text", words], []
    put, advance, embed = Shelf.put, LayerStream.advance, LayerStream.embed

    def note(what: str, function: Callable[..., Any], stop_at: int | None = None) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((what, *args[:1]))
            if len(seen) == stop_at:
                raise KeyboardInterrupt
            return function(self, *args, **kwargs)

        return noted

    monkeypatch.setattr(Shelf, "put", note("put", put, 5))
    monkeypatch.setattr(LayerStream, "advance", note("advance", advance))
    monkeypatch.setattr(LayerStream, "embed", note("embed", embed))
    assert convert("mla", source, tmp_path / "out", *options).exit_code == 130
    monkeypatch.setattr(Shelf, "put", note("put", put))
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))
    steps: list[tuple[Any, ...]] = [("embed",), ("advance", 0), ("put", 0), ("advance", 1), ("put", 1)]
    steps += [("advance", 1), ("put", 1), ("put", 2)]  # layer 1, whose statistics were not on the shelf yet, begins again
    assert seen == steps


def test_a_survey_of_another_text_is_not_resumed(
    checkpoint: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    source, options = checkpoint(), [*SMALL, "--method", "pca", "--text", words]
    with monkeypatch.context() as patch:
        patch.setattr(LayerStream, "advance", interrupted)
        assert convert("mla", source, tmp_path / "out", *options).exit_code == 130
    original = words.read_text()
    words.write_text(original[::-1])
    changed = convert("mla", source, tmp_path / "out", *options, "--resume")
    assert changed.exit_code == 2
    assert "calibration_hashes: ['sha256:" in changed.stderr
    words.write_text(original)
    for option in (["--refit"], ["--calibration-context", 64], ["--freqfold", 2], ["--method", "svd"]):
        given = [o for o in options if o not in ("--text", words)] if option[1:] == ["svd"] else options
        assert convert("mla", source, tmp_path / "out", *given, *option, "--resume").exit_code == 2, option
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))


def test_a_full_disk_during_the_survey_leaves_the_work_for_resume(
    checkpoint: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options, opened = checkpoint(), [*SMALL, "--method", "pca", "--text", words], []
    writing = LayerStream._writing

    @contextlib.contextmanager
    def fills_up(self: LayerStream, layer: int) -> Iterator[Callable[[torch.Tensor], None]]:
        with writing(self, layer) as write:

            def full(hidden: torch.Tensor) -> None:
                opened.append(layer)
                if layer == 2:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                write(hidden)

            yield full

    with monkeypatch.context() as patch:
        patch.setattr(LayerStream, "_writing", fills_up)
        result = convert("mla", source, tmp_path / "out", *options)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "--resume" in result.stderr
    assert not (tmp_path / "out").exists()
    shelf = tmp_path / "out.partial" / "steps"
    assert [path.name for path in shelf.glob("source-0000*")] == ["source-00000.safetensors"]
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))
    ok(convert("mla", source, tmp_path / "whole", *options))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")


# ---- what is there already -------------------------------------------------------------------------------------------


def test_what_is_not_ours_is_never_deleted(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    for name in ("out.partial", "out.old", ".out.old", "other.partial/notes"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "thesis.txt").write_text("years")
    for flags in ([], ["--resume"], ["--overwrite"]):
        result = convert("gqa", source, tmp_path / "out", "--groups", 2, *flags)
        assert result.exit_code == 2
        assert "no conversion made it" in result.stderr
    assert convert("gqa", source, tmp_path / "other", "--groups", 2, "--overwrite").exit_code == 2
    (tmp_path / "out.partial" / "thesis.txt").rename(tmp_path / "thesis.txt")
    for _ in range(2):
        ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--overwrite"))
    assert (tmp_path / "out.old" / "thesis.txt").exists()
    ours = {"source", "out"}
    assert {path.name for path in tmp_path.iterdir()} == {*ours, "out.old", ".out.old", "thesis.txt", "other.partial"}


def test_an_output_that_cannot_be_a_directory_is_refused_and_stays(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, linked = checkpoint(), tmp_path / "disk"
    linked.mkdir()
    (tmp_path / "link").symlink_to(linked)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a-file").write_text("years")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    before = {path.name: path.lstat().st_mode for path in tmp_path.iterdir()}
    said = {
        "link": f"is a link to {linked}", "dangling": "is a link to", "a-file": "is a file", "pipe": "is a FIFO",
        "socket": "is a socket", "a-file/out": "lies in a file", "pipe/out": "lies in a FIFO",
    }  # fmt: skip
    for name, message in said.items():
        for flags in ([], ["--overwrite"], ["--resume"]):
            result = convert("gqa", source, tmp_path / name, "--groups", 2, *flags)
            assert result.exit_code == 2
            assert message in result.stderr
    for device in ("/dev/null", "/dev/null/out"):
        assert "a device" in convert("gqa", source, device, "--groups", 2, "--overwrite").stderr
    assert Path("/dev/null").is_char_device()
    assert "is a mount point" in convert("gqa", source, "/dev", "--groups", 2).stderr
    assert before == {path.name: path.lstat().st_mode for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["out.partial", "out.old"])
def test_a_source_named_like_our_own_directories_survives(
    name: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = checkpoint(name=name)
    convert("gqa", source, tmp_path / "out", "--groups", 2, "--overwrite")
    assert (source / "model.safetensors").exists()


def test_overwrite_replaces_a_checkpoint_and_nothing_else(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, out = checkpoint(), tmp_path / "out"
    ok(convert("gqa", source, out, "--groups", 2))
    (out / "stale.txt").write_text("old")
    assert convert("gqa", source, out, "--groups", 1).exit_code == 2
    ok(convert("gqa", source, out, "--groups", 1, "--overwrite"))
    assert not (out / "stale.txt").exists()
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years")
    result = convert("gqa", source, home, "--groups", 1, "--overwrite")
    assert result.exit_code == 2
    assert "has no conversion.json of kvfold, so --overwrite leaves it alone" in result.stderr
    assert (home / "thesis.txt").read_text() == "years"
    shutil.copytree(source, home, dirs_exist_ok=True)
    assert convert("gqa", source, home, "--groups", 1, "--overwrite").exit_code == 2, "a checkpoint that others made"
    assert (home / "thesis.txt").exists()


# ---- bad text and activations ----------------------------------------------------------------------------------------


TEXTS: dict[str, tuple[bytes, str]] = {
    "short": (b"too short a text", "has 16 tokens, fewer than one block of 128"),
    "empty": (b" \n", "is empty"),
    "no bytes": (b"", "is empty"),
    "not UTF-8": ("Stra\xdfe ".encode("latin-1") * 100, "is not UTF-8 text"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_cannot_be_used(case: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    content, message = TEXTS[case]
    (tmp_path / "bad.txt").write_bytes(content)
    result = convert("mla", checkpoint(), tmp_path / "out", *SMALL, "--method", "pca", "--text", tmp_path / "bad.txt")
    left_nothing(result, 1, message, tmp_path / "out")


@pytest.mark.parametrize("scale", [1e38, 1e19], ids=["the values", "their squares, so that the norm gives zeros"])
def test_activations_that_overflow_name_the_layer(
    scale: float, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].mul_(scale**0.5)
        tensors["model.layers.0.mlp.down_proj.weight"].mul_(scale / scale**0.5 * 1e3)

    result = convert("mla", damage(checkpoint(), enlarge), tmp_path / "out", *SMALL, "--method", "pca", "--text", words)
    left_nothing(result, 1, "layer 1", tmp_path / "out")
    if scale == 1e38:
        assert "the input of layer 1's attention is not finite on the calibration text" in result.stderr


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_survey_of_half_a_checkpoint_names_what_is_missing(
    name: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source = damage(checkpoint(tie_word_embeddings=False), lambda tensors: tensors.pop(name))
    result = convert("mla", source, tmp_path / "out", *SMALL, "--method", "pca", "--text", words)
    left_nothing(result, 1, f"lacks {name}, which LlamaForCausalLM with this config has", tmp_path / "out")


# ---- code of the checkpoint's own ------------------------------------------------------------------------------------


def test_a_class_that_comes_with_the_checkpoint_is_converted(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    (source / "modeling_own.py").write_text("from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM): pass\n")
    edit(source, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    command = ["gqa", source, tmp_path / "out", "--groups", 2]
    ok(convert(*command, "--trust-remote-code"))
    assert (tmp_path / "out" / "modeling_own.py").read_bytes() == (source / "modeling_own.py").read_bytes()
    assert "is not used: transformers' class for llama" in ok(convert(*command, "--overwrite")).stdout
    assert not (tmp_path / "out" / "modeling_own.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_config_without_a_causal_lm_fails(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    (source / "configuration_own.py").write_text("from transformers import LlamaConfig\nclass Own(LlamaConfig): pass\n")
    edit(source, auto_map={"AutoConfig": "configuration_own.Own"})
    result = convert("gqa", source, tmp_path / "out", "--groups", 2, "--trust-remote-code")
    left_nothing(result, 1, "transformers makes no causal LM of this llama config", tmp_path / "out")


# ---- a finished conversion -------------------------------------------------------------------------------------------


def test_an_evaluation_without_memory_is_one_line(
    checkpoint: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("eval.quality.lockstep.score_group", full)
    result = convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--evaluate", words)
    assert result.exit_code == 1
    assert "not enough memory for the evaluation: CUDA out of memory" in result.stderr


# ---- formats of the cache --------------------------------------------------------------------------------------------

FORMATTED: dict[str, list[Any]] = {
    "all heads": ["gqa", "--groups", 4],
    "mqa": ["mqa"],
    "mla": ["mla", "--kv-lora-rank", 24, "--qk-rope-head-dim", 8],
    "portable": ["mla", "--kv-lora-rank", 24, "--qk-rope-head-dim", 8, "--portable"],
}


@pytest.mark.parametrize("kind", FORMATTED)
def test_a_result_for_a_format_is_an_ordinary_checkpoint_that_says_so(
    kind: str, checkpoint: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path
) -> None:
    (command, *size), source, out = FORMATTED[kind], checkpoint(), tmp_path / "out"
    done = convert(command, source, out, *size, "--cache-dtype", "int4", *on, "--heal", 0, "--evaluate", letters)
    assert done.exit_code == 0, done.output
    provenance = json.loads((out / "conversion.json").read_text())
    spec = AttentionSpec.from_config(AutoConfig.from_pretrained(out))
    held = {"before": 768, "after": spec.bytes_per_token("int4"), "cache_dtype": "int4"}
    assert provenance["kv_bytes_per_token"] == held
    assert provenance["recipe"][command]["cache_dtype"] == "int4"
    forms = [(entry["name"], entry["cache_format"]) for entry in provenance["evaluation"]["models"]]
    assert forms == [("source", None), ("converted", None), ("source (int4 cache)", "int4"), ("converted (int4 cache)", "int4")]
    card = (out / "README.md").read_text()
    assert f"{held['after']} ({100 * held['after'] / 768:.1f} %, in int4)" in card
    assert "perplexity with its cache in int4 |" in card
    assert "with its cache in int4" in done.output


def test_heads_of_the_source_have_no_row_in_a_format_of_latents(
    checkpoint: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path
) -> None:
    source, out = checkpoint(), tmp_path / "out"
    done = convert(*FORMATTED["mla"][:1], source, out, *FORMATTED["mla"][1:], "--cache-dtype", "mixed", *on, "--heal", 0,
                   "--evaluate", letters)  # fmt: skip
    assert done.exit_code == 0, done.output
    provenance = json.loads((out / "conversion.json").read_text())
    forms = [(entry["name"], entry["cache_format"]) for entry in provenance["evaluation"]["models"]]
    assert forms == [("source", None), ("converted", None), ("converted (mixed cache)", "mixed")]
    assert "perplexity with its cache in mixed |" in (out / "README.md").read_text()
    refused = convert("gqa", source, tmp_path / "heads", "--groups", 2, "--cache-dtype", "mixed", *on)
    assert refused.exit_code == 2
    assert "heads cannot be cached in mixed" in refused.stderr


def test_heads_that_stay_are_balanced_without_changing_the_model(
    checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path, logits: Logits
) -> None:
    source, out = checkpoint(), tmp_path / "out"
    ok(convert("gqa", source, out, "--groups", 4, "--cache-dtype", "int4", "--no-refit", "--heal", 0, *on))
    torch.testing.assert_close(logits(out), logits(source), rtol=1e-4, atol=1e-4)
    before, after = (weights(path)["model.layers.0.self_attn.v_proj.weight"] for path in (source, out))
    assert not torch.equal(before, after)


def test_fits_go_through_the_rounding_of_the_cache(checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path) -> None:
    """Over a latent of two bits, what was fitted through its rounding loses less than what was not."""
    source, losses = checkpoint(), []
    for name, form in (("plain", []), ("fitted", ["--cache-dtype", "int2"])):
        ok(convert(FORMATTED["mla"][0], source, tmp_path / name, *FORMATTED["mla"][1:], *form, *on, "--heal", 0))
        report = evaluate([source, tmp_path / name], text=str(on[1]), context=32, cache_dtype=["int2"])
        losses.append(report["models"][-1]["kl_to_source"])
    assert losses[1] < losses[0]


def test_the_text_chooses_the_format(checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path) -> None:
    source, out = checkpoint(), tmp_path / "out"
    ok(convert("mla", source, out, "--kv-budget", "20%", "--cache-dtype", "auto", *on, "--heal", 0))
    provenance = json.loads((out / "conversion.json").read_text())
    tried, chosen = provenance["rotary_frequencies_tried"], provenance["recipe"]["mla"].get("cache_dtype")
    assert len({row.get("cache_dtype") for row in tried}) > 3
    best = min(tried, key=lambda row: float(row["output_error"]))
    assert best.get("cache_dtype") == chosen
    assert provenance["kv_bytes_per_token"]["cache_dtype"] == (chosen or "float32")
    assert provenance["kv_bytes_per_token"]["after"] <= 0.2 * 768
    again = convert("mla", source, out, "--kv-budget", "20%", "--cache-dtype", "auto", *on, "--heal", 0, "--resume")
    assert "is finished already" in ok(again).output
    assert chosen is not None
    ok(convert("run", out, tmp_path / "same"))  # the same sizes, the same bytes
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_a_format_that_the_sources_heads_do_not_take_is_left_out_of_the_evaluation(
    checkpoint: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path
) -> None:
    size = ["--kv-lora-rank", 32, "--qk-rope-head-dim", 32, "--cache-dtype", "q8_0"]  # the source's heads have 8 dims
    done = ok(convert("mla", checkpoint(), tmp_path / "out", *size, *on, "--heal", 0, "--evaluate", letters))
    assert "evaluated without caches in q8_0" in done.output
    found = json.loads((tmp_path / "out" / "conversion.json").read_text())["evaluation"]["models"]
    assert [model["cache_format"] for model in found] == [None, None]
