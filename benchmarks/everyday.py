"""How long what people do every day takes, as whole processes, and writes the first table of BENCHMARKS.md.

    python benchmarks/everyday.py [--all] [--model MODEL] [--only WORD]

MODEL is SmolLM2-135M-Instruct in bf16; without it, it is made from a PyPI wheel, as `benchmarks/real_llm.py` does. The text is
Python's documentation and sources. Run it on an idle machine. It takes up to 15 minutes; with --all, which adds the suite and
the default calibration, half an hour.
"""

import argparse
import json
import os
import platform
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from real_llm import make_smollm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from convert.demo.showcase import MODEL

ROOT = Path(__file__).parents[1]
FIRST, LAST = "<!-- benchmarks/everyday.py writes this table -->\n", "<!-- end of the table -->"


@dataclass(frozen=True)
class Row:
    """One thing to time.

    Attributes:
        name: For the table.
        goal: For the table.
        command: Arguments of `convert` in a directory with `model`, `small` and `text.txt`, or a whole command.
        rare: Whether only --all runs it.
    """

    name: str
    goal: str
    command: str | list[str]
    rare: bool = False


BLOCKS = "--text text.txt --calibration-tokens 16384 --calibration-context 512 --heal 0"
CONFIG = "from transformers import AutoConfig; AutoConfig.from_pretrained('model')"
HEAL = "heal mqa healed --text text.txt --tokens 2000 --context 500"
ROWS = (
    Row("`make test`", "5 minutes", ["make", "-C", str(ROOT), "test"], rare=True),
    Row("AutoConfig alone", "", [sys.executable, "-c", CONFIG]),
    Row("`convert inspect`", "1 s more than that", "inspect model"),
    Row("`convert demo`", "80 s", "demo"),
    Row("MQA of 0.5 M parameters, default calibration", "20 s", "mqa small of-small --text text.txt"),
    Row(
        "MLA-160+32 of the real model, 16,384 tokens in blocks of 512",
        "300 s of CPU time",
        f"mla model mla --kv-lora-rank 160 --qk-rope-head-dim 32 {BLOCKS}",
    ),
    Row("MQA of the real model, default calibration", "15 minutes", "mqa model of-model --text text.txt", rare=True),
    Row("MQA of the real model by `mean`", "", "mqa model mqa --method mean"),
    Row("`convert heal` of 2,000 tokens, real model", "191 s of CPU time", HEAL),
    Row(
        "`convert eval` of the real model and its MQA, 8,192 tokens",
        "222 s of CPU time",
        "eval model mqa --text text.txt --max-tokens 8192",
    ),
)


def measured(row: Row, work: Path) -> str:
    """Run it in a directory; a line of the table."""
    command = (
        [sys.executable, "-m", "convert.command.cli", *row.command.split()] if isinstance(row.command, str) else row.command
    )
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{row.name} failed:\n{done.stderr[-2000:]}")
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"| {row.name} | {seconds:.0f} s | {own:.0f} s | {row.goal} |"


def make_small(path: Path) -> None:
    """A random Llama with the bundled model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=172, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)


def write(lines: list[str]) -> None:
    """Replace the table in BENCHMARKS.md."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
    head = f"At {commit}, on {time.strftime('%Y-%m-%d')}: {machine}, transformers {transformers.__version__}.\n\n"
    table = ["| what | wall time | CPU time | goal |", "| --- | --: | --: | --- |", *lines]
    path = ROOT / "BENCHMARKS.md"
    before, rest = path.read_text(encoding="utf-8").split(FIRST)
    after = rest.split(LAST, 1)[1]
    path.write_text(before + FIRST + head + "\n".join(table) + "\n" + LAST + after, encoding="utf-8")


def main(show: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also the suite and the default calibration")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct")
    parser.add_argument("--only", default="", help="only rows whose name has this word; BENCHMARKS.md stays as it is")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        if args.model:
            (work / "model").symlink_to(args.model.resolve())
        else:
            make_smollm(work / "model")
        documents = runpy.run_path(str(ROOT / "scripts" / "train_demo.py"))["training_documents"]()
        (work / "text.txt").write_text("\n\n".join(documents)[:4_000_000], encoding="utf-8")
        make_small(work / "small")
        lines = []
        for row in ROWS:
            if (args.all or not row.rare) and args.only in row.name:
                lines.append(measured(row, work))
                show(lines[-1])
    if not args.only:
        write(lines)


if __name__ == "__main__":
    main()
