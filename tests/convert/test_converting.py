"""Whole conversions: interrupted and resumed to the same bytes, of checkpoints with code, for formats of the cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import SMALL
from transformers import AutoConfig
from written import Convert, Find, Logits, Make, edit, left_nothing, ok, read, refused, same_but_for_the_run, stop_at, weights

from attention.spec import AttentionSpec
from convert.execute import layers as writer
from convert.output.evaluation import _formats
from eval import evaluate
from eval.inputs.source import Source


def test_an_interrupted_run_says_how_to_go_on(
    shelf: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left is no checkpoint and goes on to the bytes of a whole run, and no finished shard is written again.

    That statistics, inputs and layers go on, too, tests of surveys, streams and sequences hold.
    """
    out, unfinished = tmp_path / "out", tmp_path / "out.partial" / "checkpoint"
    command = ["mla", shelf(), out, *SMALL, "--method", "pca", "--max-shard-size", "20KB"]
    command += ["--text", words, "--calibration-tokens", 256]
    with monkeypatch.context() as patch:
        stop_at(patch, writer, "write_shard", 3, KeyboardInterrupt())
        result = convert(*command)
    assert result.exit_code == 130, result.output
    assert "error: interrupted\nhint: the same command with --resume finishes the conversion\n" in result.stderr
    assert not out.exists()
    finished = {path.name: path.stat().st_mtime_ns for path in unfinished.iterdir()}
    assert [name[:11] for name in sorted(finished)] == ["model-00001", "model-00002"]
    (unfinished / f"{min(finished).replace('00001', '00003')}.tmp").write_bytes(b"half of a sha")  # as a crash may leave it
    refused(convert(*command), 2, "holds an unfinished conversion")
    refused(convert(*command, "--seed", 5, "--resume"), 2, "seed: 0 then, 5 now")
    ok(convert(*command, "--resume"))
    assert not unfinished.parent.exists()
    assert all((out / name).stat().st_mtime_ns == when for name, when in finished.items()), "written again"
    ok(convert(*(tmp_path / "whole" if one == out else one for one in command)))
    same_but_for_the_run(out, tmp_path / "whole")


def test_a_class_that_comes_with_the_checkpoint_is_converted(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    (source / "modeling_own.py").write_text("from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM): pass\n")
    edit(source, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    command = ["gqa", source, tmp_path / "out", "--groups", 2]
    ok(convert(*command, "--trust-remote-code"))
    assert (tmp_path / "out" / "modeling_own.py").read_bytes() == (source / "modeling_own.py").read_bytes()
    assert "is not used: transformers' class for llama" in ok(convert(*command, "--overwrite")).stdout
    assert not (tmp_path / "out" / "modeling_own.py").exists()
    assert "auto_map" not in read(tmp_path / "out" / "config.json")


def test_a_config_without_a_causal_lm_fails(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    (source / "configuration_own.py").write_text("from transformers import LlamaConfig\nclass Own(LlamaConfig): pass\n")
    edit(source, auto_map={"AutoConfig": "configuration_own.Own"})
    result = convert("gqa", source, tmp_path / "out", "--groups", 2, "--trust-remote-code")
    left_nothing(result, 1, "transformers makes no causal LM of this llama config", tmp_path / "out")


def test_a_result_for_a_format_is_an_ordinary_checkpoint_that_says_so(finished: Find) -> None:
    made = finished("latent in int4")
    spec = AttentionSpec.from_config(AutoConfig.from_pretrained(made.path))
    held = {"before": 768, "after": spec.bytes_per_token("int4"), "cache_dtype": "int4"}
    assert made.provenance["kv_bytes_per_token"] == held
    assert made.provenance["recipe"]["mla"]["cache_dtype"] == "int4"
    forms = [(entry["name"], entry["cache_format"]) for entry in made.provenance["evaluation"]["models"]]
    assert forms == [("source", None), ("converted", None), ("source (int4 cache)", "int4"), ("converted (int4 cache)", "int4")]
    assert f"{held['after']} ({100 * held['after'] / 768:.1f} %, in int4)" in made.card
    assert "perplexity with its cache in int4 |" in made.card
    assert "with its cache in int4" in made.stdout


def test_models_without_a_format_are_evaluated_without_it(shelf: Make, warned: Callable[[], list[str]]) -> None:
    """A format of latents is left out of the source's heads; one that the heads could have by their kind, of all models."""
    source, latent = (Source.parse(str(path)) for path in (shelf(), shelf("deepseek_v3")))
    made_for = {form: {"kv_bytes_per_token": {"cache_dtype": form}} for form in ("mixed", "q8_0", "float32")}
    assert _formats(made_for["mixed"], (source, latent)) == ("mixed",)
    assert _formats(made_for["float32"], (source, latent)) == ()
    assert warned() == []
    assert _formats(made_for["q8_0"], (source, latent)) == ()
    assert warned() == [f"evaluated without caches in q8_0, which {source.reference} cannot have"]


def test_heads_that_stay_are_balanced_without_changing_the_model(
    shelf: Make, convert: Convert, on: list[Any], tmp_path: Path, logits: Logits
) -> None:
    source, out = shelf(), tmp_path / "out"
    ok(convert("gqa", source, out, "--groups", 4, "--cache-dtype", "int4", "--no-refit", "--heal", 0, *on))
    torch.testing.assert_close(logits(out), logits(source), rtol=1e-4, atol=1e-4)
    before, after = (weights(path)["model.layers.0.self_attn.v_proj.weight"] for path in (source, out))
    assert not torch.equal(before, after)
    assert read(out / "conversion.json")["recipe"]["gqa"]["cache_dtype"] == "int4"


def test_fits_go_through_the_rounding_of_the_cache(shelf: Make, convert: Convert, on: list[Any], tmp_path: Path) -> None:
    """Over a latent of two bits, what was fitted through its rounding loses less than what was not."""
    size, losses = ["--kv-lora-rank", 24, "--qk-rope-head-dim", 8], []
    for name, form in (("plain", []), ("fitted", ["--cache-dtype", "int2"])):
        ok(convert("mla", shelf(), tmp_path / name, *size, *form, *on, "--heal", 0))
        report = evaluate([shelf(), tmp_path / name], text=str(on[1]), context=32, cache_dtype=["int2"])
        losses.append(report["models"][-1]["kl_to_source"])
    assert losses[1] < losses[0]
