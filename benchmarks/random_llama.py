"""What benchmarks of conversion share: a random Llama-shaped checkpoint, and a process timed and weighed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from eval.machine.capacity import without_weights

HEAD_DIM, VOCABULARY = 128, 32_000
IMPORTS = "import torch, transformers"


def config_of(heads: int, layers: int = 1, vocabulary: int = VOCABULARY) -> LlamaConfig:
    """Of width heads × 128."""
    width = heads * HEAD_DIM
    return LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=HEAD_DIM, vocab_size=vocabulary,
        max_position_embeddings=8192, dtype="bfloat16", tie_word_embeddings=False,
    )  # fmt: skip


def shapes_of(config: LlamaConfig) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in without_weights(config).named_parameters()}


def layer_parameters(heads: int) -> int:
    return sum(shape.numel() for name, shape in shapes_of(config_of(heads)).items() if ".layers." in name)


def layers_of(heads: int, gigabytes: float) -> int:
    """How many layers make a bf16 checkpoint of about `gigabytes`."""
    return max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * heads * HEAD_DIM) / (2 * layer_parameters(heads))))


def build(path: Path, heads: int, layers: int, shard_bytes: int, vocabulary: int = VOCABULARY) -> None:
    """A random MHA Llama in bf16, in shards of `shard_bytes`."""
    config = config_of(heads, layers, vocabulary)
    config.save_pretrained(path)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}

    def flush() -> None:
        name = f"part-{len(set(weight_map.values())):05d}.safetensors"
        save_file(shard, path / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes_of(config).items():
        shard[name] = (torch.randn(shape) * 0.02).to(torch.bfloat16) if len(shape) > 1 else torch.ones(shape).bfloat16()
        if sum(tensor.nbytes for tensor in shard.values()) > shard_bytes:
            flush()
    flush()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def run(command: list[str]) -> tuple[float, float]:
    """Seconds of a whole process, and its peak anonymous memory in MB (RssAnon, sampled every 5 ms).

    Pages of mapped files are page cache, which the kernel can drop at will. Nobody pays for what others still had to write.
    """
    os.sync()
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        try:
            peak = max(peak, anonymous(process.pid))
        except (FileNotFoundError, ProcessLookupError):
            break
        time.sleep(0.005)
    if process.wait():
        raise SystemExit(f"failed: {' '.join(command)}")
    return time.monotonic() - start, peak


def anonymous(process: int | str = "self") -> float:
    """MB of a running process; 0 of one that has ended and not been waited for."""
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024 / 1e6


class Watch:
    """The most anonymous memory of this process within a block beyond that before it, in `peak`, MB; sampled every 5 ms."""

    def __enter__(self) -> Watch:
        self.peak, self._before, self._done = 0.0, anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, anonymous() - self._before)
