"""How much of the work one program of the Triton kernel takes: plain arithmetic about shared memory and registers.

No GPU was at hand: the sizes are reasoned, and checked against what Triton's compiler reports for sm_90 (shared memory,
registers, spills), but not tuned by running them. `benchmarks/decode_cuda.py --tilings` is there to do that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class Machine:
    """What of a GPU a tiling depends on: streaming multiprocessors, and bytes of shared memory a program may have."""

    processors: int
    shared: int


# Also what the interpreter pretends to run on, but with few processors: it runs programs one after the other.
H200 = Machine(132, 227 * 1024)
INTERPRETED = Machine(3, H200.shared)


@lru_cache
def machine(device: torch.device) -> Machine:
    """The GPU that tensors on `device` live on; CPU tensors can only mean the interpreter."""
    if device.type != "cuda":
        return INTERPRETED
    found: Any = torch.cuda.get_device_properties(device)  # not all of it is typed
    return Machine(found.multi_processor_count, found.shared_memory_per_block_optin)


@dataclass(frozen=True)
class Tiling:
    """Sizes of one launch.

    Attributes:
        block_h: Query heads a program serves; at least 16, the fewest rows of a matrix product.
        block_n: Tokens in a tile.
        stages: Depth of the pipeline of tiles, as Triton counts it.
        warps: Warps of a program.
        programs: Programs among which the tiles are dealt out.
        least: Fewest tiles worth a program.
    """

    block_h: int
    block_n: int
    stages: int
    warps: int
    programs: int
    least: int


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`, which is positive."""
    return 1 << (number - 1).bit_length()


def shared_bytes(tiling: Tiling, rank: int, rope: int, size: int) -> int:
    """Shared memory that the attending kernel needs at most.

    With 16 or 32 heads operands of mma instructions leave shared memory before the next tile is asked for; with 64 heads
    wgmma reads tiles in place, so that a pipeline as deep holds one more.
    """
    tiles = tiling.stages - (tiling.block_h < 64)
    return tiles * _tile(tiling.block_n, rank, rope, size) + _fixed(tiling.block_h, tiling.block_n, rank, rope, size)


def _tile(block_n: int, rank: int, rope: int, size: int) -> int:
    """Bytes of a tile: latent, rotary key and what an additive mask says of its tokens."""
    return block_n * ((rank + max(16, power_of_two(rope))) * size + 4)


def _fixed(block_h: int, block_n: int, rank: int, rope: int, size: int) -> int:
    """Bytes beside the tiles: queries, probabilities, a number a head."""
    return block_h * ((rank + max(16, power_of_two(rope)) + block_n) * size + 4)


@lru_cache
def choose(heads: int, rank: int, rope: int, size: int, device: Machine) -> Tiling | None:
    """A tiling for H `heads` over a latent of R = `rank` and P = `rope` values of `size` bytes; None where none fits.

    - All heads go into one program up to 64, as far as its sums (fp32, heads × rank) leave room in 64K registers; more
      heads are served by programs side by side, which meet in the L2 cache. fp32 goes without matrix instructions, which
      costs registers: 32 heads at most, and shorter tiles.
    - One program a multiprocessor. What is in flight while a tile is worked on must cover bandwidth × latency, about
      4.3 TB/s × 0.8 µs / 132 = 26 KB each: at least two tiles (18 to 74 KB each in half precision), four where they fit.
    - 64 tokens a tile while sums are small, else 32: beyond, the compiler reports spilled registers. 16, and fewer heads,
      are for GPUs and dtypes with room for no more.
    - A partial costs 4 · heads · rank bytes to write, and is read again, mostly from L2. A program shall not write more
      than it reads of the cache: this bounds the fewest tiles a program gets, not their number.
    """
    largest = max(16, min(power_of_two(heads), 64 if size == 2 else 32, 64 * 576 // rank))
    for block_h in (64, 32, 16):
        if block_h > largest:
            continue
        programs = max(1, device.processors // -(-heads // block_h))
        longest = 512 // block_h if size > 2 else 64 if block_h * rank <= 32 * 320 else 32
        for block_n in (64, 32, 16):
            if block_n > longest:
                continue
            room = device.shared - _fixed(block_h, block_n, rank, rope, size)
            tiles = min(4, room // _tile(block_n, rank, rope, size))
            if tiles >= 2:
                least = -(-4 * block_h * rank // (block_n * (rank + rope) * size))
                return Tiling(block_h, block_n, tiles + (block_h < 64), 8, programs, least)
    return None
