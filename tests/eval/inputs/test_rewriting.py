"""A checkpoint of a former type is rewritten once, whole or not at all, and with the numbers that it had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from formers import CONFIGS, TOKENS, tensors_of, write
from safetensors.torch import load_file
from written import Convert, ok

from attention.errors import Failure
from eval.inputs.reader import Reader
from eval.inputs.source import Source


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvfold" / "unpacked"


def files_of(path: Path) -> Path:
    return Source.parse(str(path)).files


def read(directory: Path) -> dict[str, torch.Tensor]:
    reader = Reader(directory)
    return {name: reader[name] for name in reader.infos}


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.glob("*") if path.is_dir()]


def test_numbers_that_nothing_is_folded_into_keep_their_bits(tmp_path: Path) -> None:
    before = {name: tensor.bfloat16() for name, tensor in tensors_of("baichuan2").items()}
    after = read(files_of(write(tmp_path / "old", "baichuan2", before, shards=3)))
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn"
        parts = [after.pop(f"{name}.{part}_proj.weight") for part in "qkv"]
        assert torch.equal(torch.cat(parts), before.pop(f"{name}.W_pack.weight"))
    head = after.pop("lm_head.weight")
    assert torch.equal(head, torch.nn.functional.normalize(before.pop("lm_head.weight").float()).bfloat16())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)


def test_experts_without_a_gate_are_doubled_exactly(tmp_path: Path) -> None:
    before = {name: tensor.bfloat16() for name, tensor in tensors_of("deepseek").items()}
    after = read(files_of(write(tmp_path / "old", "deepseek", before)))
    old, new = "model.layers.1.mlp.shared_experts", "model.layers.1.mlp.shared_expert"
    assert torch.equal(after[f"{new}.down_proj.weight"].float(), 2 * before[f"{old}.down_proj.weight"].float())
    assert torch.equal(after[f"{new}_gate.weight"], torch.zeros(1, 48, dtype=torch.bfloat16))


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_are_read(shards: int, tmp_path: Path) -> None:
    tensors = tensors_of("qwen")
    expected = read(files_of(write(tmp_path / "old", "qwen")))
    path = write(tmp_path / "bin", "qwen", shards=shards)
    held = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    for file, part in held.items():
        (path / file).unlink()
        torch.save(part, path / file.replace("model", "pytorch_model").replace("safetensors", "bin"))
    if shards > 1:
        (path / "model.safetensors.index.json").unlink()
        places = {name: file for file, part in held.items() for name in part}
        names = {name: places[name].replace("model", "pytorch_model").replace("safetensors", "bin") for name in tensors}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    found = read(files_of(path))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not list(files_of(path).glob("*.bin*"))


def test_weights_that_stay_as_they_are_are_not_copied(convert: Convert, cache: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "old", "RefinedWebModel", shards=2)
    found = files_of(path)
    weights = sorted(found.glob("model*"))
    assert [file.resolve() for file in weights] == sorted(path.glob("model*"))
    assert json.loads((found / "config.json").read_text())["model_type"] == "falcon"
    (listed,) = json.loads(ok(convert("cache", "list", "--json")).stdout)
    assert listed["bytes"] < (path / "model-00001-of-00002.safetensors").stat().st_size
    for file in path.glob("*.safetensors"):
        file.unlink()
    assert "nothing is unpacked" in ok(convert("cache", "list")).stdout
    with pytest.raises(Failure, match="lacks 2 of 2 weight files"):
        files_of(path)
    ok(convert("cache", "clear"))
    assert not entries(cache)


def test_a_config_that_changes_while_it_is_read_gives_another_entry(tmp_path: Path) -> None:
    path = write(tmp_path / "old", "internlm")
    source = Source.parse(str(path))
    before = source.raw["rope_theta"]
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rotary": {"type": "dynamic", "base": 90000}}))
    assert json.loads((source.files / "config.json").read_text())["rope_theta"] == before
    assert json.loads((files_of(path) / "config.json").read_text())["rope_theta"] == 90000


def test_a_checkpoint_is_rewritten_once_and_again_when_it_changes(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "old", "internlm")
    first = files_of(path)
    assert f"{path} is unpacked into {cache}" in caplog.text
    caplog.clear()
    assert files_of(path) == first
    assert not caplog.text
    for name in ("notes.txt", "optimizer.bin"):
        (path / name).write_text("nothing that a checkpoint is made of")
    (path / "LICENSES").mkdir()
    assert files_of(path) == first
    write(path, "internlm", tensors_of("internlm", seed=1))
    again = files_of(path)
    assert again != first
    assert torch.equal(read(again)["model.norm.weight"], tensors_of("internlm", seed=1)["model.norm.weight"])
    assert len(entries(cache)) == 1, "of one checkpoint, only one is kept"


def test_of_a_hub_repository_the_config_is_enough_to_know_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    path, asked = write(tmp_path / "0123", "baichuan"), list[list[str]]()

    def download(repository: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = Source.parse("nobody/tiny")
    assert (source.model_type, source.config.model_type, source.notes[0][:10]) == ("llama", "llama", "its model ")
    assert (asked, entries(cache), source.commit) == ([["config.json"]], [], "0123")
    assert (source.files.parent.parent, len(asked)) == (cache, 2)
    (path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(Failure, match=r"cannot read tokenizer\.model as a tokenizer"):
        Source.parse("nobody/tiny").files  # noqa: B018
    assert len(entries(cache)) == 1, "what was there before stays until its successor is whole"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_rewriting_that_ends_early_leaves_nothing(
    error: type[BaseException], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import torch as module

    path, save, written = write(tmp_path / "old", "baichuan", shards=3), module.save_file, list[Path]()

    def failing(tensors: Any, file: Path, *rest: Any) -> None:
        if len(written) == 2:
            raise error("No space left on device")
        written.append(file)
        save(tensors, file, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", failing)
        with pytest.raises(Failure if error is OSError else error):
            files_of(path)
    assert not entries(cache)
    (cache / "unfinished" / "checkpoint").mkdir(parents=True)  # as a kill leaves it
    (cache / "unfinished" / "checkpoint" / "model.safetensors").write_text("half")
    assert len(read(files_of(path))) == len(tensors_of("baichuan")) + 2 * 2
    assert len(entries(cache)) == 1


def test_its_files_come_along_but_not_its_code(tmp_path: Path) -> None:
    path = write(tmp_path / "old", "stablelm_epoch")
    settings = {"tokenizer_class": "GPTNeoXTokenizer", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    files = {"own.py": "raise SystemExit", "LICENSE": "free", "generation_config.json": "{}", "tokenizer.json": "{}"}
    for name, text in (files | {"tokenizer_config.json": json.dumps(settings)}).items():
        (path / name).write_text(text)
    found = files_of(path)
    assert sorted(file.name for file in found.iterdir()) == [
        "LICENSE", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert json.loads((found / "tokenizer_config.json").read_text()) == {"tokenizer_class": "GPTNeoXTokenizer"}


def test_plans_do_not_rewrite_and_results_say_what_was_done(convert: Convert, cache: Path, tmp_path: Path) -> None:
    path, note = write(tmp_path / "old", "qwen"), "its model type 'qwen' is read as qwen2, without its own code"
    assert "qwen2" in ok(convert("inspect", path)).stdout
    assert note in ok(convert("plan", path)).stdout
    assert not entries(cache)
    done = ok(convert("gqa", path, tmp_path / "out", "--groups", 2, "--no-text", "--heal", 0))
    assert note in done.stdout
    assert note in (tmp_path / "out" / "README.md").read_text()
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert provenance["recipe"]["gqa"]["model"] == str(path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"], config["vocab_size"]) == ("qwen2", 2, TOKENS)
    assert len(entries(cache)) == 1


def test_a_conversion_of_as_many_groups_keeps_its_logits(convert: Convert, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    heads = CONFIGS["internlm"]["num_attention_heads"]
    path = write(tmp_path / "old", "internlm")
    ok(convert("gqa", path, tmp_path / "out", "--groups", heads, "--no-text", "--force"))
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        before, after = (
            AutoModelForCausalLM.from_pretrained(where)(ids).logits for where in (files_of(path), tmp_path / "out")
        )
    assert torch.equal(before, after)
