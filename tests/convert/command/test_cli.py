"""The command line: what each command prints, what each mistake costs, and that help comes at once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from latents import SMALL
from written import Convert, Make, edit, left_nothing, ok, refused

from convert.command import removed
from convert.command.cli import main
from convert.methods import GROUPED, LATENT

TEXT = "Once there was a cat. It sat on the mat, and the mat was flat.\n" * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


# ---- what commands print ---------------------------------------------------------------------------------------------


def test_gqa_prints_what_it_did_on_stdout_alone(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    result = convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2)
    assert result.stdout.splitlines() == [
        "GQA-4 → GQA-2, method aligned (heads aligned with each other)",
        "KV cache: 768 → 384 bytes per token (50.0%, kept in float32)",
        "no calibration text: aligned uses weights and norm gains alone, which ruins most models",
        f"written to {tmp_path / 'out'}, loads in transformers as llama",
    ]
    assert result.stderr == "convert: 367,872 bytes\n"
    assert convert("gqa", tmp_path / "source", tmp_path / "out", "--groups", 2, "--overwrite", "-q").stderr == ""


def test_what_libraries_print_is_not_on_stdout(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging

    monkeypatch.setattr(logging, "set_verbosity_error", lambda: print("noise"))
    result = convert("mqa", checkpoint(), tmp_path / "out", "--json")
    assert json.loads(result.stdout)["kv_heads_after"] == 1
    assert "noise\n" in result.stderr


@pytest.mark.parametrize(("policy", "spins"), [(None, "1000"), ("ACTIVE", None)])
def test_threads_wait_briefly_unless_the_user_says_how(
    policy: str | None, spins: str | None, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GOMP_SPINCOUNT", None), ("OMP_WAIT_POLICY", policy)):
        monkeypatch.setenv(name, value or "")  # so that what the command sets is undone
        if value is None:
            monkeypatch.delenv(name)
    convert("families")
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.slow
def test_results_reach_a_stdout_that_takes_ascii_alone(checkpoint: Make, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "convert.command.cli", "mqa", str(checkpoint()), str(tmp_path / "out"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert "GQA-4 → MQA" in done.stdout.decode("utf-8"), done.stderr


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "koi8-r"])
def test_what_the_encoding_of_stdout_lacks_is_replaced(encoding: str, checkpoint: Make, tmp_path: Path) -> None:
    runner = CliRunner(charset=encoding)
    result = runner.invoke(main, ["mqa", str(checkpoint()), str(tmp_path / "out"), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "GQA-4 ? MQA" in result.stdout_bytes.decode(encoding)


def test_a_stdout_that_is_full_is_said_apart_from_the_work(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main(["mqa", str(checkpoint()), str(tmp_path / "out"), "--no-text", "--heal", "0"], standalone_mode=True)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()  # what it could not write is still in it
    assert ended.value.code == 1
    assert "error: stdout cannot be written: No space left on device" in capsys.readouterr().err
    assert (tmp_path / "out" / "conversion.json").exists()


def test_a_dry_run_writes_nothing_and_reads_no_weights(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    (source / "model.safetensors").write_bytes(b"garbage")
    result = convert("gqa", source, tmp_path / "out", "--groups", 2, "--dry-run", "--json")
    plan = json.loads(result.stdout)
    assert (plan["kv_heads_before"], plan["kv_heads_after"], plan["kv_bytes_per_token_after"]) == (4, 2, 384)
    assert not (tmp_path / "out").exists()


def test_eval_writes_the_report_and_holds_the_gate(checkpoint: Make, convert: Convert, text: Path, tmp_path: Path) -> None:
    source = checkpoint()
    convert("mqa", source, tmp_path / "one")
    result = convert("eval", source, tmp_path / "one", "--text", text, "--json", "--output", tmp_path / "report", "-q")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert [entry["kind"] for entry in report["models"]] == ["GQA-4", "MQA"]
    assert report["models"][1]["cache_ratio"] == 0.25
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == report
    ratio = report["models"][1]["perplexity"] / report["models"][0]["perplexity"]
    for limit, code in ((ratio * 1.01, 0), (ratio * 0.99, 3)):
        gated = convert("eval", source, tmp_path / "one", "--text", text, "--max-perplexity-ratio", limit, "-q")
        assert gated.exit_code == code, gated.stderr
    assert "the limit is" in gated.stderr


def test_bench_measures_and_writes(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, out = checkpoint(), tmp_path / "speed"
    convert("mqa", source, tmp_path / "one")
    sizes = ("--batch", "1,2", "--context", 8, "--context", "16,8", "--rounds", 2, "--steps", 2, "--device", "cpu")
    result = convert("bench", source, tmp_path / "one", *sizes, "--json", "--output", out, "-q")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert [(entry["kind"], entry["dtype"]) for entry in report["models"]] == [("GQA-4", "float32"), ("MQA", "float32")]
    assert [(row["batch"], row["context"]) for row in report["models"][1]["cases"]] == [(1, 8), (1, 16), (2, 8), (2, 16)]
    assert json.loads((out / "bench.json").read_text()) == report
    refused(convert("bench", source, *sizes, "--output", out), 2, "bench.json exists")
    again = convert("bench", source, "--context", 8, "--rounds", 1, "--steps", 1, "--output", out, "--overwrite")
    assert again.stdout.startswith("| batch | context | model ")
    assert f"report: {out / 'bench.json'}" in again.stderr


def test_an_interrupted_bench_writes_nothing(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eval.speed import bench

    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "spread", interrupt)  # the last round is done
    result = convert("bench", checkpoint(), "--context", 8, "--rounds", 1, "--output", tmp_path / "speed")
    refused(result, 130, "interrupted")
    assert not (tmp_path / "speed").exists()


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", removed.OPTIONS)
def test_a_removed_option_is_named_with_what_to_do_instead(option: str, convert: Convert) -> None:
    result = convert("eval", "model", option)
    assert result.exit_code == 2
    assert f"{option} was removed: {removed.OPTIONS[option]}" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model type 'bert' cannot be read"),
        ({"model_type": "t5"}, "is an encoder–decoder (model type 't5')"),
        ({"model_type": "baichuan", "auto_map": {"AutoConfig": "evil.Config"}}, "normalises its head"),
        ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, "its class is code of its own"),
        ({"num_key_value_heads": 3}, "8 query heads cannot share 3 KV heads"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be an integer from 1 to 1,048,576"),
        ({"hidden_size": 60}, "transformers does not accept the config"),
    ],
)
def test_configs_that_cannot_be_converted(
    changes: dict[str, Any], message: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = edit(checkpoint(), **changes)
    refused(convert("gqa", source, tmp_path / "out", "--groups", 1), 2, message)
    refused(convert("plan", source), 2, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("budget", "values"),
    # The source caches 3 layers × 64 values × 4 bytes = 768 bytes per token.
    [("12.5%", 8), ("50%", 32), ("100%", 64), ("384", 32), ("0.3KB", 25), ("384B", 32), (" 50 % ", 32)],
)
def test_a_budget_is_kept(budget: str, values: int, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    plan = json.loads(ok(convert("mla", checkpoint(), tmp_path / "o", "--kv-budget", budget, "--dry-run", "--json")).stdout)
    assert plan["kv_lora_rank"] + plan["qk_rope_head_dim"] in (values, values - 1)
    assert plan["kv_bytes_per_token_after"] <= values * 12


def test_a_budget_is_counted_in_the_dtype_that_is_written(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    command = ["mla", checkpoint(), tmp_path / "o", "--dry-run", "--json", "--dtype", "bfloat16", "--kv-budget"]
    for budget in ("25%", "192"):
        plan = json.loads(ok(convert(*command, budget)).stdout)
        assert plan["kv_bytes_per_token_after"] == 192
        assert plan["kv_lora_rank"] + plan["qk_rope_head_dim"] == 32


ARGUMENTS: dict[str, tuple[list[Any], str]] = {
    "rank too large": (["--kv-lora-rank", 35, "--qk-rope-head-dim", 32], "rank 35 exceeds full size"),
    "rank 1": (["--kv-lora-rank", 1, "--qk-rope-head-dim", 8], "a latent of rank 1 holds nothing: deepseek_v3 needs 1 channel"),
    "rank 0": (["--kv-lora-rank", 0, "--qk-rope-head-dim", 8], "a latent of rank 0 holds nothing"),
    "rank -5": (["--kv-lora-rank", -5, "--qk-rope-head-dim", 8], "a latent of rank -5 holds nothing"),
    "rope odd": (["--kv-lora-rank", 16, "--qk-rope-head-dim", 7], "cannot keep 7 rotary dims"),
    "rope 0": (["--kv-lora-rank", 16, "--qk-rope-head-dim", 0], "cannot keep 0 rotary dims"),
    "rope too large": (["--kv-lora-rank", 16, "--qk-rope-head-dim", 34], "it must be even and between 2 and 32"),
    "half a size": (["--kv-lora-rank", 16], "give --kv-lora-rank and --qk-rope-head-dim, or --kv-budget"),
    "other half of a size": (["--qk-rope-head-dim", 8], "give --kv-lora-rank and --qk-rope-head-dim, or --kv-budget"),
    "padding and budget": (["--kv-budget", "50%", "--pad-rank"], "give either --kv-budget or --pad-rank"),
    "size and budget": ([*SMALL, "--kv-budget", "50%"], "give either --kv-budget or"),
    "half a size and budget": (["--kv-lora-rank", 8, "--kv-budget", "50%"], "give either --kv-budget or"),
    "budget too small": (["--kv-budget", "3%"], "a budget of 23 bytes per token is too small for any rank"),
    "budget of nothing": (["--kv-budget", "0%"], "invalid budget '0%'"),
    "budget of 0 bytes": (["--kv-budget", "0"], "a budget of 0 bytes per token is too small"),
    "budget above all": (["--kv-budget", "150%"], "invalid budget '150%'"),
    "budget nonsense": (["--kv-budget", "a little"], "invalid budget 'a little'"),
    "budget negative": (["--kv-budget", "-4096"], "invalid budget '-4096'"),
    "freqfold with weighted": ([*SMALL, "--freqfold", 2], "method weighted does not fold frequencies"),
    "freqfold with svd": ([*SMALL, "--method", "svd", "--freqfold", 2], "method svd does not fold frequencies"),
    "text with svd": (
        [*SMALL, "--method", "svd", "--text", "TEXT"], "method svd looks at weights only and has no use for --text"
    ),
    "refit without text": ([*SMALL, "--refit"], "--refit is about calibration text, and there is none"),
    "refine without text": (
        [*SMALL, "--refine", 3, "--calibration-tokens", 9], "--calibration-tokens and --refine are about calibration text"
    ),
    "refine nothing": ([*SMALL, "--text", "TEXT", "--refine", 0], "0 is not in the range x>=1"),
    "pca without text": ([*SMALL, "--method", "pca"], "method pca needs text to calibrate on"),
    "freqfold 3": ([*SMALL, "--method", "pca", "--text", "TEXT", "--freqfold", 3], "cannot fold 4 frequencies by 3"),
    "freqfold 0": ([*SMALL, "--method", "pca", "--text", "TEXT", "--freqfold", 0], "cannot fold 4 frequencies by 0"),
    "freqfold too small": (
        ["--kv-lora-rank", 16, "--qk-rope-head-dim", 2, "--method", "pca", "--text", "TEXT", "--freqfold", 2],
        "(choose 4)",
    ),
    "text and none": ([*SMALL, "--text", "TEXT", "--no-text"], "give either a text to calibrate on or --no-text"),
    "too many shares": ([*SMALL, "--text", "TEXT", "--text-shares", "1,2"], "2 --text-shares for 1 --text"),
    "shares that are none": ([*SMALL, "--text", "TEXT", "--text-shares", "0"], "'0' is not a list of shares"),
    "shares beyond numbers": (
        [*SMALL, "--text", "TEXT", "--text", "self", "--text-shares", "1e308,1e308"],
        "give a number above 0 and at most 1e+12 for each text",
    ),
    "a share that is none": ([*SMALL, "--text", "TEXT", "--text", "self", "--text-shares", "nan,1"], "is not a list of shares"),
    "a text twice": ([*SMALL, "--text", "TEXT", "--text", "TEXT"], "the same --text is given twice"),
    "context too long": (
        [*SMALL, "--method", "pca", "--text", "TEXT", "--calibration-context", 129],
        "a calibration context of 129 tokens exceeds the 128 positions of the model",
    ),
    "less than one block": (
        [*SMALL, "--method", "pca", "--text", "TEXT", "--calibration-tokens", 127],
        "127 calibration tokens are less than one block of 128",
    ),
    "missing text": ([*SMALL, "--method", "pca", "--text", "missing.txt"], "does not exist"),
    "unknown method": ([*SMALL, "--method", "magic"], "'magic' is not one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused_without_weights(
    case: str, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    source, (arguments, message) = checkpoint(num_hidden_layers=1, tie_word_embeddings=True), ARGUMENTS[case]
    if "budget" in case:
        source = three_layers(source)
    (source / "model.safetensors").unlink()
    arguments = [text if argument == "TEXT" else argument for argument in arguments]
    left_nothing(convert("mla", source, tmp_path / "out", *arguments), 2, message, tmp_path / "out")


def three_layers(source: Path) -> Path:
    raw = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 3}
    (source / "config.json").write_text(json.dumps(raw))
    return source


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms": ("hunyuan_v1_dense", {}, "queries and keys are normalised after RoPE"),
    "factors": ("phimoe", {}, "its class scales RoPE by a factor that depends on the length"),
    "both directions": ("gemma", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention to True"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_sources_that_no_output_class_carries_are_refused(
    case: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    model_type, changes, message = CONFIGS[case]
    source = checkpoint(model_type, num_hidden_layers=1, **{k: v for k, v in changes.items() if k != "dtype"})
    if "dtype" in changes:
        raw = json.loads((source / "config.json").read_text()) | changes
        (source / "config.json").write_text(json.dumps(raw))
    result = convert("mla", source, tmp_path / "out", *SMALL)
    left_nothing(result, 2, message, tmp_path / "out")
    assert "no output class carries MLA of" in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    # Whether any latent fits comes before its size.
    left_nothing(convert("mla", source, tmp_path / "out", "--kv-lora-rank", 9999, "--qk-rope-head-dim", 3), 2, message,
            tmp_path / "out")  # fmt: skip


def test_paths_that_cannot_be_used(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    refused(convert("gqa", "./nowhere", tmp_path / "out", "--groups", 1), 2, "no model directory './nowhere'")
    refused(convert("gqa", source, source, "--groups", 1), 2, "lie inside each other")
    refused(convert("gqa", source, source / "inside", "--groups", 1), 2, "lie inside each other")
    (tmp_path / "file").write_text("")
    refused(convert("gqa", source, tmp_path / "file", "--groups", 1), 2, "is a file")
    refused(convert("gqa", source, tmp_path / "file" / "out", "--groups", 1), 2, "lies in a file")
    refused(convert("gqa", "some/where", tmp_path / "out", "--groups", 1), 1, "cannot get 'some/where' from the Hub")


@pytest.mark.parametrize(
    "command", [["gqa", "M", ""], ["heal", "M", ""], ["sweep", "M", "", "--evaluate", "T"], ["demo", "--output", ""],
                ["eval", "M", "--text", "T", "--output", ""], ["bench", "M", "--output", ""]],
    ids=lambda command: command[0],
)  # fmt: skip
def test_an_output_without_a_name_is_refused(command: list[str], convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "T").write_text("a text")
    given = {"M": tmp_path, "T": tmp_path / "T"}
    refused(convert(*(given.get(word, word) for word in command)), 2, "it is empty: name a directory")


def test_devices_and_sizes_that_do_not_exist(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, out = checkpoint(), tmp_path / "out"
    refused(convert("gqa", source, out, "--groups", 1, "--device", "quantum"), 2, "no device 'quantum'")
    refused(convert("gqa", source, out, "--groups", 1, "--device", "cuda:99"), 1, "this machine has no device 'cuda:99'")
    refused(convert("gqa", source, out, "--groups", 1, "--max-shard-size", "5 parsecs"), 2, "invalid size")
    refused(convert("plan", source, "--gpu", "large"), 2, "is not a GPU")
    refused(convert("plan", source, "--gpu", "large=inf"), 2, "is not a GPU")
    refused(convert("plan", source, "--gpu", "a100"), 2, "A100 comes with 40 or 80 GB: say which, as in A100=40")
    refused(convert("gqa", source, out, "--groups", 1, "--device", "cpu:3"), 2, "device 'cpu:3' is not supported")


def test_gpus_have_names_and_contexts_units(checkpoint: Make, convert: Convert) -> None:
    given = "plan", checkpoint(), "--gpu", "h100", "--gpu", "rtx-4090", "--gpu", "A100=80", "--json"
    facts = json.loads(ok(convert(*given, "--context", "0.1k")).stdout)
    assert facts["gpu_gigabytes"] == {"H100": 80, "RTX 4090": 24, "A100": 80}
    assert facts["context"] == 100
    options = ["--text", "self", "--calibration-context", "0.1k", "--max-context", "0.12k", "--calibration-tokens", "1k"]
    plan = ["mla", given[1], "out", *SMALL, *options, "--dry-run", "--json"]
    used = json.loads(ok(convert(*plan)).stdout)["calibration"]
    assert used.items() >= {"calibration_context": 100, "max_context": 120, "calibration_tokens": 1000}.items()
    refused(convert("plan", given[1], "--context", "1X"), 2, "invalid number of tokens '1X'")
    refused(convert("bench", given[1], "--context", "64,1M"), 2, "a context of 1000000 tokens exceeds the 128 positions")


def test_texts_that_cannot_be_evaluated(checkpoint: Make, convert: Convert, text: Path, tmp_path: Path) -> None:
    source = checkpoint()
    (tmp_path / "empty.txt").write_text(" \n")
    refused(convert("eval", source, "--text", tmp_path / "empty.txt"), 1, "empty.txt is empty")
    refused(convert("eval", source, "--text", tmp_path / "missing.txt"), 2, "does not exist")
    refused(convert("eval", source), 2, "give either a text or a dataset to evaluate on\nhint: --text FILE or --dataset NAME")
    refused(convert("eval", source, "--text", text, "--context", 4096), 2, "a context of 4096 tokens exceeds the 128 positions")


def test_sizes_that_cannot_be_measured(checkpoint: Make, convert: Convert) -> None:
    source = checkpoint()
    (source / "model.safetensors").write_bytes(b"garbage")
    refused(convert("bench"), 2, "Missing argument 'MODEL...'")
    refused(convert("bench", "./nowhere"), 2, "no model directory './nowhere'")
    refused(convert("bench", source, "--batch", "1,0"), 2, "0 is not in the range x>=1")
    refused(convert("bench", source, "--context", "1"), 2, "context is 1; it must be at least 2")
    refused(convert("bench", source, "--context", "8,4096"), 2, "a context of 4096 tokens exceeds the 128 positions")
    refused(convert("bench", source, "--dtype", "int8"), 2, "'int8' is not one of 'auto', 'float32', 'bfloat16', 'float16'")
    refused(convert("bench", source, "--device", "cuda:99"), 1, "this machine has no device 'cuda:99'")
    refused(convert("bench", source, "--context", 8), 1, "cannot load")


def test_an_empty_text_is_seen_before_a_conversion(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused(convert("gqa", checkpoint(), tmp_path / "out", "--groups", 1, "--evaluate", tmp_path / "empty.txt"), 1, "is empty")
    assert not (tmp_path / "out").exists()


HOSTILE = "x\x1b[31m\u202e\nb"


def test_names_never_steer_the_terminal(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, out, text = checkpoint(name=HOSTILE), tmp_path / f"out{HOSTILE}", tmp_path / f"text{HOSTILE}"
    text.write_text(TEXT)
    for arguments in [
        ("inspect", source),
        ("plan", source, "--gpu", f"{HOSTILE}=3"),
        ("plan", source, "--gpu", HOSTILE),
        ("gqa", source, out, "--groups", 2, "--dry-run"),
        ("gqa", source, out, "--groups", 2, "--text", text, "--evaluate", text, "--calibration-tokens", 256),
        ("gqa", source, out, "--groups", 2),
        ("gqa", source, tmp_path / "new", "--groups", 2, "--text", f"{text}.none"),
        ("gqa", source, tmp_path / "new", "--groups", HOSTILE),
        ("eval", source, out, "--text", text, "--max-tokens", 256, "--output", tmp_path / f"report{HOSTILE}"),
        ("run", out, tmp_path / f"again{HOSTILE}"),
        ("run", out, tmp_path / "new", f"--{HOSTILE}=1"),
        ("inspect", tmp_path / f"none{HOSTILE}"),
        (HOSTILE,),
        (f"--{HOSTILE}",),
    ]:
        result = convert(*arguments, color=True)
        assert "Traceback" not in result.output
        steering = [line for line in result.output.split("\n") if not line.isprintable()]
        assert steering == [], arguments


def test_layers_with_settings_of_their_own_are_refused(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = edit(checkpoint(), per_layer_config={"0": {"intermediate_size": 16}})
    refused(convert("inspect", source), 2, "has layers with settings of their own (per_layer_config)")
    refused(convert("mqa", source, tmp_path / "out"), 2, "has layers with settings of their own (per_layer_config)")


# ---- help ----------------------------------------------------------------------------------------------------------


NO_MODEL = [["--help"], ["gqa", "--help"], ["eval", "--help"], ["--version"], ["families"], ["families", "--json"]]


@pytest.mark.parametrize("arguments", NO_MODEL, ids=" ".join)
def test_what_reads_no_model_imports_no_torch(arguments: list[str]) -> None:
    script = (
        f"import sys; from convert.command.cli import main; main({arguments}, standalone_mode=False); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_command_that_was_removed_says_what_to_do(convert: Convert) -> None:
    refused(convert("cache", "clear"), 2, "cache was removed: nothing is kept between runs")


@pytest.mark.parametrize("name", main.commands)
def test_every_command_has_help_with_an_example(name: str, convert: Convert) -> None:
    shown = convert(name, "--help")
    assert shown.exit_code == 0
    assert f"Example: convert {name}" in shown.stdout


@pytest.mark.parametrize("name", main.commands)
def test_every_option_is_explained_and_documented(name: str) -> None:
    root = Path(__file__).parents[3]
    documented = "\n".join(path.read_text() for path in [root / "README.md", *(root / "docs").glob("*.md")])
    assert f"convert {name}" in documented
    section, shared = (
        documented.split(f"## {heading}\n")[1].split("\n## ")[0]
        for heading in (f"convert {name}", "Options of all conversions")
    )
    section += shared if "#options-of-all-conversions" in section else ""
    for parameter in main.commands[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            assert max(parameter.opts, key=len) in section, f"{parameter.opts} of {name} is not in docs/cli.md"


def test_method_choices_are_the_registry() -> None:
    for name, known in (("gqa", GROUPED), ("mqa", GROUPED), ("mla", LATENT)):
        (method,) = (p for p in main.commands[name].params if p.name == "method")
        assert tuple(method.type.choices) == known  # type: ignore[attr-defined]
