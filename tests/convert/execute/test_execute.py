"""Whole conversions of real checkpoint directories: exactness, the files, interruption, bad input."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from written import WITHOUT_KVFOLD, ok, same_but_for_the_run, weights

from convert.checkpoint.workdir import WorkDirectory
from convert.families import FAMILIES
from convert.families.latent import LatentProjections

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]

WITH_KV_HEADS = [name for name, family in FAMILIES.items() if not isinstance(family, LatentProjections)]


# ---- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", WITH_KV_HEADS)
def test_as_many_groups_as_heads_copies_every_bit(model_type: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(model_type)
    for method in ("mean", "random"):
        ok(convert("gqa", source, tmp_path / method, "--groups", 4, "--method", method))
        before, after = weights(source), weights(tmp_path / method)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("model_type", WITH_KV_HEADS)
def test_equal_heads_merge_without_loss(
    model_type: str, checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    switches = dict.fromkeys(("attention_bias", "use_bias", "use_qkv_bias", "qkv_bias", "qk_layernorm", "use_qk_norm"), True)
    source = checkpoint(model_type, duplicated=2, **switches)
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"]) == (2, 8)
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=1e-4, atol=1e-4)


def test_unequal_heads_do_lose(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint()
    for method, errors in (("mean", ("k_error", "v_error")), ("aligned", ("score_error", "output_error"))):
        ok(convert("gqa", source, tmp_path / method, "--groups", 2, "--method", method))
        assert (logits(tmp_path / method) - logits(source)).abs().max() > 0.1
        layers = json.loads((tmp_path / method / "conversion.json").read_text())["layers"]
        assert [entry["layer"] for entry in layers] == [0, 1, 2]
        assert all(0.1 < entry[name] < 1 for entry in layers for name in errors)


def test_converting_twice_is_converting_once(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(num_key_value_heads=8)
    ok(convert("gqa", source, tmp_path / "four", "--groups", 4, "--method", "mean"))
    ok(convert("mqa", tmp_path / "four", tmp_path / "four-one", "--method", "mean"))
    ok(convert("mqa", source, tmp_path / "one", "--method", "mean"))
    twice, once = weights(tmp_path / "four-one"), weights(tmp_path / "one")
    for name, tensor in once.items():
        torch.testing.assert_close(twice[name], tensor)


def test_a_seed_decides_what_is_drawn(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        ok(convert("mqa", source, tmp_path / name, "--method", "random", "--seed", seed))
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    differing = {name for name in a if not torch.equal(a[name], c[name])}
    assert differing == {name for name in a if ".k_proj." in name or ".v_proj." in name}


def test_real_checkpoint_with_pairwise_equal_heads(shared: Path, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = shared / "checkpoints" / "stories260K-as-mha"
    ok(convert("gqa", source, tmp_path / "four", "--groups", 4, "--method", "mean"))
    torch.testing.assert_close(logits(tmp_path / "four"), logits(source), rtol=1e-5, atol=1e-5)
    original = weights(shared / "checkpoints" / "stories260K")
    four = weights(tmp_path / "four")
    assert all(torch.equal(four[name], original[name]) for name in original)
    for groups in (2, 1):
        ok(convert("gqa", source, tmp_path / str(groups), "--groups", groups))
        assert (logits(tmp_path / str(groups)) - logits(source)).abs().max() > 1


# ---- files ---------------------------------------------------------------------------------------------------------


def test_companions_are_copied_byte_for_byte_and_the_rest_is_not(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    (source / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.6}'
    )  # transformers refuses to save this
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "LICENSE").write_text("ours")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Source\n")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    (source / "optimizer.pt").write_text("large")
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    copied = ["generation_config.json", "chat_template.jinja", "LICENSE", "tokenizer.json", "tokenizer_config.json"]
    assert filecmp.cmpfiles(source, tmp_path / "out", copied, shallow=False) == (copied, [], [])
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {*copied, "config.json", "model.safetensors", "README.md", "conversion.json"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in card
    assert "was not measured" in card


@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_stay_tied(tied: bool, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(tie_word_embeddings=tied)
    ok(convert("mqa", source, tmp_path / "out"))
    assert ("lm_head.weight" in weights(tmp_path / "out")) == (not tied)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == tied


def test_shards_are_bounded_indexed_and_complete(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint(shard="60KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    ok(convert("gqa", source, tmp_path / "many", "--groups", 2, "--max-shard-size", "40KB"))
    ok(convert("gqa", source, tmp_path / "one", "--groups", 2))
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    many, one = weights(tmp_path / "many"), weights(tmp_path / "one")
    assert index["weight_map"].keys() == many.keys() == one.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in many.values())
    assert all(torch.equal(many[name], one[name]) for name in one)
    for file in files:
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 40_000 or len(tensors) == 1 or "self_attn" in next(iter(tensors))
    torch.testing.assert_close(logits(tmp_path / "many"), logits(tmp_path / "one"))


def test_every_tensor_is_accounted_for_once(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("olmo2")
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean"))
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    converted, copied = record["tensors"]["converted"], record["tensors"]["copied"]
    assert sorted(converted + copied) == sorted(weights(source))
    assert {name.split("self_attn.")[1] for name in converted} == {"k_proj.weight", "v_proj.weight", "k_norm.weight"}
    assert "inexact" in record["notes"][0]
    before, after = weights(source), weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in copied)


def test_a_pickle_source_becomes_safetensors(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint(duplicated=2, tie_word_embeddings=True)
    tensors = weights(source)
    torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, source / "pytorch_model.bin")
    expected = logits(source)
    (source / "model.safetensors").unlink()
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    torch.testing.assert_close(logits(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert list(record["tensors"]["dropped"]) == ["lm_head.weight"]
    raw = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(raw))
    ok(convert("gqa", source, tmp_path / "untied", "--groups", 2))
    assert "lm_head.weight" in weights(tmp_path / "untied"), "an untied head is not dropped for sharing memory in a file"


def test_a_dtype_is_stored_and_written_into_the_config(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    ok(convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--dtype", "bfloat16"))
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["kv_bytes_per_token"]["after"] == 3 * 2 * 2 * 8 * 2


def test_merged_heads_are_rounded_once(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    ok(convert("gqa", source, tmp_path / "half", "--groups", 4, "--dtype", "bfloat16"))
    ok(convert("gqa", tmp_path / "half", tmp_path / "wide", "--groups", 2, "--dtype", "float32", "--method", "mean"))
    name = "model.layers.0.self_attn.k_proj.weight"
    rows = weights(tmp_path / "half")[name].float().unflatten(0, (2, 2, 8))
    torch.testing.assert_close(weights(tmp_path / "wide")[name], rows.mean(1).flatten(0, 1), rtol=1e-6, atol=0)


def test_a_cast_is_not_called_a_copy(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    result = ok(convert("gqa", source, tmp_path / "out", "--groups", 4, "--dtype", "bfloat16"))
    assert "every tensor is cast to bfloat16" in result.stdout
    tensors = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"]
    assert sorted(tensors["cast"]) == sorted(weights(source))
    assert tensors["converted"] == tensors["copied"] == []


def test_heads_that_had_tensors_of_their_own_are_accounted_for(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("stablelm", qk_layernorm=True)
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    ok(convert("gqa", source, tmp_path / "same", "--groups", 4))
    tensors = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"]
    assert sorted([*tensors["converted"], *tensors["copied"], *tensors["dropped"]]) == sorted(weights(source))
    assert len(tensors["dropped"]) == 3 * 2
    assert not any("q_layernorm" in name for name in tensors["converted"])
    same = json.loads((tmp_path / "same" / "conversion.json").read_text())
    assert same["method"] is None
    assert same["tensors"]["converted"] == []


def test_a_dtype_replaces_the_old_name_of_the_key(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    raw = json.loads((source / "config.json").read_text()) | {"torch_dtype": "float32"}
    (source / "config.json").write_text(json.dumps(raw))
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--dtype", "bfloat16"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config


def test_the_config_changes_in_two_keys_only(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("qwen2")
    raw = json.loads((source / "config.json").read_text()) | {"unknown_to_transformers": [1, 2]}
    (source / "config.json").write_text(json.dumps(raw))
    ok(convert("mqa", source, tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw | {"num_key_value_heads": 1, "head_dim": 8}


def test_the_result_loads_where_kvfold_is_not_installed(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    ok(convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2))
    script = (
        WITHOUT_KVFOLD
        + """
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
ids = AutoTokenizer.from_pretrained(sys.argv[1])("hello", return_tensors="pt")
out = model.generate(**ids, max_new_tokens=5, do_sample=False)
assert out.shape[1] > ids["input_ids"].shape[1]
keys = model(**ids).past_key_values.layers[0].keys
print(tuple(keys.shape))
"""
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, str(tmp_path / "out")], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("(1, 2, 5, 8)")


def test_evaluating_fills_the_card_and_never_the_work_directory_name(
    checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("a line of text, and another\n" * 40)
    ok(convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--evaluate", tmp_path / "text.txt", "-q"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Perplexity under protocol `paper`: text.txt, context 128" in card
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert [(m["name"], m["method"]) for m in record["evaluation"]["models"]] == [("source", None), ("converted", "aligned")]
    assert ".partial" not in card + json.dumps(record)


# ---- interruption --------------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys
import convert.execute.weights as execute
from convert.cli import main
write, count = execute.write_shard, 0
def interrupted(path, *rest):
    global count
    count += 1
    if count == 3:
        path.with_name(path.name + ".tmp").write_bytes(b"half of a sha")
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    write(path, *rest)
execute.write_shard = interrupted
main(sys.argv[2:], prog_name="convert")
"""


@pytest.mark.parametrize("method", ["mean", "random"])
@pytest.mark.parametrize(("kill", "code"), [("SIGINT", 130), ("SIGKILL", -signal.SIGKILL)])
def test_an_interrupted_run_leaves_nothing_loadable_and_resumes(
    kill: str, code: int, method: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source, out = checkpoint(), tmp_path / "out"
    command = ["gqa", source, out, "--groups", 2, "--method", method, "--max-shard-size", "20KB"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, kill, *map(str, command)], capture_output=True, text=True, check=False
    )
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
    ok(convert(*command, "--resume"))
    assert not partial.exists()
    assert all((out / name).stat().st_mtime_ns == when for name, when in finished.items()), "a finished shard was written again"
    uninterrupted = [source, tmp_path / "whole", *command[3:]]
    ok(convert("gqa", *uninterrupted))
    same_but_for_the_run(out, tmp_path / "whole")


@pytest.mark.parametrize("removed", [[], ["notes", "survey"], ["notes", "survey", "replaced"]], ids=len)
def test_a_run_interrupted_while_it_cleans_up_is_whole(
    removed: list[str], checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: WorkDirectory) -> None:
        if self.path.parent.exists():
            for name in removed:
                shutil.rmtree(self.path.parent / name)
            raise KeyboardInterrupt

    source, out = checkpoint(), tmp_path / "out"
    ok(convert("gqa", source, out, "--groups", 1))
    command = ["gqa", source, out, "--groups", 2]
    with monkeypatch.context() as patch:
        patch.setattr(WorkDirectory, "discard", interrupted)
        stopped = convert(*command, "--overwrite")
    assert stopped.exit_code == 130
    assert "--resume" in stopped.stderr
    written = (out / "model.safetensors").stat().st_mtime_ns
    assert "exists already" in convert(*command).stderr
    assert "groups: 2 then, 1 now" in convert(*command[:-1], 1, "--resume").stderr
    said = ok(convert(*command, "--resume")).stdout
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    assert not (tmp_path / "out.partial").exists()
    assert said == ok(convert(*command, "--overwrite")).stdout


def test_a_run_interrupted_before_it_replaces_is_finished(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    source, out = checkpoint(), tmp_path / "out"
    ok(convert("gqa", source, out, "--groups", 1))
    command = ["gqa", source, out, "--groups", 2]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        assert convert(*command, "--overwrite").exit_code == 130
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 1
    assert "exists already" in convert(*command, "--resume").stderr, "the old one is not taken for the new"
    ok(convert(*command, "--resume", "--overwrite"))
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 2
    assert not (tmp_path / "out.partial").exists()


def test_what_stepped_aside_comes_back_until_something_replaces_it(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, out, source = Path.rename, tmp_path / "out", checkpoint()

    def interrupted(self: Path, target: Path) -> None:
        if self.name == "checkpoint":
            raise KeyboardInterrupt
        rename(self, target)

    def failing(*_: object) -> None:
        assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ok(convert("gqa", source, out, "--groups", 1))
    command = ["gqa", source, out, "--groups", 2]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        assert convert(*command, "--overwrite").exit_code == 130
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr("convert.execute.weights.write_shard", failing)
        assert convert(*command, "--overwrite").exit_code == 1
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 1
    ok(convert(*command, "--resume", "--overwrite"))
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 2
    assert not (tmp_path / "out.partial").exists()


def test_overwriting_begins_again_where_nothing_can_be_resumed(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    command = [str(a) for a in ("gqa", source, tmp_path / "out", "--max-shard-size", "20KB", "--groups")]
    subprocess.run([sys.executable, "-c", INTERRUPTED, "SIGKILL", *command, "2"], capture_output=True, check=False)
    ok(convert(*command, 1, "--resume", "--overwrite"))
    ok(convert("gqa", source, tmp_path / "whole", *command[3:], 1))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")


def test_a_device_without_memory_leaves_the_work_for_resume(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convert.execute import weights as execute

    source, command = checkpoint(), ("--groups", 2, "--max-shard-size", "20KB")
    fill, left = execute._fill, [3]

    def fills_up(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return fill(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(execute, "_fill", fills_up)
        result = convert("gqa", source, tmp_path / "out", *command)
    assert result.exit_code == 1
    assert "error: no memory left on cpu: CUDA out of memory. Tried to allocate 2.00 GiB." in result.stderr
    assert "--resume" in result.stderr
    assert len(list((tmp_path / "out.partial" / "checkpoint").glob("*.safetensors"))) == 2
    ok(convert("gqa", source, tmp_path / "out", *command, "--resume"))


def test_two_runs_write_the_same_bytes(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    for name in ("a", "b"):
        ok(convert("gqa", source, tmp_path / name, "--groups", 2))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")


def test_a_full_disk_leaves_the_work_for_resume(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convert.execute import weights as execute

    source, command = checkpoint(), ("--groups", 2, "--max-shard-size", "20KB")
    written = []

    def fills_up(path: Path, *rest: Any) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *rest)
        written.append(path)

    write = execute.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_shard", fills_up)
        result = convert("gqa", source, tmp_path / "out", *command)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "--resume" in result.stderr
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        again = convert("gqa", source, tmp_path / "out", *command, "--resume")
    assert again.exit_code == 1
    assert "then use --resume" in again.stderr
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "out.partial" / "checkpoint").glob("*.safetensors")}
    assert len(finished) == 2
    ok(convert("gqa", source, tmp_path / "out", *command, "--resume"))
    assert all((tmp_path / "out" / path.name).stat().st_mtime_ns == when for path, when in finished.items())
    ok(convert("gqa", source, tmp_path / "whole", *command))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")


def test_a_shard_that_lost_its_end_is_written_again(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, command = checkpoint(), ["--groups", 2, "--max-shard-size", "20KB"]
    arguments = [str(a) for a in ("gqa", source, tmp_path / "out", *command)]
    subprocess.run([sys.executable, "-c", INTERRUPTED, "SIGKILL", *arguments], capture_output=True, check=False)
    first = min((tmp_path / "out.partial" / "checkpoint").glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-7])
    ok(convert(*arguments, "--resume"))
    ok(convert("gqa", source, tmp_path / "whole", *command))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")


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
    ours = {"source", "out", "out.lock"}
    assert {path.name for path in tmp_path.iterdir()} == {*ours, "out.old", ".out.old", "thesis.txt", "other.partial"}


def test_an_output_that_is_a_link_is_written_where_it_points(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    ok(convert("gqa", source, tmp_path / "link", "--groups", 2))
    ok(convert("gqa", source, tmp_path / "link", "--groups", 1, "--overwrite"))
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "disk" / "out" / "config.json").read_text())["num_key_value_heads"] == 1
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"out", "out.lock"}
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "is a link to nothing" in convert("gqa", source, tmp_path / "dangling", "--groups", 2).stderr


@pytest.mark.parametrize("name", ["out.partial", "out.old"])
def test_a_source_named_like_our_own_directories_survives(
    name: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = checkpoint(name=name)
    convert("gqa", source, tmp_path / "out", "--groups", 2, "--overwrite")
    assert (source / "model.safetensors").exists()


def test_too_little_space_is_seen_before_the_first_byte(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    result = convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2)
    assert result.exit_code == 1
    assert "no space" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out.lock"}


def test_a_config_that_changed_is_not_resumed(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, command = checkpoint(), ["--groups", 2, "--max-shard-size", "20KB"]
    arguments = [str(a) for a in ("gqa", source, tmp_path / "out", *command)]
    subprocess.run([sys.executable, "-c", INTERRUPTED, "SIGKILL", *arguments], capture_output=True, check=False)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 0.5}))
    result = convert(*arguments, "--resume")
    assert result.exit_code == 2
    assert "config" in result.stderr
    (source / "config.json").write_text(json.dumps(raw))
    (tmp_path / "out.partial" / "plan.json").write_text("")  # as a power failure may leave it: begin again
    ok(convert(*arguments, "--resume"))


def test_a_failed_evaluation_does_not_lose_the_conversion(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attention.errors import Failure

    def fails(*_: Any) -> None:
        raise Failure("the logits are not finite")

    source = checkpoint()
    (tmp_path / "text.txt").write_text("a line of text, and another\n" * 40)
    with monkeypatch.context() as patch:
        patch.setattr("convert.execute.run.report_of", fails)
        result = convert("gqa", source, tmp_path / "out", "--groups", 2, "--evaluate", tmp_path / "text.txt")
    assert result.exit_code == 1
    assert "the conversion is done, its evaluation failed: the logits are not finite" in result.stderr
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--resume"))


def test_a_source_that_changed_is_not_resumed(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "plan.json").write_text(json.dumps({"recipe": {}, "files": {}}))
    result = convert("gqa", source, tmp_path / "out", "--groups", 2, "--resume")
    assert result.exit_code == 2
    assert "was begun with other settings" in result.stderr
    assert "groups: None then, 2 now" in result.stderr


def test_overwrite_replaces_a_checkpoint_and_nothing_else(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, out = checkpoint(), tmp_path / "out"
    ok(convert("gqa", source, out, "--groups", 2))
    (out / "stale.txt").write_text("old")
    assert convert("gqa", source, out, "--groups", 1).exit_code == 2
    ok(convert("gqa", source, out, "--groups", 1, "--overwrite"))
    assert not (out / "stale.txt").exists()
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", "out.lock"}
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years")
    result = convert("gqa", source, home, "--groups", 1, "--overwrite")
    assert result.exit_code == 2
    assert "is no checkpoint" in result.stderr
    assert (home / "thesis.txt").read_text() == "years"
    (home / "config.json").write_text('{"name": "a web application"}')
    assert "is no checkpoint" in convert("gqa", source, home, "--groups", 1, "--overwrite").stderr
    assert (home / "thesis.txt").exists()


# ---- bad weights ---------------------------------------------------------------------------------------------------


def damage(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def nan_in(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors[name].view(-1)[0:1].fill_(float("nan")) and None


K = "model.layers.1.self_attn.k_proj"
BAD = {
    "missing tensor": (lambda t: t.pop(f"{K}.weight"), f"lacks tensor {K}.weight"),
    "wrong shape": (
        lambda t: t.update({f"{K}.weight": torch.ones(16, 64)}),
        f"disagree: {K}.weight is [16, 64], by the config it is [32, 64]",
    ),
    "NaN where heads merge": (nan_in(f"{K}.weight"), f"tensor {K}.weight holds NaN or infinite values"),
    "NaN elsewhere": (nan_in("model.norm.weight"), "tensor model.norm.weight holds NaN or infinite values"),
    "a bias that the config denies": (lambda t: t.update({f"{K}.bias": torch.ones(32)}), f"has tensor {K}.bias, which llama"),
    "more layers than the config": (
        lambda t: t.update({K.replace("1", "3") + ".weight": t[f"{K}.weight"].clone()}),
        "config.json gives 3 layers, and the weights hold model.layers.3.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_leave_nothing_behind(case: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    change, message = BAD[case]
    damage(source, change)
    result = convert("gqa", source, tmp_path / "out", "--groups", 2, "-q")
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out.lock"}
