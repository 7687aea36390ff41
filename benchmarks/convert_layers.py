"""What conversion costs: seconds per layer of each method, and the memory of a survey.

    python benchmarks/convert_layers.py [--widths 2048 4096] [--rank 512] [--rope 64] [--layers 24] [--rounds 3]
                                        [--directory DIR] [--refit]

Seconds are of one layer of random weights (heads of 128, MHA and GQA with 8 KV heads), median of the rounds after one
warm-up, on the CPU and, where there is one, on CUDA; with statistics and a sample of 4,096 tokens in blocks of 2,048. CPU
seconds are those of all threads. MB are the process's anonymous memory beyond weights and statistics. The first rows are the
refit at the size of a model of 135 million parameters: 9 heads of 64, 3 KV heads, blocks of 512, to MQA and MLA.
The survey runs in a process of its own over a random bf16 checkpoint of width 2048; its peak is anonymous memory beyond that of
importing torch and transformers. Its spooled inputs are on disk.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from random_llama import HEAD_DIM, IMPORTS, Watch, build, layer_parameters, run

from attention.record import Attention
from attention.rope import Rotary, of_base
from convert.calibration.refit import refitted, sample_for
from convert.methods import LATENT, load_grouped, load_latent
from convert.methods.blocks import Blocks
from convert.methods.frequencies import pairs_by_stride
from convert.methods.latent import Allocation
from convert.methods.statistics import Attended, Statistics
from eval.machine.device import trim_memory

HEADS, BLOCKS, CONTEXT = 16, 2, 2048

Cost = tuple[float, float, float]  # seconds, CPU seconds, MB


@dataclass(frozen=True)
class Sizes:
    """Of a layer and its sample, and of what it is factored into."""

    width: int
    groups: int
    head_dim: int = HEAD_DIM
    blocks: int = BLOCKS
    context: int = CONTEXT
    rank: int = 512
    rope: int = 64

    def drawn(self, device: str) -> tuple[Attention, Statistics]:
        """A layer of random weights, and statistics of random inputs."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16).to(device)

        heads, kv = self.width // self.head_dim, (self.groups, self.head_dim, self.width)
        rotary = of_base(10000.0, self.head_dim)
        projections = draw(heads, self.head_dim, self.width), draw(*kv), draw(*kv), draw(self.width, heads, self.head_dim)
        x = torch.randn(self.blocks, self.context, self.width, generator=generator)
        rows = x.flatten(0, 1).double()
        second, mean = rows.T @ rows / len(rows), rows.mean(0)
        known = Statistics(second, mean, 10**6, Attended.assumed(second, mean), Blocks.whole(x.bfloat16())).to(
            torch.device(device)
        )
        return Attention(*projections, 0.1, rotary), known

    def allocation(self, folds: bool, rotary: Rotary | None) -> Allocation:
        """How a latent of this size is divided, with a stride of the frequencies rotary."""
        pairs = pairs_by_stride(self.rope, self.head_dim)
        return Allocation(self.rank, pairs, max(1, self.head_dim // self.rope) if folds else 1, rotary)


SMALL = Sizes(576, 3, 64, sample_for(576) // 512, 512, 96, 32)


def layer_cost(sizes: Sizes, device: str, rounds: int) -> Iterator[tuple[str, Cost]]:
    """What is done to one layer, and what it costs."""
    layer, known = sizes.drawn(device)
    merge = load_grouped("aligned").merge
    for target in (8, 1) if sizes.groups > 8 else (1,):
        yield f"aligned, to {target} KV heads", _cost(partial(merge, layer, target, known), device, rounds)
    for name in LATENT:
        how = load_latent(name)
        size = sizes.allocation(how.folds, layer.rotary)
        if how.measure:
            yield f"{name}, measure", _cost(partial(how.measure, layer, known), device, rounds)
        yield name, _cost(partial(how.factor, layer, size, known), device, rounds)
    yield from refit_cost(sizes, device, rounds)


def refit_cost(sizes: Sizes, device: str, rounds: int) -> Iterator[tuple[str, Cost]]:
    """The least squares of one layer, for the default methods."""
    layer, known = sizes.drawn(device)
    merged = load_grouped("aligned").merge(layer, 1, known)
    factored = load_latent("weighted").factor(layer, sizes.allocation(False, layer.rotary), known)
    for what, result in (("aligned, to 1 KV heads", merged), ("weighted", factored)):
        yield f"{what}, refitted", _cost(partial(refitted, layer, result, known.sample, known.attended), device, rounds)


def _cost(work: Callable[[], object], device: str, rounds: int) -> Cost:
    times = []
    trim_memory()
    with Watch() as memory:
        for _ in range(rounds + 1):
            start, used = time.monotonic(), time.process_time()
            work()
            times.append((_done(device) - start, time.process_time() - used))
    seconds, used = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return seconds, used, memory.peak


def _done(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def survey_only(model: Path, work: Path) -> None:
    """The survey of a checkpoint over random tokens, as `convert mla` makes it."""
    from convert.calibration.stream import LayerStream
    from convert.calibration.survey import survey
    from convert.checkpoint.loading import empty_model
    from convert.families import family_of
    from eval.inputs.reader import Reader
    from eval.inputs.sealed import Shelf
    from eval.inputs.source import Source

    source = Source.parse(str(model))
    blocks = torch.randint(source.config.vocab_size, (BLOCKS, CONTEXT), generator=torch.Generator().manual_seed(0))
    reader, family = Reader(model), family_of(source.config.model_type)
    text, device = Blocks.whole(blocks), torch.device("cpu")
    stream = LayerStream(empty_model(source.config), family, reader, text, work / "inputs", device)

    def record(layer: int) -> Attention:
        tensors = {name: reader[name] for name in family.of(source.config).shapes(layer)}
        found = family.of(source.config).split(tensors, layer)
        assert isinstance(found, Attention)
        return found

    survey(stream, Shelf(work, "source"), record, range(stream.num_layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--rope", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where to work; default: a temporary directory")
    parser.add_argument("--refit", action="store_true", help="only the refit")
    parser.add_argument("--survey", type=Path, nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.survey:
        survey_only(*args.survey)
        return
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}")
    print("\nCost per layer:\n")
    print("| device | width | KV heads | what | seconds | CPU seconds | MB |")
    print("| --- | --: | --: | --- | --: | --: | --: |")
    wide = [Sizes(width, groups, rank=args.rank, rope=args.rope) for width in args.widths for groups in (width // HEAD_DIM, 8)]
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for sizes in (SMALL, *wide):
            costs = refit_cost if args.refit or sizes is SMALL else layer_cost
            for what, (seconds, used, memory) in costs(sizes, device, args.rounds):
                where = f"{device} | {sizes.width} | {sizes.groups}"
                print(f"| {where} | {what} | {seconds:.2f} | {used:.2f} | {memory:.0f} |", flush=True)
    if args.refit:
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as work:
        model, shelf = Path(work, "model"), Path(work, "survey")
        build(model, HEADS, args.layers, 10**9)
        shelf.mkdir()
        _, imports = run([sys.executable, "-c", IMPORTS])
        seconds, peak = run([sys.executable, __file__, "--survey", str(model), str(shelf)])
    allowed = 2 * 4 * layer_parameters(HEADS) / 1e6 + 1000
    print(f"\nSurvey of {args.layers} layers of width {HEADS * HEAD_DIM} over {BLOCKS} × {CONTEXT} tokens: {seconds:.0f} s,")
    print(f"{peak - imports:.0f} MB anonymous beyond imports (allowed: two layers in float32 and 1 GB, {allowed:.0f} MB)")


if __name__ == "__main__":
    main()
