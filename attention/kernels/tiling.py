"""Chooses how much work one program of the Triton kernel does, by arithmetic on shared memory and registers.

No GPU was at hand: the sizes are reasoned, and checked against what Triton's compiler makes of them (shared memory for compute
capabilities 8.0 to 12.0; instructions of a tile, `benchmarks/decode_code.py`), but not tuned by running them.
`benchmarks/decode_cuda.py kernel --tilings` is there to do that.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Machine:
    """The properties of a GPU that a tiling depends on.

    Attributes:
        processors: Streaming multiprocessors.
        shared: Bytes of shared memory that a program may use.
        major: The major number of the compute capability, which decides the matrix instructions.
    """

    processors: int
    shared: int
    major: int


# The interpreter pretends to be this GPU, but with few processors, since it runs programs one after the other.
H200 = Machine(132, 227 * 1024, 9)
INTERPRETED = Machine(3, H200.shared, H200.major)


@lru_cache
def machine(device: torch.device) -> Machine:
    """The GPU of tensors on `device`; tensors on a CPU mean the interpreter."""
    if device.type != "cuda":
        return INTERPRETED
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some of it
    return Machine(found.multi_processor_count, found.shared_memory_per_block_optin, found.major)


@dataclass(frozen=True)
class Tiling:
    """The sizes of one launch.

    Attributes:
        block_h: Query heads per program; at least 16, the fewest rows of a matrix product.
        block_n: Tokens in a tile.
        stages: Depth of the pipeline of tiles, in Triton's `num_stages`.
        warps: Warps per program.
        programs: Programs that share the tiles.
        least: The fewest tiles that a program gets.
        swap: Whether both products are transposed.
    """

    block_h: int
    block_n: int
    stages: int
    warps: int
    programs: int
    least: int
    swap: bool = False


class Shape(NamedTuple):
    """The sizes and dtypes that a kernel is compiled for.

    Attributes:
        heads: H with a latent, H / G with keys and values that heads share.
        rank: R, or Dv.
        rope: P, or D.
        groups: G, or None with a latent.
        dtype: Of queries, of the cache and of what is computed.
        mask: The dtype of the mask, or None for calls without one.
    """

    heads: int
    rank: int
    rope: int
    groups: int | None
    dtype: torch.dtype
    mask: torch.dtype | None


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()


def padded(rank: int) -> int:
    """The rank rounded up to multiples of 64: in smaller chunks Triton's warps would repeat each other's work."""
    return -(-rank // 64) * 64


def _in_place(block_h: int, swap: bool) -> bool:
    """Whether wgmma does the products. It reads tiles in shared memory, so a pipeline of the same depth holds one tile more."""
    return swap or block_h == 64


def shared_bytes(tiling: Tiling, rank: int, rope: int, size: int) -> int:
    """The most bytes of shared memory that the attending kernel needs with a tiling from `choose`.

    Its loop holds tiles of latent and rotary key, queries, probabilities, values of an additive mask, and one number per
    head and warp. Operands of mma instructions leave shared memory before the next tile is loaded. After the loop the sums
    pass through it in fp32, one chunk at a time, before they are written.
    """
    width = padded(rank) + max(16, power_of_two(rope))
    tiles = (tiling.stages - (not _in_place(tiling.block_h, tiling.swap))) * tiling.block_n * width * size
    beside = tiling.block_h * ((width + tiling.block_n) * size + 4) + tiling.stages * tiling.block_n * 4
    widest = 1 << (padded(rank).bit_length() - 1)
    return max(tiles + beside, 4 * tiling.block_h * widest)


@lru_cache
def choose(heads: int, rank: int, rope: int, size: int, device: Machine) -> Tiling | None:
    """A tiling for H `heads` over a latent of R = `rank` and P = `rope` values of `size` bytes; None if none fits.

    - All heads go into one program, up to 64 with wgmma (compute capability 9), 32 without, as far as its sums (fp32, heads ×
      rank) leave room in 64K registers; more heads are served by programs side by side, which meet in the L2 cache.
    - Besides the read from memory, a tile's time depends on how often it passes through shared memory, at 128 bytes a cycle
      (benchmarks/decode_code.py). wgmma reads it once per product if no work is repeated: swapped, by one warpgroup, as long as
      that has registers for the sums. With mma each warp reads the queries again for each tile: the longer a tile, the better.
    - One program per multiprocessor. The bytes in flight while a tile is processed must cover bandwidth × latency, about
      4.3 TB/s × 0.8 µs / 132 = 26 KB each: at least two tiles, up to four where they fit, but long ones rather than many.
    - Tiles of 128 tokens only while scores and sums are small; below 64, and fewer heads, only if nothing larger fits.
      fp32 uses no matrix instructions, which costs registers.
    - A partial result takes 4 · heads · rank bytes to write, and is read again, mostly from L2. A program should not write more
      than it reads of the cache: this sets the fewest tiles per program, not the number of programs.
    """
    wgmma, width = size == 2 and device.major == 9, padded(rank)
    largest = max(16, min(power_of_two(heads), 64 if wgmma else 32, 64 * 576 // width))
    for block_h, block_n, tiles in product((64, 32, 16), (128, 64, 32, 16), (4, 3, 2)):
        swap = wgmma and block_n >= 64 and block_h * width <= 32 * 576
        longest = 512 // block_h if size > 2 else 128 if swap and block_h * width <= 16 * 256 else 64
        if block_h > largest or block_n > longest:
            continue
        programs = max(1, device.processors // -(-heads // block_h))
        least = -(-4 * block_h * rank // (block_n * (rank + rope) * size))
        stages = tiles + (not _in_place(block_h, swap))
        tiling = Tiling(block_h, block_n, stages, 4 if swap else 8, programs, least, swap)
        if shared_bytes(tiling, rank, rope, size) <= device.shared:
            return tiling
    return None
