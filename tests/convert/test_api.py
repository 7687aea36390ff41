"""The functions of `convert` as programs call them: what they return, raise and say, and that the commands are their shell."""

import inspect as python
import json
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from written import Convert, Make, read, weights

import convert as api
from attention.errors import Failure, KvfoldError, Refusal
from convert import PlannedConversion, PlannedSweep, gqa, inspect, mla, mqa, plan, sweep
from convert.arguments import options
from convert.command.cli import main
from convert.healing.plan import PARTS
from convert.planning.describe import Facts
from eval import api as eval_api
from eval import options as measured
from eval.arguments import options_of

Told = list[tuple[str, int, int, str]]

CALIBRATION: dict[str, Any] = {"calibration_tokens": 256, "calibration_context": 32}


class Listener:
    """A progress callback that remembers, and holds what it is told to the rules."""

    def __init__(self) -> None:
        self.told: Told = []

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        self.told.append((stage, done, total, unit))

    def stages(self) -> list[tuple[str, int, str]]:
        """Every stage with its total, in order; each went from nothing to all, and never back."""
        begun = [i for i, (_, done, _, _) in enumerate(self.told) if done == 0]
        assert begun[0] == 0
        for start, end in zip(begun, [*begun[1:], len(self.told)], strict=True):
            part = self.told[start:end]
            assert len({(stage, total, unit) for stage, _, total, unit in part}) == 1
            assert [done for _, done, _, _ in part] == sorted(done for _, done, _, _ in part)
            assert part[-1][1] == part[-1][2], part[-1]
        return [(stage, total, unit) for stage, _, total, unit in (self.told[i] for i in begun)]


def test_a_conversion_says_what_it_was(
    shelf: Make, tmp_path: Path, warned: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when it is finished already."""
    source, out, listener = shelf(num_key_value_heads=8), tmp_path / "out", Listener()
    done = gqa(source, out, groups=2)
    assert (done.output, done.before.kind, done.after.kind) == (out, "MHA", "GQA-2")
    assert done.after.bytes_per_token("float32") * 4 == done.before.bytes_per_token("float32")
    assert done.provenance == read(out / "conversion.json")
    assert [layer["layer"] for layer in done.layers] == [0, 1, 2]
    assert done.report is None
    facts = json.loads(json.dumps(done.as_dict()))
    assert (facts["kv_heads_before"], facts["kv_heads_after"], facts["conversion"]) == (8, 2, done.provenance)
    assert str(done).splitlines()[0].startswith("MHA → GQA-2, method aligned")
    assert str(done).splitlines()[-1] == f"written to {out}, loads in transformers as llama"
    assert warned() == []
    again = gqa(source, out, groups=2, resume=True, progress=listener)
    assert (again.provenance, again.after, listener.told) == (done.provenance, done.after, [])
    assert warned() == [f"{out} is finished already, there is nothing to do"]
    assert capsys.readouterr().out == ""


def test_an_evaluation_is_part_of_the_conversion(
    shelf: Make, letters: Path, tmp_path: Path, warned: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    listener = Listener()
    done = mqa(shelf(), tmp_path / "out", text=letters, **CALIBRATION, evaluate=letters, device="cpu", progress=listener)
    source, converted = done.report["models"]
    assert (source["kind"], converted["kind"], converted["method"]) == ("GQA-4", "MQA", "aligned")
    assert f"perplexity: {source['perplexity']:.4g} → {converted['perplexity']:.4g}" in str(done)
    assert done.report == done.as_dict()["conversion"]["evaluation"]
    written = sum(tensor.nbytes for tensor in weights(done.output).values())
    assert listener.stages() == [
        ("fit", 3, "layer"), ("convert", written, "byte"), ("evaluate converted", converted["tokens"], "token"),
    ]  # fmt: skip
    flattered, few = warned()  # the text is compared before the work, and as a whole
    assert flattered == "text.txt shares 100% of its runs with the calibration text text.txt: its perplexity will be flattered"
    assert few.startswith("256 tokens of calibration text are few for 64 channels")
    assert few in done.provenance["notes"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("convert", [gqa, mqa, mla], ids=lambda function: function.__name__)
def test_a_dry_run_reads_no_weights_and_writes_nothing(convert: Any, checkpoint: Make, tmp_path: Path) -> None:
    source = checkpoint()
    (source / "model.safetensors").unlink()
    listener, size = Listener(), {"gqa": {"groups": 2}, "mqa": {}, "mla": {"kv_budget": "50%"}}[convert.__name__]
    planned = convert(source, tmp_path / "out", **size, dry_run=True, progress=listener)
    assert isinstance(planned, PlannedConversion)
    assert (planned.output, hasattr(planned, "provenance")) == (tmp_path / "out", False), "it is no result without provenance"
    assert str(planned).splitlines()[-1].startswith(f"would be written to {tmp_path / 'out'}")
    facts = json.loads(json.dumps(planned.as_dict()))
    assert facts["target"] == planned.after.kind
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    assert listener.told == []


def test_text_is_a_path_or_strings(shelf: Make, letters: Path, tmp_path: Path) -> None:
    source, words = shelf(), letters.read_text()
    path = gqa(source, tmp_path / "path", groups=2, text=letters, **CALIBRATION)
    strings = gqa(source, tmp_path / "strings", groups=2, text=[words[:700], words[700:]], **CALIBRATION)
    assert strings.provenance["calibration"]["text"] == "2 strings"
    assert "calibrated on at most 256 tokens of 2 strings in blocks of 32" in str(strings)
    assert strings.provenance["recipe"]["gqa"]["strings"] == "2", "strings have no path that could be read again"
    card = (tmp_path / "strings" / "README.md").read_text()
    assert (" --text TEXT" in card, "--strings" in card) == (True, False)
    again = gqa(source, tmp_path / "path", groups=2, text=[words], **CALIBRATION, resume=True)
    assert again.provenance == path.provenance, "the same text, wherever it lies"


MISTAKES: list[tuple[type[KvfoldError], str, Any, dict[str, Any]]] = [  # others are in the tests of plans
    (Refusal, "cannot make 3 groups from 4 KV heads", gqa, {"groups": 3}),
    (Refusal, "no method 'svd' merges heads (choose aligned, mean)", gqa, {"groups": 2, "method": "svd"}),
    (Refusal, "no method 'mean' makes a latent (choose weighted, svd, pca)", mla, {"kv_budget": "50%", "method": "mean"}),
    *((Refusal, "invalid budget", mla, {"kv_budget": budget}) for budget in (1.5, -0.25)),
    (Refusal, "seed is 10000000000000000; it must be at least 0 and at most 4294967295", mqa, {"seed": 10**16}),
    (Refusal, "no KV cache is kept in 'int8'", mqa, {"dtype": "int8"}),
    (Refusal, "no device 'quantum'", mqa, {"device": "quantum"}),
    (Failure, "nowhere.txt", mqa, {"text": "nowhere.txt"}),
    (Failure, "model.safetensors", mqa, {}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "convert", "given"), MISTAKES, ids=[message for _, message, *_ in MISTAKES])
def test_mistakes_are_refusals_and_bad_data_is_a_failure(
    error: type[KvfoldError], message: str, convert: Any, given: dict[str, Any], checkpoint: Make, tmp_path: Path
) -> None:
    source = checkpoint()
    (source / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(error, match=re.escape(message)) as caught:
        convert(source, tmp_path / "out", **given)
    assert caught.value.exit_code == (2 if error is Refusal else 1)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_sweep_returns_its_plans_and_report(
    shelf: Make, letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listener, out = Listener(), tmp_path / "out"
    wanted: dict[str, Any] = {"groups": [2], "mla": [(16, 8), "50%"], "methods": ["mean", "svd"], "evaluate": letters}
    planned = sweep(shelf(), out, **wanted, dry_run=True)
    names = ["gqa-2-mean", "mla-16+8-svd", "mla-50%-svd"]
    assert isinstance(planned, PlannedSweep)
    assert [facts["output"] for facts in planned.as_dict()] == [str(out / name) for name in names]
    assert "would be written to" in str(planned)
    assert not out.exists()
    done = sweep(shelf(), out, **wanted, max_tokens=256, progress=listener)
    assert [plan.output.path.name for plan in done.plans] == names
    assert done.report == read(done.report_directory / "report.json") == done.as_dict()
    assert str(done) == (done.report_directory / "report.md").read_text()
    assert [stage for stage, _, _ in listener.stages()] == [
        "convert", *["measure", "convert"] * 2, "evaluate " + ", ".join(names)
    ]  # fmt: skip
    assert capsys.readouterr().out == ""
    with pytest.raises(Refusal, match="exists already"):
        sweep(shelf(), out, **wanted)


def test_facts_are_numbers_for_programs_and_a_table_for_people(
    checkpoint: Make, convert: Convert, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint()
    (source / "model.safetensors").unlink()
    found, sizes = inspect(source), plan(str(source), batch=3, context=10, gpus={"tiny": 0.001})
    assert isinstance(found, Facts)
    assert (found["attention"], found["kv_bytes_per_token"], found["groups_possible"]) == ("GQA-4", 768, [4, 2, 1])
    assert [row["kind"] for row in sizes["targets"][:3]] == ["GQA-4", "GQA-2", "MQA"]
    assert list(sizes["targets"][0]["longest_context"]) == ["tiny"]
    assert "RTX 4090 24 GB" in str(plan(source))
    assert capsys.readouterr().out == ""
    for facts, command in ((found, ["inspect"]), (sizes, ["plan", "--batch", 3, "--context", 10, "--gpu", "tiny=0.001"])):
        assert convert(*command, source).stdout == f"{facts}\n"
        assert json.loads(convert(*command, source, "--json").stdout) == json.loads(json.dumps(facts)) == facts
    with pytest.raises(Refusal, match="no model directory"):
        inspect("./nowhere")
    for changes in ({"batch": 0}, {"gpus": {"tiny": float("inf")}}, {"gpus": {"tiny": 0}}):
        with pytest.raises(Refusal, match="it must be at least"):
            plan(source, **changes)


COMMANDS: dict[str, tuple[Any, str, type, list[str]]] = {  # the function, its options, and arguments without which none runs
    "gqa": (api, "gqa", options.Gqa, ["MODEL", "OUTPUT", "--groups", "2"]),
    "mqa": (api, "mqa", options.Mqa, ["MODEL", "OUTPUT"]),
    "mla": (api, "mla", options.Mla, ["MODEL", "OUTPUT"]),
    "heal": (api, "heal", options.Heal, ["MODEL", "OUTPUT"]),
    "sweep": (api, "sweep", options.Sweep, ["MODEL", "OUTPUT", "--evaluate", "TEXT"]),
    "plan": (api, "plan", options.Plan, ["MODEL"]),
    "inspect": (api, "inspect", options.Inspect, ["MODEL"]),
    "refresh": (api, "refresh", typing.TypedDict("Refresh", {}), ["OUTPUT"]),
    "eval": (eval_api, "evaluate", measured.Evaluate, ["MODEL"]),
    "bench": (eval_api, "bench", measured.Bench, ["MODEL"]),
}


class Called(Exception):
    """What a command called its function with."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_function_has_the_words_and_defaults_of_its_command(
    name: str, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, function, _, arguments = COMMANDS[name]
    signature = python.signature(getattr(module, function)).parameters
    options = {p.name for p in main.commands[name].params if isinstance(p, click.Option)} - {"as_json", "verbose", "quiet"}
    keywords = {p.name for p in signature.values() if p.kind is p.KEYWORD_ONLY} - {"progress"}
    assert options == keywords

    def called(*given: Any, **named: Any) -> None:
        raise Called(given, named)

    monkeypatch.setattr(module, function, called)
    result = CliRunner().invoke(main, [name, *(str(letters) if argument == "TEXT" else argument for argument in arguments)])
    assert isinstance(result.exception, Called), result.output
    positional, named = result.exception.args
    given = {"MODEL": ("MODEL",) if name in ("eval", "bench") else "MODEL", "OUTPUT": Path("OUTPUT")}
    assert list(positional) == [value for argument, value in given.items() if argument in arguments]
    for option, value in named.items():
        default = signature[option].default
        if default is python.Parameter.empty:
            assert value in (2, letters)
        elif option not in ("progress", "made"):
            assert value == default, option


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_is_declared_once(name: str) -> None:
    """The signature, the docstring, the command and docs/cli.md say what the one declaration says."""
    module, function, declaration, _ = COMMANDS[name]
    call, declared = getattr(module, function), options_of(declaration)
    signature, doc = python.signature(call).parameters, python.getdoc(call) or ""
    shown = {p.name: p for p in main.commands[name].params if isinstance(p, click.Option)}
    pages = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8").split("\n## ")
    (documented,) = (page for page in pages if page.startswith(f"convert {name}\n"))
    if "#options-of-all-conversions" in documented:
        documented += pages[-1]
    for option in declared.values():
        parameter, default = signature[option.name], python.Parameter.empty if option.required else option.default
        assert (parameter.annotation, parameter.default) == (option.type, default)
        assert f"\n    {option.name}: " in doc
        if option.flag == "":
            assert option.name not in shown
            continue
        assert (shown[option.name].help or "").startswith(option.help)
        assert shown[option.name].opts[0] in documented.replace("`", " ").split()
    assert not re.search(r"--\w|\bMODEL\b|\*\*given", doc), "they are spelled as in Python"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_refuses_what_its_function_refuses(name: str) -> None:
    """A number out of range, and a word that is none of the choices."""
    for option in options_of(COMMANDS[name][2]).values():
        command, beyond = main.commands[name], [] if option.least is None else [option.least - 1]
        beyond += [] if option.most is None else [option.most + 1]
        for number in beyond if not option.several else []:
            with pytest.raises(Refusal, match=f"{option.name} is .*; it must be at least"):
                option.value(number)
        for value in [*map(str, beyond), *(["nonsense"] if option.choices else [])]:
            (shown,) = (p for p in command.params if p.name == option.name)
            with pytest.raises(click.UsageError), click.Context(command) as context:
                shown.type_cast_value(context, (value,) if shown.multiple else value)  # type: ignore[attr-defined]


def test_words_and_commands_are_those_that_are_known() -> None:
    heal_options = options_of(options.Heal)
    assert heal_options["train"].choices == PARTS
    assert main.commands.keys() - COMMANDS.keys() <= {"families", "run", "cache", "demo"}
