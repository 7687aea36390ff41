"""Which text to calibrate on: what a result loses on texts of several kinds, by the text that it was calibrated on.

    python benchmarks/calibration.py DIR --model MODEL --text NAME=FILE … --evaluate NAME=FILE … [--target mqa …]
                                     [--tokens 16384] [--more 65536] [--context 512] [--max-tokens 8192] [--seeds 3] [--heal N]

A row for each calibration: on gains alone (`--no-text`), on random tokens, on the model's own text (one row for each seed), on
each --text, on its own text and the first of these, and on all; with --more, on its own text alone and beside the first
one again, with as many tokens. A target is mqa, gqa:GROUPS or RANK+ROPE. No text may be calibrated and evaluated on.

Each row is written to DIR/rows.jsonl when it is done; the same command goes on behind the last one, also within a conversion.
Another model, context, length of the evaluation or healing needs another DIR. It prints the table: nats over the source.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convert import gqa, mla
from eval import evaluate
from eval.inputs.sealed import seal_tensors
from eval.inputs.source import Source

Given = dict[str | Path, float]


@dataclass(frozen=True)
class Row:
    """One calibration of one target. Texts are None for gains alone."""

    target: str
    name: str
    texts: Given | None
    tokens: int
    seed: int = 0

    @property
    def key(self) -> str:
        """By which it is found again."""
        return f"{self.target} {self.name} {self.tokens} {self.seed}"


def rows(args: argparse.Namespace, random: Path) -> Iterator[Row]:
    """All rows, those of one target after those of another."""
    files: dict[str, Path] = dict(args.text)
    first = next(iter(files))
    mixed: Given = {"self": 1.0, files[first]: 1.0}
    for target in args.target:
        yield Row(target, "gains alone", None, args.tokens)
        yield Row(target, "random tokens", {random: 1.0}, args.tokens)
        yield from (Row(target, "self", {"self": 1.0}, args.tokens, seed) for seed in range(args.seeds))
        yield from (Row(target, name, {file: 1.0}, args.tokens) for name, file in files.items())
        yield Row(target, f"self, {first}", mixed, args.tokens)
        if len(files) > 1:
            yield Row(target, "all", {"self": 1.0} | dict.fromkeys(files.values(), 1.0), args.tokens)
        if args.more:
            yield Row(target, "self", {"self": 1.0}, args.more)
            yield Row(target, f"self, {first}", mixed, args.more)


def losses(row: Row, args: argparse.Namespace, source: dict[str, float]) -> dict[str, float]:
    """Nats over the source, whose own losses are given, on each text to evaluate on."""
    path = args.directory / row.key.replace(" ", "-").replace(",", "")
    given: dict[str, Any] = {"no_text": True} if row.texts is None else {"text": row.texts, "heal": args.heal}
    if row.texts is not None:
        given |= {"calibration_tokens": row.tokens, "calibration_context": args.context}
    given |= {"seed": row.seed, "resume": True, "force": True}
    if "+" in row.target:
        rank, rope = map(int, row.target.split("+"))
        mla(args.model, path, kv_lora_rank=rank, qk_rope_head_dim=rope, **given)
    else:
        gqa(args.model, path, groups=int(row.target.removeprefix("gqa:")) if ":" in row.target else 1, **given)
    found = loss_per_token(path, args)
    shutil.rmtree(path)
    return {name: loss - source[name] for name, loss in found.items()}


def loss_per_token(model: str | Path, args: argparse.Namespace) -> dict[str, float]:
    """Nats on each text to evaluate on."""
    given: dict[str, Any] = {"context": args.context, "max_tokens": args.max_tokens}
    reports = {name: evaluate([model], text=file, **given) for name, file in args.evaluate}
    return {name: math.log(report["models"][0]["perplexity"]) for name, report in reports.items()}


def loss_of_source(args: argparse.Namespace) -> dict[str, float]:
    """As `loss_per_token` of the source; kept in DIR."""
    kept = args.directory / "source.json"  # of the arguments that `finished` compares
    if not kept.exists():
        kept.write_text(json.dumps(loss_per_token(args.model, args)))
    found: dict[str, float] = json.loads(kept.read_text())
    return found


def table(done: list[dict[str, Any]]) -> str:
    """Markdown, with the mean over seeds and half of what they span."""
    kinds = list(done[0]["losses"])
    lines = ["| target | calibrated on | tokens | " + " | ".join(kinds) + " |", "| --- | --- | --: |" + " --: |" * len(kinds)]
    groups = dict.fromkeys((row["target"], row["name"], row["tokens"]) for row in done)
    for group in groups:
        same = [row["losses"] for row in done if (row["target"], row["name"], row["tokens"]) == group]
        cells = []
        for kind in kinds:
            values = [losses[kind] for losses in same]
            spread = (max(values) - min(values)) / 2
            cells.append(f"{sum(values) / len(values):.3f}" + (f" ± {spread:.3f}" if len(values) > 1 else ""))
        lines.append(f"| {group[0]} | {group[1]} | {group[2]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def random_tokens(model: str, tokens: int, context: int, path: Path) -> Path:
    """A file of tokens that are all as likely."""
    known = Source.parse(model).vocabulary
    ids = torch.randint(known, (tokens // context, context), generator=torch.Generator().manual_seed(0))
    seal_tensors(path, {"ids": ids.to(torch.int32)}, {})
    return path


def finished(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of an earlier run of the same command. A line that was cut off is dropped."""
    log = args.directory / "rows.jsonl"
    made_by = {name: str(getattr(args, name)) for name in ("model", "context", "max_tokens", "heal", "evaluate", "text")}
    head, *lines = log.read_text().splitlines() if log.exists() else [json.dumps(made_by)]
    if json.loads(head) != made_by:
        raise SystemExit(f"{log} is of {head}: take another DIR")
    whole = [line for line in lines if line.endswith("}")]
    log.write_text("".join(f"{line}\n" for line in (head, *whole)))
    return [json.loads(line) for line in whole]


def named(value: str) -> tuple[str, Path]:
    name, equals, file = value.partition("=")
    if not (equals and name and Path(file).is_file()) or name in ("self", "all"):
        raise argparse.ArgumentTypeError(f"{value!r} is not NAME=FILE, there is no such file, or NAME is self or all")
    return name, Path(file)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=named, action="append", required=True)
    parser.add_argument("--evaluate", type=named, action="append", required=True)
    parser.add_argument("--target", action="append")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--more", type=int)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--heal", type=int, default=0)
    args = parser.parse_args(arguments)
    args.target = args.target or ["mqa"]
    args.directory.mkdir(parents=True, exist_ok=True)
    log, done = args.directory / "rows.jsonl", finished(args)
    source = loss_of_source(args)
    random = random_tokens(args.model, args.tokens, args.context, args.directory / "random.safetensors")
    for row in rows(args, random):
        if row.key in {one["key"] for one in done}:
            continue
        print(row.key, flush=True)
        found = losses(row, args, source)
        entry = {"key": row.key, "target": row.target, "name": row.name, "tokens": row.tokens, "losses": found}
        done.append(entry)
        with log.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print({name: round(loss, 3) for name, loss in found.items()}, flush=True)
    print(table(done))


if __name__ == "__main__":
    main()
