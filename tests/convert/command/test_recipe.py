"""Recipes: what is not a recipe is refused in one line, all of it before the first step runs, and a value stays a value."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from attention.errors import Refusal
from convert.command.cli import main
from convert.command.recipe import command_lines, read

Lines = Callable[..., list[list[str]]]


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    """The command lines of a recipe."""

    def run(text: str | bytes, *settings: str) -> list[list[str]]:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return command_lines(read(path), settings, main)

    return run


def refusal(lines: Lines, text: str | bytes, *settings: str) -> str:
    with pytest.raises(Refusal) as caught:
        lines(text, *settings)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert len(message.splitlines()) == 1
    assert len(message) < 700
    return message


def test_what_a_recipe_lacks_can_be_set(lines: Lines) -> None:
    """A conversion.json has no output."""
    with pytest.raises(Refusal, match="output is missing") as caught:
        lines('{"kvfold": "", "recipe": {"gqa": {"model": "m", "groups": 2}}}')
    assert str(caught.value.hint).endswith("--set output=DIR")
    with pytest.raises(Refusal, match="model is missing") as caught:
        lines("gqa: {output: o}")
    assert str(caught.value.hint).endswith("--set model=MODEL")


# ---- what is a recipe ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("gqa: {model: m, output: o, groups: 2}", ["gqa", "--groups=2", "--", "m", "o"]),
        ("gqa: {groups: 2, output: o, model: m}", ["gqa", "--groups=2", "--", "m", "o"]),
        ("gqa: {model: m, output: o, groups: 2, dry-run: true}", ["gqa", "--groups=2", "--dry-run", "--", "m", "o"]),
        ("gqa: {model: m, output: o, groups: 2, dry_run: false}", ["gqa", "--groups=2", "--", "m", "o"]),
        ("gqa: {model: m, output: o, groups: 2, refit: false}", ["gqa", "--groups=2", "--no-refit", "--", "m", "o"]),
        ("gqa: {model: m, output: o, groups: 2, refit: 'no'}", ["gqa", "--groups=2", "--no-refit", "--", "m", "o"]),
        ("gqa: {model: m, output: o, groups: 2, dtype: null}", ["gqa", "--groups=2", "--", "m", "o"]),
        (
            "bench: {models: [a, b], batch: [1, 2], context: 8}",
            ["bench", "--batch=1", "--batch=2", "--context=8", "--", "a", "b"],
        ),
        ("bench: {models: a}", ["bench", "--", "a"]),
        ("plan: {model: m, gpu: [A=1, B=2]}", ["plan", "--gpu=A=1", "--gpu=B=2", "--", "m"]),
        ("families:", ["families"]),
        ("- families: {}", ["families"]),
        ("defaults: &d {groups: 2}", None),
    ],
)
def test_a_step_is_a_command_line(recipe: str, expected: list[str] | None, lines: Lines) -> None:
    if expected is None:
        assert "a recipe cannot run 'defaults'" in refusal(lines, recipe)
    else:
        assert lines(recipe) == [expected]


@pytest.mark.parametrize("value", ["--overwrite", "-x", "-m", "--", "-", "a=b", "", "a b", "--groups=3"])
def test_a_value_that_looks_like_an_option_stays_a_value(value: str, lines: Lines) -> None:
    recipe = json.dumps({"gqa": {"model": value, "output": value or "o", "groups": 2, "device": value}})
    for line in lines(recipe):
        with main.commands["gqa"].make_context("gqa", line[1:]) as context:
            given = context.params
        assert (given["model"], str(given["output"]), given["device"]) == (value, value or "o", value)
        assert given["overwrite"] is False


def test_a_setting_that_looks_like_an_option_stays_a_value(lines: Lines) -> None:
    assert lines("gqa: {model: m, groups: 2}", "output=--overwrite") == [["gqa", "--groups=2", "--", "m", "--overwrite"]]


def test_settings_reach_every_step_that_has_the_option(lines: Lines) -> None:
    steps = "[{gqa: {model: m, output: a, groups: 4}}, {gqa: {model: m, output: b, groups: 2}}, {inspect: {model: m}}]"
    assert [line[1] for line in lines(steps, "groups=1")] == ["--groups=1", "--groups=1", "--"]
    assert "--set heads: no step of this recipe has that option" in refusal(lines, steps, "heads=1")
    assert "--set heads: give KEY=VALUE" in refusal(lines, steps, "heads")


def test_strings_of_a_program_need_a_file(lines: Lines, tmp_path: Path) -> None:
    recipe = "gqa: {model: m, output: a, groups: 4, strings: '2'}"
    assert "was calibrated on 2 strings, which its record does not hold" in refusal(lines, recipe)
    (file := tmp_path / "words.txt").write_text("words")
    assert lines(recipe, f"text={file}") == [["gqa", "--groups=4", f"--text={file}", "--", "m", "a"]]


def test_shared_options_may_be_merged(lines: Lines) -> None:
    recipe = "- gqa: &all {model: m, output: a, groups: 4}\n- gqa: {<<: *all, output: b}"
    assert lines(recipe) == [["gqa", "--groups=4", "--", "m", "a"], ["gqa", "--groups=4", "--", "m", "b"]]


# ---- what only the command line may allow ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "asked"),
    [
        (
            "mqa: {model: m, output: o, trust_remote_code: true, overwrite: 'yes', resume: true, force: true}",
            "trust_remote_code=true, overwrite=true, resume=true, force=true",
        ),
        ("mqa: {model: m, output: o, trust-remote-code: true}", "trust_remote_code=true"),
        ("eval: {models: m, text: t, task_path: 'mine dir'}", "task_path=mine dir"),
        ("heal: {converted: c, output: o, track: wandb}", "track=wandb"),
    ],
)
def test_what_could_do_harm_needs_consent(
    step: str, asked: str, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").write_text("text")
    (tmp_path / "mine dir").mkdir()
    with pytest.raises(Refusal, match=f"the recipe asks for {asked}: only the command line may allow that") as caught:
        lines(step)
    given = shlex.split(str(caught.value.hint).partition("add ")[2])[1::2]
    assert given == asked.split(", ")
    (line,) = lines(step, *given)
    assert all(f"--{one.partition('=')[0].replace('_', '-')}" in " ".join(line) for one in given)


def test_a_recipe_may_say_no_itself(lines: Lines) -> None:
    (line,) = lines("mqa: {model: m, output: o, trust_remote_code: false, overwrite: null, force: 'no'}")
    assert line == ["mqa", "--", "m", "o"]


@pytest.mark.parametrize("place", ["/elsewhere/out", "../out", "link/out", "in/../../out", ".", "in/.."])
def test_a_recipe_writes_where_it_is_run(place: str, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    step = f"mqa: {{model: m, output: {place}}}"
    assert f"would write to {place}, which is not inside the directory" in refusal(lines, step)
    assert lines(step, f"output={place}") == [["mqa", "--", "m", place]]
    assert lines("mqa: {model: m, output: in/../out}") == [["mqa", "--", "m", "in/../out"]]
    cached = f"heal: {{converted: c, output: o, top_k: 4, teacher_cache: {place}}}"
    assert "would write to" in refusal(lines, cached)
    assert command_lines([("mqa", {"model": "m", "output": place})], (), main, any_paths=True) == [["mqa", "--", "m", place]]


def test_a_dry_run_prints_the_commands_alone(tmp_path: Path, convert: Any) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("- inspect: {model: nothing}\n- mqa: {model: nothing, output: o}")
    result = convert("run", recipe, "--dry-run")
    assert result.exit_code == 0
    assert result.stdout == "convert inspect -- nothing\nconvert mqa -- nothing o\n"


# ---- what is none ----------------------------------------------------------------------------------------------------

BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])
MERGES = "\n".join(
    ["- a0: &a0 {" + ", ".join(f"k{n}: 1" for n in range(9)) + "}"]
    + [f"- a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("", "is not a recipe: step 1 is not one command with its options"),
        ("5", "is not a recipe: step 1"),
        ("[]", "is not a recipe: step 1"),
        ("{}", "is not a recipe: step 1"),
        ("- families:\n- null", "is not a recipe: step 2"),
        ("- families:\n- []", "is not a recipe: step 2"),
        ("- families:\n- gqa: [1]", "is not a recipe: step 2"),
        ("- families:\n- gqa: 2024-01-01", "is not a recipe: step 2"),
        ("gqa: {model: m}\nmqa: {model: m}", "is not a recipe: step 1"),
        ("1: {model: m}", "is not a recipe: step 1 has a key of type int"),
        ("null: {model: m}", "is not a recipe: step 1 has a key of type NoneType"),
        ("gqa: {1: m}", "is not a recipe: step 1 has a key of type int"),
        ("gqa: {on: m}", "is not a recipe: step 1 has a key of type bool"),
        ("gqa: {2024-01-01: m}", "is not a recipe: step 1 has a key of type date"),
        ("gqa: {0x" + "f" * 900 + ": m}", "is not a recipe: step 1 has a key of type int"),
        ("gqa: {[a]: m}", "is not valid YAML: "),
        ("gqa: {model: m, model: n}", "is not valid YAML: key 'model' is given twice, in line 1"),
        ("- families:\n- gqa: {model: m,\n    model: n}", "is not valid YAML: key 'model' is given twice, in line 3"),
        ("gqa: {dry-run: true, dry_run: false}", "step 1 of "),
        ("a: {b: c", "is not valid YAML: "),
        ("---\na: b\n---\nc: d", "is not valid YAML: "),
        ("gqa: !!python/object:os.system {}", "is not valid YAML: "),
        ("gqa: {model: !!bool perhaps}", "is not valid YAML: 'perhaps'"),
        ("gqa: {model: !!int ''}", "is not valid YAML: "),
        ("gqa: {model: 2024-13-45}", "is not valid YAML: month must be in 1..12"),
        ("gqa: {groups: " + "9" * 5000 + "}", "is not valid YAML: Exceeds the limit"),
        ("[" * 3000 + "]" * 3000, "is not valid YAML: maximum recursion depth exceeded"),
        ("&a [*a]", "is not a recipe: step 1"),
        ("gqa: &a {<<: *a}", "model is missing"),
        (BOMB, "is not a recipe: step 1"),
        (
            f"heal:\n  converted: m\n  output: o\n  track: [{{{BOMB.replace(chr(10), ', ')}}}]",
            "track takes one value, not a list",
        ),
        (f"gqa:\n  model: m\n  output: o\n  groups: [{{{BOMB.replace(chr(10), ', ')}}}]", "groups takes one value, not a list"),
        (MERGES, "is not valid YAML: its aliases make a mapping of more than 4096 keys"),
        (b"gqa: {model: \xff}", "is not valid YAML: 'utf-8' codec"),
        ("gqa: {model: \x07}", "is not valid YAML: unacceptable character"),
        ('{"kvfold": "1", "recipe": 5}', "is not a recipe: step 1"),
        ('{"kvfold": "1", "recipe": null}', "is not a recipe: step 1"),
        ('{"kvfold": "1", "recipe": {"gqa": 5}}', "is not a recipe: step 1"),
        ('{"kvfold": 1, "recipe": {"gqa": {"model": ["m"], "output": "o", "groups": 2}}}', "model takes one value, not a list"),
        (
            '{"kvfold": 1, "recipe": {"gqa": {"model": "m", "output": "o", "groups": {"a": 1}}}}',
            "groups takes one value, not a map",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_recipe_is_refused_in_one_line(recipe: str | bytes, said: str, lines: Lines) -> None:
    assert said in refusal(lines, recipe)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("gqa: {output: o, groups: 2}", "step 2 (gqa) of the recipe: model is missing"),
        ("gqa: {model: m, groups: 2}", "step 2 (gqa) of the recipe: output is missing"),
        ("gqa: {model: m, output: o}", "step 2 (gqa) of the recipe: Missing option '--groups'."),
        ("eval: {models: []}", "step 2 (eval) of the recipe: Missing argument 'MODEL...'."),
        ("gqa: {model: m, output: o, groups: two}", "Invalid value for '--groups': 'two' is not a valid integer."),
        ("gqa: {model: m, output: o, groups: 2.5}", "Invalid value for '--groups': '2.5' is not a valid integer."),
        ("gqa: {model: m, output: o, groups: 2, method: magic}", "Invalid value for '--method': 'magic' is not one of"),
        (
            "gqa: {model: m, output: o, groups: 2, text: /no/such}",
            "Invalid value for '--text': File '/no/such' does not exist.",
        ),
        ("gqa: {model: m, output: o, groups: 2, max-shard-size: 5}", "invalid size '5'"),
        ("bench: {models: m, batch: [1, 0]}", "Invalid value for '--batch': 0 is not in the range x>=1."),
        ("gqa: {model: m, output: o, groups: true}", "groups takes one value, not true or false"),
        ("gqa: {model: yes, output: o, groups: 2}", "model takes one value, not true or false"),
        ('gqa: {model: "m\\0", output: o, groups: 2}', "model takes one value, not text with a NUL character"),
        ("gqa: {model: 2024-01-01, output: o, groups: 2}", "model takes one value, not a date"),
        ("gqa: {model: 2024-01-01 10:00:00, output: o, groups: 2}", "model takes one value, not a datetime"),
        ("gqa: {model: !!binary aGk=, output: o, groups: 2}", "model takes one value, not a bytes"),
        ("gqa: {model: m, output: o, groups: 0x" + "f" * 9000 + "}", "groups takes one value, not an integer of 36000 bits"),
        ("bench: {models: [m, [n]]}", "models takes values, not a list"),
        ("bench: {models: [m, null]}", "models takes values, not null"),
        ("gqa: {model: m, output: o, groups: 2, dry-run: maybe}", "dry_run takes true or false"),
        ("gqa: {model: m, output: o, groups: 2, dry-run: [true]}", "dry_run takes true or false"),
        ("gqa: {model: m, output: o, groups: 2, dry-run: 7}", "dry_run takes true or false"),
        ("gqa: {model: m, output: o, groups: 2, help: true}", "convert gqa has no option 'help'"),
        ("shrink: {model: m}", "a recipe cannot run 'shrink'"),
        ("run: {recipe: x}", "a recipe cannot run 'run'"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_later_step_is_refused_before_the_first_runs(step: str, said: str, tmp_path: Path, convert: Any) -> None:
    (tmp_path / "recipe.yaml").write_text(f"- families: {{}}\n- {step}\n")
    result = convert("run", tmp_path / "recipe.yaml")
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) <= 2
    assert result.stdout == "", "a step was run"


def test_parsing_a_step_runs_nothing(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    def ran(**given: Any) -> None:
        raise AssertionError("it was run")

    for command in main.commands.values():
        monkeypatch.setattr(command, "callback", ran)
    assert len(lines("[{families: {}}, {inspect: {model: m}}, {plan: {model: m}}]")) == 3
    assert click.get_current_context(silent=True) is None
