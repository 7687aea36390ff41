"""How fast the CUDA kernels read the cache, and what a decode step of a whole model gains by them. Needs an NVIDIA GPU.

    python benchmarks/decode_cuda.py kernel [--heads 8 16 32 64] [--ranks 256 448 512] [--kv-heads 8 1] [--batches 1 8 32 128]
                                            [--lengths 1024 … 65536] [--dtype bfloat16] [--rounds 30] [--tilings]
    python benchmarks/decode_cuda.py model [--batch 8] [--length 8192] [--layers 32] [--steps 30]
    python benchmarks/decode_cuda.py interpret     # the checks of `kernel` at tiny sizes on a CPU, in Triton's interpreter

`kernel`: attention alone over random latents with 64 rotary dims, and over random keys and values of KV heads of 128, as one
CUDA graph, the L2 cache emptied before each run; each size is first checked against fp64 on fresh inputs (ragged batches,
allocations poisoned with NaN). A rate is bytes of the cache over the median time, and its ratio is to a device-to-device copy
of the same run, whose rate counts reading and writing; for KV heads torch's own attention stands beside it, packed as
transformers does it. `--tilings` also times other tile sizes than those that are reasoned out.

`model`: one decode step of random models of the size of a 7B Llama, compiled with CUDA graphs over full static caches: MHA,
GQA-8 as transformers runs it and packed, MLA of rank 512 + 64 expanded, absorbed in torch and in the kernel; at one batch for
all, and at about the largest that fits: reckoned from free memory, and lowered where it does not.
"""

import argparse
import gc
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

ROPE = 64
WIDTH, INNER, HEADS, HEAD, VOCABULARY = 4096, 11008, 32, 128, 32000
WAYS = {"mha": ("",), "gqa": ("", "packed"), "mla": ("expanded", "torch", "triton")}
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def scaling(dim: int) -> float:
    """Random scores of standard deviation about 3: neither uniform nor all on one token."""
    return float(3 * dim**-0.5)


class Latent(NamedTuple):
    """MLA: all heads over one latent and one rotary key."""

    heads: int
    rank: int
    batch: int
    cached: int

    @property
    def label(self) -> str:
        return f"{self.heads} | {self.rank}+{ROPE} | {self.batch} | {self.cached}"

    @property
    def tiled(self) -> tuple[int, int, int]:
        """Heads of a request, rank, rotary dims, as tilings are chosen by."""
        return self.heads, self.rank, ROPE

    @property
    def values(self) -> int:
        """What a step reads of the cache."""
        return self.batch * self.cached * (self.rank + ROPE)

    def tensors(self, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Random queries, then caches `[B, S, …]`."""
        heads, rank, batch, cached = self
        shapes = (batch, heads, 1, rank), (batch, heads, 1, ROPE), (batch, cached, rank), (batch, cached, ROPE)
        return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]

    def attend(self, tensors: list[torch.Tensor], mask: torch.Tensor, tiling: Any = None) -> torch.Tensor:
        from attention.kernels.triton_decode import mla_decode

        q, r, c, k = tensors
        return mla_decode(q, r, c, k, mask, scaling(self.rank + ROPE), tiling)

    def expected(self, tensors: list[torch.Tensor], b: int, seen: torch.Tensor) -> torch.Tensor:
        """One sequence in fp64: `[H, R]`."""
        q, r, c, k = (tensor[b].double() for tensor in tensors)
        latent, turned = c[seen], k[seen]
        scores = (q[:, 0] @ latent.T + r[:, 0] @ turned.T) * scaling(self.rank + ROPE)
        return scores.softmax(-1) @ latent

    def by_torch(self, tensors: list[torch.Tensor], mask: torch.Tensor) -> Callable[[], Any] | None:
        return None


class Grouped(NamedTuple):
    """GQA and MQA: heads in groups, over keys and values of their own each."""

    heads: int
    groups: int
    batch: int
    cached: int

    @property
    def label(self) -> str:
        return f"{self.heads} | {self.groups} KV heads | {self.batch} | {self.cached}"

    @property
    def tiled(self) -> tuple[int, int, int]:
        return self.heads // self.groups, HEAD, HEAD

    @property
    def values(self) -> int:
        return self.batch * self.cached * self.groups * 2 * HEAD

    def tensors(self, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Random queries, then caches `[B, G, S, D]`."""
        heads, groups, batch, cached = self
        shapes = (batch, heads, 1, HEAD), (batch, groups, cached, HEAD), (batch, groups, cached, HEAD)
        return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]

    def attend(self, tensors: list[torch.Tensor], mask: torch.Tensor, tiling: Any = None) -> torch.Tensor:
        from attention.kernels.triton_decode import gqa_decode

        q, k, v = tensors
        return gqa_decode(q, k, v, mask, scaling(HEAD), tiling)

    def expected(self, tensors: list[torch.Tensor], b: int, seen: torch.Tensor) -> torch.Tensor:
        """One sequence in fp64: `[H, D]`."""
        q, k, v = (tensor[b].double() for tensor in tensors)
        keys, values = (t[:, seen].repeat_interleave(self.heads // self.groups, 0) for t in (k, v))
        return ((q @ keys.mT * scaling(HEAD)).softmax(-1) @ values)[:, 0]

    def by_torch(self, tensors: list[torch.Tensor], mask: torch.Tensor) -> Callable[[], Any] | None:
        from attention.kernels.torch_decode import decode_grouped

        return partial(decode_grouped, *tensors, mask, scaling(HEAD))


Case = Latent | Grouped


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is allocated without a value is NaN, or a number that no index should be."""
    empty = torch.empty

    def fill(*shape: Any, **options: Any) -> torch.Tensor:
        out = empty(*shape, **options)
        return out.fill_(torch.nan if out.is_floating_point() else -(2**30))

    torch.empty = fill
    try:
        yield
    finally:
        torch.empty = empty


def check(case: Case, tensors: list[torch.Tensor], tiling: Any = None) -> str:
    """Largest relative error of a ragged batch; exits where it, the cosine distance, or the places of NaN are wrong."""
    device, batch, cached = tensors[0].device, case.batch, case.cached
    first, end = torch.randint(0, cached, (2, batch, 1), device=device).sort(0).values
    first[0], end[0] = 0, cached
    columns = torch.arange(cached, device=device)
    mask = ((columns >= first) & (columns <= end))[:, None, None]
    with poisoned():
        found = case.attend(tensors, mask, tiling)
    worst, distance = 0.0, 0.0
    for b in range(0, batch, max(1, batch // 4)):
        truth = case.expected(tensors, b, mask[b, 0, 0])
        ours = found[b, :, 0].double()
        worst = max(worst, float((ours - truth).norm() / truth.norm()))
        distance = max(distance, float((1 - torch.nn.functional.cosine_similarity(ours, truth, -1)).abs().max()))
    bound = TOLERANCE[str(found.dtype)[6:]]
    if not bool(found.isfinite().all()) or not worst < bound or not distance < bound:
        sys.exit(f"wrong: {case}: error {worst:.1e}, cosine distance {distance:.1e}, finite {bool(found.isfinite().all())}")
    return f"{worst:.0e}"


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` as a CUDA graph, so that launching it costs next to nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def milliseconds(run: Callable[[], Any], rounds: int, before: Callable[[], Any]) -> list[float]:
    """Times of `run`, sorted, by events on the device; `before` each, off the clock; three more warm up."""
    times = []
    for turn in range(3 + rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        if turn >= 3:
            times.append(start.elapsed_time(stop))
    return sorted(times)


def copy_rate(rounds: int, flush: torch.Tensor) -> float:
    """GB/s of a copy within the device, reading and writing counted."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = milliseconds(lambda: target.copy_(source), rounds, flush.zero_)
    return 2 * source.nbytes / statistics.median(times) / 1e6


def tilings(case: Case, size: int) -> list[Any]:
    """The tiling that is reasoned out, first, and others around it that fit."""
    from attention.kernels.tiling import choose, machine, shared_bytes

    device = machine(torch.device("cuda", torch.cuda.current_device()))
    heads, rank, rope = case.tiled
    ours = choose(heads, rank, rope, size, device)
    if ours is None:
        return []
    found = [ours]
    for block_n, stages, warps, share, swap in product((16, 32, 64, 128), (2, 3, 4, 5), (4, 8), (1, 2), (False, True)):
        programs = ours.programs * share
        other = replace(ours, block_n=block_n, stages=stages, warps=warps, programs=programs, swap=swap)
        fits = shared_bytes(other, rank, rope, size) <= device.shared // share
        if fits and other not in found and not (swap and (block_n < 64 or size > 2)):
            found.append(other)
    return found


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for heads, batch, cached in product(args.heads, args.batches, args.lengths):
        yield from (Latent(heads, rank, batch, cached) for rank in args.ranks)
        yield from (Grouped(heads, groups, batch, cached) for groups in args.kv_heads if groups < heads)


@torch.inference_mode()
def kernel(args: argparse.Namespace) -> None:
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")  # some times the L2 cache
    dtype = getattr(torch, args.dtype)
    copy = copy_rate(args.rounds, flush)
    print(f"device-to-device copy: {copy:.0f} GB/s\n")
    print("| heads | cache | batch | cached | error | µs | 10 to 90 % | GB/s | of copy | torch, of copy | tiling |")
    print("| --: " * 10 + "| --- |")
    for case in cases(args):
        size = case.values * dtype.itemsize
        if size > 0.8 * torch.cuda.mem_get_info()[0]:
            print(f"| {case.label} | does not fit |" + " |" * 6)
            continue
        tensors = case.tensors(dtype, "cuda")
        # A whole static cache: the mask is read as in a model, and lets every token through.
        mask = torch.ones(case.batch, 1, 1, case.cached, dtype=torch.bool, device="cuda")
        plain = case.by_torch(tensors, mask)
        beside = "" if plain is None else f"{size / median_of(plain, args.rounds, flush)[0] / 1e6 / copy:.2f}"
        for tiling in tilings(case, dtype.itemsize)[: None if args.tilings else 1]:
            try:
                off = check(case, tensors, tiling)
            except Exception as error:  # of Triton or the driver; other tilings may do
                print(f"| {case.label} | does not launch: {reason(error)} |" + " |" * 5 + f" {tiling} |", flush=True)
                continue
            median, low, high = median_of(partial(case.attend, tensors, mask, tiling), args.rounds, flush)
            rate = size / median / 1e6
            print(f"| {case.label} | {off} | {median * 1e3:.1f} | {low * 1e3:.1f} to {high * 1e3:.1f} "
                  f"| {rate:.0f} | {rate / copy:.2f} | {beside} | {tiling} |", flush=True)  # fmt: skip
    print(f"\ndevice-to-device copy at the end: {copy_rate(args.rounds, flush):.0f} GB/s")


def median_of(run: Callable[[], Any], rounds: int, flush: torch.Tensor) -> tuple[float, float, float]:
    """Milliseconds of `run` as a CUDA graph: median, 10 and 90 %."""
    times = milliseconds(captured(run), rounds, flush.zero_)
    return statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10]


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def build(kind: str, layers: int, device: str, **changes: Any) -> Any:
    """A random model: "mha" or "gqa" of Llama's class, "mla" of DeepSeek-V3's without experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common: dict[str, Any] = {
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2**17, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "mla":
        common |= {
            "num_key_value_heads": common["num_attention_heads"], "kv_lora_rank": 512, "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": HEAD, "v_head_dim": HEAD, "q_lora_rank": None, "first_k_dense_replace": layers,
            "n_routed_experts": 1, "num_mtp_layers": 0, "attention_bias": True,
        }  # fmt: skip
    else:
        common["num_key_value_heads"] = common["num_attention_heads"] if kind == "mha" else 8
    config = AutoConfig.for_model("deepseek_v3" if kind == "mla" else "llama", **(common | changes))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def bytes_per_token(model: Any) -> int:
    from attention.spec import AttentionSpec

    return AttentionSpec.from_config(model.config).bytes_per_token(str(model.dtype).removeprefix("torch."))


def timed_steps(model: Any, batch: int, cached: int, rounds: int) -> list[float]:
    """Milliseconds of compiled decode steps over a full cache, again and again at the same place."""
    from side_by_side import full

    workload = full(model, batch, cached)
    workload.decode = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    return milliseconds(workload.step, rounds, before=workload.to_last)


def forget() -> None:
    """Give back what compiled steps hold: caches, and pools of CUDA graphs."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def largest(model: Any, args: argparse.Namespace, expanded: bool) -> int:
    """About the most sequences that fit, a multiple of 8; not below `args.batch`."""
    needed = bytes_per_token(model) * args.length
    # An expanding step makes the keys and values of all heads of one layer, and copies them to join rotary parts.
    if expanded:
        needed += 4 * args.length * HEADS * (HEAD + ROPE) * model.dtype.itemsize
    return max(args.batch, int(0.85 * torch.cuda.mem_get_info()[0] / needed) // 8 * 8)


@torch.inference_mode()
def model(args: argparse.Namespace) -> None:
    from attention import absorb, pack, restore

    print("| model | KV bytes a token | batch | ms a step | 10 to 90 % | tokens/s |\n" + "| --- |" + " --: |" * 5)
    for kind in ("mha", "gqa", "mla"):
        built = build(kind, args.layers, "cuda")
        for way in WAYS[kind]:
            restore(built)
            if way == "packed":
                pack(built)
            elif way in ("torch", "triton"):
                absorb(built, when="always", backend=way)
            forget()
            row, most = f"| {kind} {way} | {bytes_per_token(built)} |", largest(built, args, way == "expanded")
            fits = measure(built, row, args.batch, args)
            while fits and most > args.batch and not measure(built, row, most, args):
                most = int(0.9 * most) // 8 * 8
        del built
        forget()


def measure(built: Any, row: str, batch: int, args: argparse.Namespace) -> bool:
    """Print the row of one batch; false, and nothing held, where memory does not suffice."""
    from eval.machine.device import out_of_memory

    try:
        times = timed_steps(built, batch, args.length, args.steps)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        times = []
    forget()
    if not times:
        print(f"{row} {batch} | does not fit | | |", flush=True)
        return False
    median, low, high = statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10]
    print(f"{row} {batch} | {median:.2f} | {low:.2f} to {high:.2f} | {batch / median * 1e3:.0f} |", flush=True)
    return True


@torch.inference_mode()
def interpret(_: argparse.Namespace) -> None:
    for case, dtype in (
        (Latent(8, 48, 3, 70), "float32"),
        (Latent(40, 112, 2, 40), "float16"),
        (Latent(2, 320, 2, 50), "float32"),
        (Grouped(8, 2, 3, 70), "float16"),
    ):
        off = check(case, case.tensors(getattr(torch, dtype), "cpu"))
        print(f"{case}, {dtype}: relative error {off}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    alone = commands.add_parser("kernel")
    alone.add_argument("--heads", type=int, nargs="+", default=[8, 16, 32, 64])
    alone.add_argument("--ranks", type=int, nargs="+", default=[256, 448, 512])
    alone.add_argument("--kv-heads", type=int, nargs="*", default=[8, 1])
    alone.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    alone.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 16384, 32768, 65536])
    alone.add_argument("--dtype", choices=TOLERANCE, default="bfloat16")
    alone.add_argument("--rounds", type=int, default=30)
    alone.add_argument("--tilings", action="store_true")
    alone.set_defaults(run=kernel)
    whole = commands.add_parser("model")
    whole.add_argument("--batch", type=int, default=8)
    whole.add_argument("--length", type=int, default=8192)
    whole.add_argument("--layers", type=int, default=32)
    whole.add_argument("--steps", type=int, default=30)
    whole.set_defaults(run=model)
    commands.add_parser("interpret").set_defaults(run=interpret)
    args = parser.parse_args(arguments)
    if args.run is interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        sys.exit("no CUDA device is to be seen: nothing was measured (`interpret` checks the kernel on a CPU)")
    torch.manual_seed(0)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{device}, {platform.platform()}, torch {torch.__version__}", flush=True)
    args.run(args)


if __name__ == "__main__":
    main()
