"""What one decode step costs: the stock expansion of the cached latent against absorbed attention.

    python benchmarks/decode.py [--lengths 1024 4096 16384] [--chunks 1 2 4 … 256] [--rounds 15] [--dtype float32]

One random model with a neutral latent norm, as converted checkpoints have it (4 layers, 16 heads, rank 256 + 32 rotary dims,
sdpa attention; small vocabulary and MLP, so that attention is what is measured), one static cache filled with random numbers,
one process; the two take turns, and medians are reported. Prints Markdown tables: the whole step, the attention modules
alone, what a DynamicCache's copying costs, and from how many queries on expanding wins; and whether q_proj and
kv_a_proj_with_mqa of a 7B Llama's size (32 heads, 512 + 64) would be faster as one product.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from side_by_side import full, in_turns, load_at_the_end, machine, milliseconds
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from attention import absorb, restore
from attention.latent import absorbs

RANK, ROPE, NOPE, VALUE, HEADS, WIDTH, LAYERS = 256, 32, 64, 64, 16, 1024, 4
NORM = 2.0**20


def build(dtype: torch.dtype) -> Any:
    """A random DeepSeek-V3 shaped model without experts, channel 0 of its latent constant."""
    config = AutoConfig.for_model(
        "deepseek_v3", hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=VALUE,
        q_lora_rank=None, attention_bias=True, first_k_dense_replace=LAYERS, n_routed_experts=1, num_mtp_layers=0,
        vocab_size=256, max_position_embeddings=2**17, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    for layer in model.model.layers:
        down, norm = layer.self_attn.kv_a_proj_with_mqa, layer.self_attn.kv_a_layernorm
        with torch.no_grad():
            down.weight[0], down.bias[0], norm.weight[:] = 0, RANK**0.5 * NORM, NORM
            norm.weight[0] = 0
    return model


def static(model: Any, cached: int, queries: int = 1) -> Callable[[], Any]:
    """A function that gives a full static cache of which the last `queries` tokens can be written again and again."""
    workload = full(model, 1, cached)
    for layer in workload.cache.layers:
        layer.keys[..., 0] = 0  # the constant channel, as it always is

    def rewound() -> Any:
        workload.rewind(cached - queries)
        return workload.cache

    return rewound


def step(model: Any, cache: Callable[[], Any], queries: int = 1) -> Callable[[], None]:
    """A forward pass of the whole model over `queries` tokens."""
    ids = torch.randint(3, 256, (1, queries))
    return lambda: model(ids, past_key_values=cache(), use_cache=True)


def attention(model: Any, cache: Callable[[], Any], queries: int = 1) -> Callable[[], None]:
    """The attention modules of all layers, without anything between them."""
    hidden = torch.randn(1, queries, WIDTH, dtype=model.dtype)
    cached = cache().get_max_length()
    positions = torch.arange(cached - queries, cached)
    rotary = model.model.rotary_emb(hidden, positions[None])
    mask = (torch.arange(cached) <= positions[:, None])[None, None]

    def run() -> None:
        held = cache()
        for layer in model.model.layers:
            layer.self_attn(hidden, rotary, mask, past_key_values=held)

    return run


@torch.inference_mode()
def duel(model: Any, run: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median milliseconds of `run` with the stock modules and absorbed, in turns."""

    def absorbing() -> float:
        absorb(model, when="always")
        found = milliseconds(run)
        restore(model)
        return found

    stock, ours = in_turns((lambda: milliseconds(run), absorbing), rounds)
    return stock, ours


@torch.inference_mode()
def copying(model: Any, cached: int, rounds: int) -> float:
    """Median milliseconds that a DynamicCache takes to append one token in all layers: it copies everything before."""
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(static(model, cached)().layers):
        cache.update(layer.keys, layer.values, index)
    token = [torch.randn(1, 1, 1, dim, dtype=model.dtype) for dim in (RANK, ROPE)]

    def append() -> None:
        for layer in range(LAYERS):
            cache.update(*token, layer)

    return statistics.median(milliseconds(append) for _ in range(rounds))


def decode_tables(model: Any, lengths: list[int], rounds: int) -> None:
    print("| cached tokens | step, stock | step, absorbed | ratio | attention, stock | attention, absorbed | ratio "
          "| absorbed attention per 1k cached tokens | DynamicCache's copying, not included |")  # fmt: skip
    print("| --: " * 9 + "|")
    both = {}
    for cached in lengths:
        cache = static(model, cached)
        whole, alone = (duel(model, make(model, cache), rounds) for make in (step, attention))
        both[cached] = alone
        columns = [
            f"{ms:.2f} ms" if i < 2 else f"{ms:.1f}"
            for pair in (whole, alone)
            for i, ms in enumerate((*pair, pair[0] / pair[1]))
        ]
        columns += [f"{alone[1] / cached * 1024:.3f} ms", f"{copying(model, cached, rounds):.2f} ms"]
        print(f"| {cached} | " + " | ".join(columns) + " |", flush=True)
    short, long = min(lengths), max(lengths)
    if short < long:
        stock, ours = ((b - a) / (long - short) * 1024 for a, b in zip(both[short], both[long], strict=True))
        print(f"\nEvery further 1k cached tokens costs the attention {stock:.2f} ms stock, {ours:.2f} ms absorbed.")


def crossover_table(model: Any, lengths: list[int], chunks: list[int], rounds: int) -> None:
    """Attention alone; the choice of `attention.latent.absorbs` is in brackets."""
    print("| queries T | " + " | ".join(f"{cached} cached: stock / absorbed" for cached in lengths) + " |")
    print("| --: " * (1 + len(lengths)) + "|")
    for queries in chunks:
        columns = []
        for cached in lengths:
            stock, ours = duel(model, attention(model, static(model, cached, queries), queries), rounds)
            choice = "absorbs" if absorbs(queries, cached, RANK, NOPE, ROPE, VALUE) else "expands"
            columns.append(f"{stock:.1f} / {ours:.1f} ms = {stock / ours:.2f} ({choice})")
        print(f"| {queries} | " + " | ".join(columns) + " |", flush=True)


@torch.inference_mode()
def projections_table(dtype: torch.dtype, rounds: int) -> None:
    """Queries (32 heads of 128 + 64) and latents (512 + 64) of width 4096 as two products, and as one and a split."""
    wide, narrow, width = 32 * 192, 576, 4096
    weight = torch.randn(wide + narrow, width, dtype=dtype)
    apart = weight[:wide].clone(), weight[wide:].clone()
    print("| new tokens | two products | one | ratio |\n" + "| --: " * 4 + "|")
    for tokens in (1, 8, 32):
        x = torch.randn(tokens, width, dtype=dtype)
        products = (
            lambda x=x: [nn.functional.linear(x, each) for each in apart],
            lambda x=x: nn.functional.linear(x, weight).split((wide, narrow), -1),
        )
        two, one = in_turns([partial(milliseconds, product) for product in products], rounds)
        print(f"| {tokens} | {two:.2f} ms | {one:.2f} ms | {two / one:.2f} |", flush=True)


@torch.inference_mode()
def agreement(model: Any) -> float:
    """Largest difference between the logits of both, relative to the largest logit."""
    ids, cache = torch.tensor([[7]]), static(model, 512)
    stock = model(ids, past_key_values=cache()).logits
    ours = absorb(model, when="always")(ids, past_key_values=cache()).logits
    restore(model)
    return float((stock - ours).abs().max() / stock.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--crossover-rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = build(getattr(torch, args.dtype))
    print(f"{machine()}, {args.dtype}, {args.threads} threads")
    print(f"logits differ by {agreement(model):.1e} of the largest\n")
    decode_tables(model, args.lengths, args.rounds)
    if args.chunks:
        print()
        crossover_table(model, args.lengths, args.chunks, args.crossover_rounds)
    print()
    projections_table(getattr(torch, args.dtype), 2 * args.rounds)
    print(f"\n{load_at_the_end(args.threads)}")


if __name__ == "__main__":
    main()
