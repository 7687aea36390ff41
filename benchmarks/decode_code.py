"""What Triton's compiler makes of the decode kernel, and what that says of its speed: no GPU is needed.

    python benchmarks/decode_code.py [--capability 80|90] [--heads ...] [--ranks ...] [--grouped]
                                     [--tiling BLOCK_H BLOCK_N STAGES WARPS SWAP]

bf16, a mask of bool, contiguous caches, 64 rotary dims; with `--grouped` keys and values of KV heads in place of a latent,
where `--heads` are those that share a KV head and `--ranks` its dims. Counted are the instructions of the loop over tiles, and
from them cycles of a multiprocessor a tile: what passes through shared memory at 128 bytes a cycle (copies into it, fragments,
operands of wgmma), and multiply-adds at 1,024 a cycle for mma and 2,048 for wgmma. Beside them, how long a tile takes to arrive
at the share of the memory's bandwidth that a multiprocessor has. The three overlap at best: a kernel cannot reach the memory's
speed where one of the first two is longer than the last, and can where both are well below it. Latencies are not counted, nor
is anything outside of the loop.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from attention.kernels import split_kv
from attention.kernels.tiling import H200, Machine, Tiling, choose
from attention.kernels.triton_decode import gqa_decode, mla_decode

ROPE, SIZE = 64, 2


class Gpu(NamedTuple):
    """A machine with the bandwidth that copies reach on it, and its clock under load; both by its data sheet, rounded."""

    name: str
    machine: Machine
    bytes_per_second: float
    hertz: float


GPUS = {
    80: Gpu("A100", Machine(108, 163 * 1024, 8), 1.7e12, 1.41e9),
    90: Gpu("H200", H200, 4.2e12, 1.75e9),
}


class Code(NamedTuple):
    """A compiled kernel: its instructions, shortest loop with matrix products first, and what it takes."""

    loop: list[str]
    registers: int
    stack: int
    shared: int


def compiled(heads: int, rank: int, rope: int, tiling: Tiling, capability: int, groups: int | None) -> Code:
    """The attending kernel, by the way that a GPU of `capability` would have it compiled."""
    loaded: dict[str, Any] = {}

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    triton.runtime.driver.set_active(Driver())
    CompiledKernel.__getitem__ = lambda self, grid: loaded.__setitem__(self.name, self)
    split_kv.launch = lambda kernel, grid, *given, **options: kernel.warmup(*given, grid=grid, **options)[grid]
    empty, mask = partial(torch.empty, dtype=torch.bfloat16, device="meta"), torch.empty(1, 1, 1, 48, dtype=torch.bool)
    if groups:
        cached = empty(1, groups, 48, rope), empty(1, groups, 48, rank)
        gqa_decode(empty(1, heads * groups, 1, rope), *cached, mask, 1.0, tiling)
    else:
        cached = empty(1, 48, rank), empty(1, 48, rope)
        mla_decode(empty(1, heads, 1, rank), empty(1, heads, 1, rope), *cached, mask, 1.0, tiling)
    kernel = loaded["_attend"]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        listing, usage = (disassembled(path, option) for option in ("-sass", "-res-usage"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Code(loop_of(listing), int(found[1]), int(found[2]), kernel.metadata.shared)


def disassembled(path: Path, option: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loop_of(listing: str) -> list[str]:
    """The instructions of the shortest loop that has matrix products: from where a branch goes back to, up to it."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", listing)]
    loops = []
    for at, text in lines:
        back = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if back and int(back[1], 16) < at:
            body = [re.sub(r"^@!?U?P\w+\s+", "", each) for place, each in lines if int(back[1], 16) <= place <= at]
            if any("MMA" in each for each in body):
                loops.append(body)
    return min(loops, key=len)


def cycles(loop: list[str], warps: int) -> tuple[float, float]:
    """Of a multiprocessor a tile: shared memory, matrix products."""
    moved = products = 0.0
    for instruction in loop:
        name = instruction.split()[0]
        if wgmma := re.match(r"HGMMA\.64x(\d+)x16", name):
            width, groups = int(wgmma[1]), warps / 4
            # What comes first is read from shared memory unless a register other than the sum's stands before the other.
            rows = 0 if re.match(r"\S+ R\d+, R\d+,", instruction) else 64
            moved += groups * (rows + width) * 16 * SIZE
            products += groups * 64 * width * 16 / 2048
        elif name.startswith("HMMA.16816"):
            products += warps * 16 * 8 * 16 / 1024
        elif name.startswith(("LDSM", "STSM")):
            moved += warps * 128 * int(name.rsplit(".", 1)[-1])
        elif name.startswith(("LDGSTS", "STS", "LDS")):
            bits = re.search(r"\.(128|64)\b", name)
            moved += warps * 32 * (int(bits[1]) // 8 if bits else 4)
    return moved / 128, products


def row(heads: int, rank: int, rope: int, tiling: Tiling, capability: int, groups: int | None) -> str:
    gpu, code = GPUS[capability], compiled(heads, rank, rope, tiling, capability, groups)
    count = Counter(instruction.split()[0].split(".")[0] for instruction in code.loop)
    moved, products = cycles(code.loop, tiling.warps)
    arrival = tiling.block_n * (rank + rope) * SIZE / (gpu.bytes_per_second / gpu.machine.processors / gpu.hertz)
    tile = f"{tiling.block_h} × {tiling.block_n}, {tiling.warps}" + (", swapped" if tiling.swap else "")
    return (
        f"| {heads} × {rank} | {tile} | {tiling.stages} | {code.shared:,} | {code.registers} | {code.stack} "
        f"| {count['LDL'] + count['STL']} | {len(code.loop)} | {moved:.0f} | {products:.0f} | {arrival:.0f} |"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, choices=GPUS, default=90)
    parser.add_argument("--heads", type=int, nargs="+")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--grouped", action="store_true")
    parser.add_argument("--tiling", type=int, nargs=5, help="instead of what is reasoned out")
    args = parser.parse_args(arguments)
    gpu = GPUS[args.capability]
    print(f"Triton {triton.__version__} for {gpu.name}\n")
    print(
        "| heads × rank | heads × tokens, warps | stages | shared memory | registers | stack, bytes | of it in the loop "
        "| instructions | shared memory, cycles | products, cycles | arrival, cycles |\n| --- | --- |" + " --: |" * 9
    )
    for rank in args.ranks or ([64, 80, 128, 256] if args.grouped else [112, 256, 320, 448, 512, 576, 704]):
        rope, groups = (rank, 8) if args.grouped else (ROPE, None)
        for heads in args.heads or ([4, 32] if args.grouped else [8, 32, 64]):
            tiling = choose(heads, rank, rope, SIZE, gpu.machine)
            if args.tiling:
                block_h, block_n, stages, warps, swap = args.tiling
                tiling = Tiling(block_h, block_n, stages, warps, gpu.machine.processors, 1, bool(swap))
            if tiling is None:
                sys.exit(f"{heads} heads of rank {rank} do not fit")
            print(row(heads, rank, rope, tiling, args.capability, groups), flush=True)


if __name__ == "__main__":
    main()
