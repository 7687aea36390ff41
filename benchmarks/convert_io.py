"""What converting costs beside copying: time against `cp -r` of the same files, and memory above the imports.

    python benchmarks/convert_io.py [--gigabytes 2] [--rounds 3] [--directory DIR]

Builds a random Llama-shaped, sharded bf16 checkpoint, then alternates `cp -r` and `convert gqa` on it.
Both are timed as whole processes, page cache warm. Memory is anonymous memory.
"""

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from random_llama import IMPORTS, build, layers_of, run

HEADS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shard-megabytes", type=int, default=500)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--method", default="mean")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where to work; default: a temporary directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as work:
        source, copy, out = (Path(work, name) for name in ("source", "copy", "out"))
        build(source, HEADS, layers_of(HEADS, args.gigabytes), args.shard_megabytes * 10**6)
        size = sum(file.stat().st_size for file in source.iterdir())
        print(f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}")
        print(
            f"source: {size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards, {HEADS} → {args.groups} KV heads"
        )
        convert = [sys.executable, "-m", "convert.command.cli", "gqa", str(source), str(out), "-q"]
        convert += ["--groups", str(args.groups), "--method", args.method, "--max-shard-size", f"{args.shard_megabytes}MB"]
        _, imports = run([sys.executable, "-c", IMPORTS])
        start = statistics.median(run([*convert, "--dry-run"])[0] for _ in range(args.rounds))
        run(["cp", "-r", str(source), str(copy)])  # warm the page cache
        copies, conversions, peaks = [], [], []
        for _ in range(args.rounds):
            shutil.rmtree(copy, ignore_errors=True)  # one result at a time, so that both find the same page cache
            copies.append(run(["cp", "-r", str(source), str(copy)])[0])
            shutil.rmtree(copy)
            seconds, peak = run(convert)
            conversions.append(seconds)
            peaks.append(peak)
            shutil.rmtree(out)
        ratios = [b / a for a, b in zip(copies, conversions, strict=True)]
        print(f"cp -r:   {statistics.median(copies):.2f} s (median of {args.rounds}: {', '.join(f'{s:.2f}' for s in copies)})")
        print(f"convert: {statistics.median(conversions):.2f} s ({', '.join(f'{s:.2f}' for s in conversions)})")
        net = [(b - start) / a for a, b in zip(copies, conversions, strict=True)]
        print(f"start:   {start:.2f} s of it are Python's imports and the plan (convert gqa --dry-run)")
        print(f"ratio:   {statistics.median(ratios):.2f} (pair by pair: {', '.join(f'{r:.2f}' for r in ratios)})")
        print(f"ratio without the start: {statistics.median(net):.2f} ({', '.join(f'{r:.2f}' for r in net)})")
        print(f"memory:  {max(peaks):.0f} MB anonymous at the peak, of it {imports:.0f} MB for the imports alone")


if __name__ == "__main__":
    main()
