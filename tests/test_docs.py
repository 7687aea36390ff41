"""Documents are true: their examples run, their commands have the options that they name, and their links lead somewhere."""

import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from convert.command.cli import main
from convert.demo.showcase import MODEL, VALIDATION, held_out_text

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
API = ROOT / "docs" / "api.md"
COMMAND = re.compile(r"^(?:\$ )?(?:(?:torchrun|accelerate) .* )?(?:convert|kvfold) ")
# What pages call models, and values of options that fit the bundled one.
MODELS = ("MODEL", "SOURCE", "english-6m-mha")
SMALL = {
    "--groups": "2", "--kv-lora-rank": "96", "--qk-rope-head-dim": "32",
    "--context": "64", "--batch": "2",
}  # fmt: skip
# Behind what a page says: of an option that is given twice, the last one counts, and of --text both.
CONVERSION = ["--text", "more.txt", "--calibration-tokens", "512", "--calibration-context", "64", "--heal", "0", "--overwrite"]
EVALUATION = ["--max-tokens", "256", "--overwrite"]
QUICK = {
    "gqa": CONVERSION,
    "mqa": CONVERSION,
    "mla": CONVERSION,
    "heal": ["--tokens", "128", "--context", "16", "--overwrite"],
    "eval": EVALUATION,
    "bench": ["--steps", "1", "--rounds", "1", "--overwrite"],
    "sweep": [*CONVERSION, *EVALUATION, "--groups", "2", "--mla", "96+32", "--methods", "mean,weighted"],
}
TOO_LARGE = re.compile("--engine vllm|64KB")  # the bundled model's whole cache is smaller


def blocks(page: Path, *languages: str) -> list[str]:
    """What stands between fences."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of each command that a page tells to run; lines that are indented continue the one before."""
    for block in blocks(page, "", "sh", "bash", "console"):
        for line in re.sub(r"\s*\\?\n +", " ", block).splitlines():
            if found := COMMAND.match(line):
                yield shlex.split(line[found.end() :], comments=True)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of a newcomer: models and texts of the names that pages use."""
    for name in (*MODELS, "my-model"):
        (tmp_path / name).symlink_to(MODEL)
    texts = {name for page in PAGES for command in commands(page) for name in command if name.endswith(".txt")}
    for name in sorted(texts | {"FILE", "calibrate.txt", "held-out.txt", "more.txt"}):
        held_out = name == "held-out.txt" or "test" in name
        text = held_out_text(("statistics",))[8000:10000] if held_out else held_out_text(VALIDATION)[:2000]
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("kvfold"), "handlers", [])
    return tmp_path


WITH_COMMANDS = [page for page in PAGES if any(commands(page))]
MARKS = {page.stem: () if page.stem == "guide" else pytest.mark.slow for page in PAGES}


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_have_the_options_that_pages_name(page: Path, desk: Path) -> None:
    for name, *rest in commands(page):
        main.commands[name].make_context(name, rest)


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem, marks=MARKS[page.stem]) for page in WITH_COMMANDS])
def test_commands_run(page: Path, desk: Path) -> None:
    """One after another, on the bundled checkpoint, with sizes that take seconds."""
    runner = CliRunner()
    assert runner.invoke(main, ["mqa", "MODEL", "CONVERTED...", "--method", "mean"]).exit_code == 0
    for arguments in commands(page):
        if TOO_LARGE.search(shlex.join(arguments)):
            continue
        small = [SMALL.get(option, word) for option, word in pairwise(["", *arguments])]
        done = runner.invoke(main, [*small, *QUICK.get(arguments[0], [])])
        assert done.exit_code == 0, f"{shlex.join(arguments)}\n{done.output}"


def test_what_is_written_by_the_script_is_current() -> None:
    command = [sys.executable, "scripts/write_docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.slow
def test_the_examples_of_the_api_run(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after another, on the bundled checkpoint and some hundreds of tokens."""
    examples = blocks(API, "python")
    assert len(examples) == 8
    namespace: dict[str, object] = {}
    said = []
    for example in examples:
        exec(compile(example, str(API), "exec"), namespace)
        said.append(capsys.readouterr().out)
    assert "my-model-gqa2 MHA GQA-2" in said[0]
    assert "MLA-160+96" in said[1]
    assert re.fullmatch(r"\d\.\d+ \d\.\d+\n", said[2])
    assert "sweep/report/report.html" in said[3]
    assert said[4].startswith("[8, 4, 2, 1]\nMHA ")
    assert "cannot make 3 groups from 8 KV heads" in said[6]
    assert re.match(r"fit: 0 of 6 layers\n(.*\n)*convert: (\d+) of \2 bytes\n$", said[7])


def test_every_function_has_an_example() -> None:
    import convert
    import eval as eval_package

    text = API.read_text(encoding="utf-8")
    for name in [*convert.__all__, *eval_package.__all__]:
        assert name[0].isupper() or re.search(rf"\b{name}\(", text), name
