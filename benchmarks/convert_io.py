"""What converting costs beside copying: time against `cp -r` of the same files, and memory above the imports.

    python benchmarks/convert_io.py [--gigabytes 2] [--rounds 3] [--directory DIR]

Builds a random Llama-shaped, sharded bf16 checkpoint, then alternates `cp -r` and `convert gqa --method mean` on it.
Both are timed as whole processes, page cache warm. Memory is anonymous memory (RssAnon, sampled every 5 ms): pages of
mapped files are page cache and can be dropped by the kernel at will.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

HEADS, HEAD_DIM, MLP, VOCABULARY = 16, 128, 5632, 32_000
WIDTH = HEADS * HEAD_DIM
IMPORTS = "import torch, transformers"


def build(path: Path, gigabytes: float, shard_bytes: int) -> None:
    """A random MHA Llama of about `gigabytes`, in shards of `shard_bytes`."""
    layer = {
        **{f"self_attn.{p}_proj.weight": (WIDTH, WIDTH) for p in "qkvo"},
        **{f"mlp.{p}_proj.weight": (MLP, WIDTH) for p in ("gate", "up")},
        "mlp.down_proj.weight": (WIDTH, MLP),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    layer_bytes = 2 * sum(torch.Size(shape).numel() for shape in layer.values())
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * WIDTH) / layer_bytes))
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    path.mkdir(parents=True)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}

    def flush() -> None:
        name = f"part-{len(set(weight_map.values())):05d}.safetensors"
        save_file(shard, path / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes.items():
        shard[name] = (torch.randn(shape) * 0.02).to(torch.bfloat16)
        if sum(tensor.nbytes for tensor in shard.values()) > shard_bytes:
            flush()
    flush()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": MLP,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


def run(command: list[str]) -> tuple[float, float]:
    """Seconds of a whole process, and its peak anonymous memory in MB. Nobody pays for what others still had to write."""
    os.sync()
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))])
        time.sleep(0.005)
    if process.wait():
        raise SystemExit(f"failed: {' '.join(command)}")
    return time.monotonic() - start, peak * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shard-megabytes", type=int, default=500)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where to work; default: a temporary directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as work:
        source, copy, out = (Path(work, name) for name in ("source", "copy", "out"))
        build(source, args.gigabytes, args.shard_megabytes * 10**6)
        size = sum(file.stat().st_size for file in source.iterdir())
        print(f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}")
        print(
            f"source: {size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards, {HEADS} → {args.groups} KV heads"
        )
        convert = [sys.executable, "-m", "convert.cli", "gqa", str(source), str(out), "--groups", str(args.groups), "-q"]
        convert += ["--max-shard-size", f"{args.shard_megabytes}MB"]
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
