"""`convert run`: a recorded command is repeated, options replace what is recorded, and nothing harmful happens unasked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written import Convert, Find

from attention.errors import Refusal
from convert.command.cli import main
from convert.command.recipe import arguments

GQA = {"model": "m", "groups": 2}
HEAL = {"converted": "c", "teacher": "t"}


@pytest.fixture
def words(tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a result whose conversion.json records a recipe."""

    def run(recipe: Any, *given: str) -> list[str]:
        (tmp_path / "conversion.json").write_text(json.dumps({"kvfold": "", "recipe": recipe}))
        return arguments(tmp_path, Path("o"), given, main)

    return run


@pytest.mark.parametrize(
    ("recipe", "given", "expected"),
    [
        ({"gqa": GQA}, [], ["--groups=2", "--", "m", "o"]),
        ({"gqa": GQA | {"class": "a", "refit": False}}, [], ["--groups=2", "--class=a", "--no-refit", "--", "m", "o"]),
        ({"gqa": GQA | {"seed": 3}}, ["--seed", "4", "-q"], ["--groups=2", "--seed=3", "--seed", "4", "-q", "--", "m", "o"]),
        ({"mqa": {"model": "--overwrite", "device": "-x"}}, [], ["--device=-x", "--", "--overwrite", "o"]),
        ({"heal": HEAL | {"lr": 1e-3}}, [], ["--teacher=t", "--lr=0.001", "--", "c", "o"]),
        ({"mqa": {"model": "m", "text": ["a", "b"]}}, [], ["--text=a", "--text=b", "--", "m", "o"]),
        ({"mqa": {"model": "m", "text": ["a", "b"]}}, ["--text", "c"], ["--text", "c", "--", "m", "o"]),
        ({"mqa": {"model": "m", "strings": "2"}}, ["--text=c"], ["--text=c", "--", "m", "o"]),
        ({"mqa": {"model": "m", "no_text": True}}, ["--text=c"], ["--text=c", "--", "m", "o"]),
    ],
)
def test_a_record_is_a_command_line(recipe: Any, given: list[str], expected: list[str], words: Any) -> None:
    assert words(recipe, *given) == [*recipe, *expected]


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (5, "records no conversion: `convert run` takes a result's conversion.json"),
        ({"gqa": 5}, "records no conversion"),
        ({"gqa": GQA, "mqa": {}}, "records no conversion"),
        ({"demo": {}}, "records no conversion"),
        ({"gqa": GQA | {"heads": 3}}, "records 'heads', and `convert gqa` has no such option"),
        ({"gqa": GQA | {"output": "x"}}, "records 'output', and `convert gqa` has no such option"),
        ({"gqa": GQA | {"groups": [4, 2]}}, "records a wrong value of 'groups', of type list"),
        ({"gqa": GQA | {"groups": True}}, "records a wrong value of 'groups', of type bool"),
        ({"gqa": GQA | {"model": None}}, "records a wrong value of 'model', of type NoneType"),
        ({"gqa": GQA | {"model": "m\0"}}, "records a wrong value of 'model', of type str"),
        ({"gqa": GQA | {"refit": "no"}}, "records a wrong value of 'refit', of type str"),
        ({"mqa": {"model": "m", "strings": "2"}}, "records 2 strings as its text, and does not hold them"),
    ],
)
def test_what_is_not_a_record_is_refused(recipe: Any, said: str, words: Any) -> None:
    with pytest.raises(Refusal) as caught:
        words(recipe)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("recipe", "asked"),
    [
        ({"gqa": GQA | {"trust_remote_code": True}}, "--trust-remote-code"),
        ({"gqa": GQA | {"overwrite": True}}, "--overwrite"),
        ({"gqa": GQA | {"force": True}}, "--force"),
        ({"heal": HEAL | {"track": "wandb"}}, "--track=wandb"),
    ],
)
def test_what_could_do_harm_needs_consent(recipe: Any, asked: str, words: Any) -> None:
    with pytest.raises(Refusal, match=f"asks for {asked}: only the command line may allow that") as caught:
        words(recipe)
    assert asked in words(recipe, str(caught.value.hint).removeprefix("add "))
    harmless = {command: {key: False if value is True else value for key, value in options.items()}
                for command, options in recipe.items()}  # fmt: skip
    if harmless != recipe:
        assert asked not in words(harmless)


@pytest.mark.parametrize(
    ("content", "given", "said"),
    [
        ("gqa: {model: m, groups: 2}", ["o"], "`convert run` takes a result's conversion.json"),
        ('{"recipe": {"gqa": {"model": "m", "groups": "two"}}}', ["o"], "Invalid value for '--groups': 'two'"),
        ('{"recipe": {"gqa": {"model": "m"}}}', ["o"], "Missing option '--groups'"),
        ('{"recipe": {"gqa": {"model": "m", "groups": 2}}}', ["o", "--grups=2"], "No such option '--grups'"),
        ('{"recipe": {"gqa": {"model": "m", "groups": 2}}}', ["--set", "output=o"], "OUTPUT is missing before --set"),
    ],
)
def test_mistakes_are_named_in_one_line(content: str, given: list[str], said: str, tmp_path: Path, convert: Convert) -> None:
    (file := tmp_path / "recipe.yaml").write_text(content)
    result = convert("run", file, *given)
    assert result.exit_code == 2
    assert said in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1


def test_options_replace_what_is_recorded(finished: Find, convert: Convert, tmp_path: Path) -> None:
    planned = convert("run", finished("heads").path, tmp_path / "b", "--groups", 1, "--dry-run", "--json")
    assert planned.stderr.startswith("convert gqa --groups=2 ")
    assert json.loads(planned.stdout)["kv_heads_after"] == 1
    assert not (tmp_path / "b").exists()
