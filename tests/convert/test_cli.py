"""The command line: what each command prints, what each mistake costs, and that help comes at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from safetensors import safe_open

from convert.cli import main
from convert.methods import GROUPED, LATENT

Make = Callable[..., Path]
Convert = Callable[..., Any]

TEXT = "Once there was a cat. It sat on the mat, and the mat was flat.\n" * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def edit(path: Path, **changes: Any) -> Path:
    raw = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(raw))
    return path


# ---- what commands print -------------------------------------------------------------------------------------------


def test_gqa_prints_what_it_did_on_stdout_alone(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    result = convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2)
    assert result.stdout.splitlines() == [
        "GQA-4 → GQA-2, method aligned (heads aligned with each other)",
        "KV cache: 768 → 384 bytes per token (50.0%, kept in float32)",
        "no calibration text: aligned uses weights and norm gains alone, and loses more than with --text",
        f"written to {tmp_path / 'out'}, loads in transformers as llama",
    ]
    assert result.stderr == "convert: 247,552 bytes\n"
    assert convert("gqa", tmp_path / "source", tmp_path / "out", "--groups", 2, "--overwrite", "-q").stderr == ""


def test_a_dry_run_writes_nothing_and_reads_no_weights(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    (source / "model.safetensors").write_bytes(b"garbage")
    result = convert("gqa", source, tmp_path / "out", "--groups", 2, "--dry-run", "--json")
    plan = json.loads(result.stdout)
    assert (plan["kv_heads_before"], plan["kv_heads_after"], plan["kv_bytes_per_token_after"]) == (4, 2, 384)
    assert not (tmp_path / "out").exists()


def test_a_merge_that_cannot_be_exact_says_so(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    result = convert("gqa", checkpoint("cohere", use_qk_norm=True), tmp_path / "out", "--groups", 2, "--dry-run")
    assert "inexact: keys are normalised with gains per head" in result.stdout


def test_inspect_reads_only_the_config(checkpoint: Make, convert: Convert) -> None:
    source = checkpoint("qwen3")
    (source / "model.safetensors").unlink()
    facts = json.loads(convert("inspect", source, "--json").stdout)
    assert facts["attention"] == "GQA-4"
    assert facts["qk_norm"] == "rms, shared gains"
    assert facts["groups_possible"] == [4, 2, 1]
    assert facts["output_classes"]["gqa"] == "its own class, loads in transformers"
    assert "| qk norm" in convert("inspect", source).stdout


def test_plan_reads_only_the_config_and_sizes_every_target(checkpoint: Make, convert: Convert) -> None:
    source = checkpoint(num_key_value_heads=8)
    (source / "model.safetensors").unlink()
    facts = json.loads(convert("plan", source, "--json", "--batch", 3, "--context", 10, "--gpu", "tiny one=0.001").stdout)
    grouped = facts["targets"][:4]
    assert [row["kind"] for row in grouped] == ["MHA", "GQA-4", "GQA-2", "MQA"]
    assert [row["kv_bytes"] for row in grouped] == [3 * 2 * g * 8 * 4 * 3 * 10 for g in (8, 4, 2, 1)]
    mha = facts["targets"][0]
    room = 0.9 * 0.001 * 1e9 - mha["weight_bytes"]
    assert mha["longest_context"] == {"tiny one": int(room // (3 * mha["kv_bytes_per_token"]))}
    shown = convert("plan", source, "--dtype", "bfloat16").stdout
    assert "RTX 4090 24 GB" in shown
    assert "| MHA (source) |" in shown


def test_plan_and_inspect_size_latents_as_they_are_written(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(num_key_value_heads=8)
    rows = json.loads(convert("plan", source, "--json", "--dtype", "float32").stdout)["targets"][4:]
    # 128 values per layer: 50 %, 25 % and 12.5 % of them, a quarter of each but at most one head's 8 dims rope.
    assert [row["kind"] for row in rows] == ["MLA-56+8", "MLA-24+8", "MLA-12+4"]
    assert [row["kv_bytes_per_token"] for row in rows] == [3 * values * 4 for values in (64, 32, 16)]
    shown = convert("inspect", source).stdout
    assert "MLA-56+8, MLA-24+8, MLA-12+4, and others" in shown
    assert "mla: deepseek_v3, loads in transformers" in shown
    for share, row in zip(("50%", "25%", "12.5%"), rows, strict=True):
        out = tmp_path / row["kind"]
        assert convert("mla", source, out, "--kv-budget", share).exit_code == 0
        with safe_open(out / "model.safetensors", "pt") as file:
            written = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
        assert row["parameters"] == written


def test_what_cannot_become_mla_is_told_why(checkpoint: Make, convert: Convert) -> None:
    source = checkpoint("qwen2")
    facts = json.loads(convert("plan", source, "--json").stdout)
    assert not any(row["kind"].startswith("MLA") for row in facts["targets"])
    assert facts["mla"].startswith("none: no output class carries MLA of")
    assert "\n\nMLA: none: " in convert("plan", source).stdout
    assert "mla: none (no output class carries MLA of" in convert("inspect", source).stdout


def test_a_float16_source_is_told_what_it_can_become_in_bfloat16(checkpoint: Make, convert: Convert) -> None:
    source = edit(checkpoint(), dtype="float16")
    assert "mla: deepseek_v3, loads in transformers (only with --dtype bfloat16)" in convert("inspect", source).stdout
    facts = json.loads(convert("plan", source, "--json").stdout)
    assert facts["mla"] == "only with --dtype bfloat16"
    assert any(row["kind"].startswith("MLA") for row in facts["targets"])


def test_the_matrix_names_the_output_class_of_each_target(convert: Convert) -> None:
    rows = {row["family"]: row for row in json.loads(convert("families", "--json").stdout)}
    assert (rows["llama"]["gqa"], rows["llama"]["mla"]) == ("its own class", "deepseek_v3")
    assert rows["gemma2"]["mla"] == "-"


def test_families_lists_every_family(convert: Convert) -> None:
    rows = json.loads(convert("families", "--json").stdout)
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "phi", "stablelm", "starcoder2", "granite", "smollm3"} <= {
        row["family"] for row in rows
    }
    assert len(convert("families").stdout.splitlines()) == len(rows) + 2


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
    assert again.stdout == (out / "bench.md").read_text() + "\n"
    assert f"report: {out / 'bench.md'}" in again.stderr


def test_an_interrupted_bench_writes_nothing(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eval import speed as bench

    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "spread", interrupt)  # the last round is done
    result = convert("bench", checkpoint(), "--context", 8, "--rounds", 1, "--output", tmp_path / "speed")
    refused(result, 130, "interrupted")
    assert not (tmp_path / "speed").exists()


# ---- recipes -------------------------------------------------------------------------------------------------------


def test_a_recipe_runs_its_steps(checkpoint: Make, convert: Convert, text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    out = tmp_path / "out"
    recipe.write_text(
        f"- gqa: {{model: {checkpoint()}, output: {out}, groups: 4, overwrite: false}}\n"
        f"- eval: {{models: [{tmp_path / 'source'}, {out}], text: {text}, max-tokens: 200, quiet: true}}\n"
    )
    result = convert("run", recipe, "--set", "groups=2")
    assert result.exit_code == 0, result.output
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 2
    assert "| model" in result.stdout


def test_a_conversion_is_repeated_from_its_record(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    convert("gqa", checkpoint(), tmp_path / "a", "--groups", 2, "--method", "random", "--seed", 7, "--max-shard-size", "30KB")
    result = convert("run", tmp_path / "a" / "conversion.json", "--set", f"output={tmp_path / 'b'}")
    assert result.exit_code == 0, result.output
    for file in (tmp_path / "a").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_command_without_options_is_a_recipe(convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("families:\n")
    assert "| llama" in convert("run", tmp_path / "recipe.yaml").stdout


def test_a_recipe_stops_at_the_first_step_that_fails(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    steps = [{"gqa": {"model": str(source), "output": str(tmp_path / str(g)), "groups": g}} for g in (2, 3, 1)]
    (tmp_path / "recipe.yaml").write_text(json.dumps(steps))
    result = convert("run", tmp_path / "recipe.yaml")
    assert result.exit_code == 2
    assert "cannot make 3 groups" in result.stderr
    assert [(tmp_path / str(g)).exists() for g in (2, 3, 1)] == [True, False, False]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("gqa: [1, 2]", "is no recipe"),
        ("a: {b: c", "is no YAML"),
        (
            "shrink: {model: x}",
            "a recipe cannot run 'shrink' (choose bench, demo, eval, families, gqa, inspect, mla, mqa, plan, sweep)",
        ),
        ("run: {recipe: x}", "a recipe cannot run 'run'"),
        ("gqa: {model: x, heads: 3}", "convert gqa has no option 'heads'"),
        ("gqa: {model: x, output: y, groups: [4, 2]}", "step 1 (gqa) of the recipe: groups takes one value, not a list"),
        ("[]", "is no recipe"),
    ],
)
def test_a_bad_recipe_is_refused(recipe: str, message: str, convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe)
    result = convert("run", tmp_path / "recipe.yaml")
    assert result.exit_code == 2
    assert message in result.stderr


# ---- mistakes ------------------------------------------------------------------------------------------------------


def refused(result: Any, code: int, message: str) -> None:
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (3, "cannot make 3 groups from 8 KV heads: 3 does not divide 8 (choose 1, 2, 4 or 8)"),
        (16, "cannot make 16 groups from 8 KV heads: it must be between 1 and 8 (choose 1, 2, 4 or 8)"),
        (0, "cannot make 0 groups"),
    ],
)
def test_groups_that_do_not_fit(groups: int, message: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    refused(convert("gqa", checkpoint(num_key_value_heads=8), tmp_path / "out", "--groups", groups), 2, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model type 'bert' is not supported"),
        ({"model_type": "t5"}, "model type 't5' is not supported"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "its queries have a latent of their own (q_lora_rank 1536)"),
        ({"auto_map": {"AutoConfig": "evil.Config"}}, "wants to run code of its own"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantised (gptq)"),
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


def test_paths_that_cannot_be_used(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    refused(convert("gqa", "./nowhere", tmp_path / "out", "--groups", 1), 2, "no model directory './nowhere'")
    refused(convert("gqa", source, source, "--groups", 1), 2, "lie inside each other")
    refused(convert("gqa", source, source / "inside", "--groups", 1), 2, "lie inside each other")
    (tmp_path / "file").write_text("")
    refused(convert("gqa", source, tmp_path / "file", "--groups", 1), 2, "is a file")
    refused(convert("gqa", source, tmp_path / "file" / "out", "--groups", 1), 2, "is a file, or lies in one")
    refused(convert("gqa", "some/where", tmp_path / "out", "--groups", 1), 1, "cannot get 'some/where' from the Hub")


def test_devices_and_sizes_that_do_not_exist(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, out = checkpoint(), tmp_path / "out"
    refused(convert("gqa", source, out, "--groups", 1, "--device", "quantum"), 2, "no device 'quantum'")
    refused(convert("gqa", source, out, "--groups", 1, "--device", "cuda:99"), 1, "this machine has no device 'cuda:99'")
    refused(convert("gqa", source, out, "--groups", 1, "--max-shard-size", "5 parsecs"), 2, "is no size")
    refused(convert("plan", source, "--gpu", "large"), 2, "is not a GPU")
    refused(convert("plan", source, "--gpu", "large=inf"), 2, "is not a GPU")
    refused(convert("gqa", source, out, "--groups", 1, "--device", "cpu:3"), 2, "device 'cpu:3' is not supported")


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
    refused(convert("bench", source, "--context", "1"), 2, "1 is not in the range x>=2")
    refused(convert("bench", source, "--context", "8,4096"), 2, "a context of 4096 tokens exceeds the 128 positions")
    refused(convert("bench", source, "--dtype", "int8"), 2, "'int8' is not one of 'auto', 'float32', 'bfloat16', 'float16'")
    refused(convert("bench", source, "--device", "cuda:99"), 1, "this machine has no device 'cuda:99'")
    refused(convert("bench", source, "--context", 8), 1, "cannot load")


def test_an_empty_text_is_seen_before_a_conversion(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused(convert("gqa", checkpoint(), tmp_path / "out", "--groups", 1, "--evaluate", tmp_path / "empty.txt"), 1, "is empty")
    assert not (tmp_path / "out").exists()


# ---- help ----------------------------------------------------------------------------------------------------------


NO_MODEL = [["--help"], ["gqa", "--help"], ["eval", "--help"], ["--version"], ["families"], ["families", "--json"]]


@pytest.mark.parametrize("arguments", NO_MODEL, ids=" ".join)
def test_what_reads_no_model_imports_no_torch(arguments: list[str]) -> None:
    script = (
        f"import sys; from convert.cli import main; main({arguments}, standalone_mode=False); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", main.commands)
def test_every_command_has_help_with_an_example(name: str, convert: Convert) -> None:
    shown = convert(name, "--help")
    assert shown.exit_code == 0
    assert f"Example: convert {name}" in shown.stdout


@pytest.mark.parametrize("name", main.commands)
def test_every_option_is_explained_and_documented(name: str) -> None:
    root = Path(__file__).parents[2]
    documented = "\n".join(path.read_text() for path in [root / "README.md", *(root / "docs").glob("*.md")])
    assert f"convert {name}" in documented
    for parameter in main.commands[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            section = documented.split(f"## convert {name}\n")[1].split("\n## ")[0]
            assert max(parameter.opts, key=len) in section, f"{parameter.opts} of {name} is not in docs/cli.md"


def test_method_choices_are_the_registry() -> None:
    for name, known in (("gqa", GROUPED), ("mqa", GROUPED), ("mla", LATENT)):
        (method,) = (p for p in main.commands[name].params if p.name == "method")
        assert tuple(method.type.choices) == known  # type: ignore[attr-defined]
