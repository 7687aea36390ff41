"""The command line: what each command prints, what each mistake costs, and that help comes at once."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from latents import SMALL
from written import Convert, Find, Make, ok, read, refused

from attention.errors import Refusal
from convert.arguments.sizes import parse_budget
from convert.command.cli import main

TEXT = "Once there was a cat. It sat on the mat, and the mat was flat.\n" * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def unread(checkpoint: Make) -> Path:
    """A checkpoint whose weights are of no use."""
    source = checkpoint()
    (source / "model.safetensors").write_bytes(b"garbage")
    return source


def test_gqa_prints_what_it_did_on_stdout_alone(finished: Find, convert: Convert) -> None:
    made = finished("heads")
    assert made.stdout.splitlines() == [
        "GQA-4 → GQA-2, method aligned (heads aligned with each other)",
        "KV cache: 768 → 384 bytes per token (50.0%, kept in float32)",
        "no calibration text: aligned uses weights and norm gains alone, which ruins most models",
        f"written to {made.path}, loads in transformers as llama",
    ]
    assert made.stderr == "convert: 367,872 bytes\n"
    assert convert(*made.command, "--resume", "-q").stderr == ""


def test_what_libraries_print_is_not_on_stdout(
    shelf: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging

    monkeypatch.setattr(logging, "set_verbosity_error", lambda: print("noise"))
    result = convert("mqa", shelf(), tmp_path / "out", "--json", "--dry-run")
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


@pytest.mark.parametrize("encoding", ["latin-1", "koi8-r"])
def test_what_the_encoding_of_stdout_lacks_is_replaced(encoding: str, shelf: Make, tmp_path: Path) -> None:
    runner = CliRunner(charset=encoding)
    result = runner.invoke(main, ["mqa", str(shelf()), str(tmp_path / "out"), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "GQA-4 ? MQA" in result.stdout_bytes.decode(encoding)


def test_a_stdout_that_is_full_is_said_apart_from_the_work(
    shelf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main(["mqa", str(shelf()), str(tmp_path / "out"), "--method", "mean"], standalone_mode=True)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()  # what it could not write is still in it
    assert ended.value.code == 1
    assert "error: stdout cannot be written: No space left on device" in capsys.readouterr().err
    assert (tmp_path / "out" / "conversion.json").exists()


def test_eval_and_bench_print_their_reports(finished: Find, convert: Convert, text: Path, tmp_path: Path) -> None:
    made, out = finished("heads"), tmp_path / "speed"
    command = ("eval", made.source, made.path, "--text", text, "-q")
    report = json.loads(ok(convert(*command, "--json", "--output", tmp_path / "report")).stdout)
    assert read(tmp_path / "report" / "report.json") == report
    sizes = ("--batch", "1,2", "--context", 8, "--context", "16,8", "--rounds", 1, "--steps", 1, "--device", "cpu")
    result = ok(convert("bench", made.source, *sizes, "--json", "--output", out, "-q"))
    assert read(out / "bench.json") == json.loads(result.stdout)
    cases = [(row["batch"], row["context"]) for row in read(out / "bench.json")["models"][0]["cases"]]
    assert (cases, result.stderr) == ([(1, 8), (1, 16), (2, 8), (2, 16)], "")
    again = convert("bench", made.source, "--context", 8, "--rounds", 1, "--steps", 1, "--output", out, "--overwrite")
    assert again.stdout.startswith("| batch | context | model ")
    assert f"report: {out / 'bench.json'}" in again.stderr


@pytest.mark.parametrize(
    ("budget", "parsed"),
    [("12.5%", 0.125), ("100%", 1.0), (" 50 % ", 0.5), ("384", 384), ("0.3KB", 300), ("384B", 384), ("1KiB", 1024)],
)
def test_a_budget_is_a_share_or_bytes(budget: str, parsed: float) -> None:
    found = parse_budget(budget)
    assert (found, type(found)) == (parsed, type(parsed))


@pytest.mark.parametrize("budget", ["0%", "150%", "a little", "-4096", "0B", "5 parsecs"])
def test_what_is_no_budget_is_refused(budget: str) -> None:
    with pytest.raises(Refusal, match="invalid"):
        parse_budget(budget)


GQA = ["gqa", "M", "OUT", "--groups", 1]
MLA = ["mla", "M", "OUT", *SMALL]
EVAL = ["eval", "M"]
# Arguments, exit code and message. M is a model whose weights cannot be read, T a text; EMPTY and FILE are files.
# What functions refuse, too, is refused in their tests.
MISTAKES: list[tuple[list[Any], int, str]] = [
    (["mla", "M", "OUT", "--kv-budget", "-4096"], 2, "invalid budget '-4096'"),
    ([*GQA, "--max-shard-size", "5 parsecs"], 2, "invalid size"),
    ([*MLA, "--method", "magic"], 2, "'magic' is not one of"),
    ([*MLA, "--method", "pca", "--text", "missing.txt"], 2, "does not exist"),
    (["plan", "M", "--batch", 0], 2, "0 is not in the range x>=1"),
    ([*MLA, "--text", "T", "--no-text"], 2, "give either a text to calibrate on or --no-text"),
    (["gqa", "M", "M", "--groups", 1], 2, "lie inside each other"),
    (["plan", "M", "--gpu", "large"], 2, "is not a GPU"),
    (["plan", "M", "--gpu", "large=inf"], 2, "is not a GPU"),
    (["plan", "M", "--context", "1X"], 2, "invalid number of tokens '1X'"),
    *((command, 2, "it is empty: name a directory") for command in (
        ["gqa", "M", ""], ["heal", "M", ""], ["sweep", "M", "", "--evaluate", "T"], ["demo", "--output", ""],
        [*EVAL, "--text", "T", "--output", ""], ["bench", "M", "--output", ""],
    )),
    ([*EVAL, "--text", "EMPTY"], 1, "is empty"),
    (["bench"], 2, "Missing argument 'MODEL...'"),
    (["bench", "M", "--batch", "1,0"], 2, "0 is not in the range x>=1"),
    (["bench", "M", "--dtype", "int8"], 2, "'int8' is not one of 'auto', 'float32', 'bfloat16', 'float16'"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES, ids=lambda value: str(value)[:60])
def test_mistakes_are_refused_in_one_line(
    arguments: list[Any], code: int, message: str, unread: Path, convert: Convert, text: Path, tmp_path: Path
) -> None:
    for name in ("EMPTY", "FILE"):
        (tmp_path / name).write_text(" \n")
    places = {"M": unread, "T": text, "OUT": tmp_path / "out", "EMPTY": tmp_path / "EMPTY", "FILE": tmp_path / "FILE"}
    refused(convert(*(places.get(argument, argument) for argument in arguments)), code, message)
    assert not list(tmp_path.glob("out*"))


def test_gpus_have_names_and_contexts_units(shelf: Make, convert: Convert) -> None:
    given = "plan", shelf(), "--gpu", "H100=80", "--gpu", "RTX 4090=24", "--gpu", "A100=80", "--json"
    facts = json.loads(ok(convert(*given, "--context", "0.1k")).stdout)
    assert facts["gpu_gigabytes"] == {"H100": 80, "RTX 4090": 24, "A100": 80}
    assert facts["context"] == 100
    options = ["--text", "self", "--calibration-context", "0.1k", "--max-context", "0.12k", "--calibration-tokens", "1k"]
    plan = ["mla", given[1], "out", *SMALL, *options, "--dry-run", "--json"]
    used = json.loads(ok(convert(*plan)).stdout)["calibration"]
    assert used.items() >= {"calibration_context": 100, "max_context": 120, "calibration_tokens": 1000}.items()


HOSTILE = "x\x1b[31m\u202e\nb"


def test_names_never_steer_the_terminal(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, out, text = checkpoint(name=HOSTILE), tmp_path / f"out{HOSTILE}", tmp_path / f"text{HOSTILE}"
    text.write_text(TEXT)
    for arguments in [
        ("plan", source, "--gpu", f"{HOSTILE}=3"),
        ("plan", source, "--gpu", HOSTILE),
        ("gqa", source, out, "--groups", 2, "--text", text, "--evaluate", text, "--calibration-tokens", 256),
        ("gqa", source, out, "--groups", 2),
        ("gqa", source, tmp_path / "new", "--groups", 2, "--text", f"{text}.none"),
        ("eval", source, out, "--text", text, "--max-tokens", 256, "--output", tmp_path / f"report{HOSTILE}"),
        ("run", out, tmp_path / f"again{HOSTILE}"),
        ("inspect", tmp_path / f"none{HOSTILE}"),
        (HOSTILE,),
        (f"--{HOSTILE}",),
    ]:
        result = convert(*arguments, color=True)
        assert "Traceback" not in result.output
        steering = [line for line in result.output.split("\n") if not line.isprintable()]
        assert steering == [], arguments


NO_MODEL = [["--help"], ["gqa", "--help"], ["eval", "--help"], ["--version"], ["families"], ["families", "--json"]]


@pytest.mark.parametrize("arguments", NO_MODEL, ids=" ".join)
def test_what_reads_no_model_imports_no_torch(arguments: list[str]) -> None:
    script = (
        f"import sys; from convert.command.cli import main; main({arguments}, standalone_mode=False); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", main.commands)
def test_every_command_has_help_with_an_example(name: str, convert: Convert) -> None:
    shown = convert(name, "--help")
    assert shown.exit_code == 0
    assert f"Example: convert {name}" in shown.stdout
