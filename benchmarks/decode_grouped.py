"""What one decode step of grouped-query attention costs: as transformers runs it, and packed (`attention.pack`).

    python benchmarks/decode_grouped.py [--groups 16 8 4 2 1] [--length 16384] [--rounds 15] [--dtype float32]

Random Llamas (4 layers, 16 heads of 64, width 1024; small vocabulary and MLP, so that attention is what is measured), one
sequence, caches full of random numbers: a dynamic one, which comes without a mask, and a static one, which has one; the latter
also through torch.compile. Stock and packed take turns, medians are reported, and logits of both compared.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from side_by_side import full, in_turns, machine, milliseconds
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from attention import pack

HEADS, DIM = 16, 64


def build(groups: int, layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=HEADS * DIM, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=groups, vocab_size=256, max_position_embeddings=2**17, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def dynamic(model: Any, cached: int) -> Callable[[], torch.Tensor]:
    """A step over a DynamicCache, which is cut back after it; its copying is counted, as it is in use."""
    cache = DynamicCache(config=model.config)
    states = torch.randn(2, 1, model.config.num_key_value_heads, cached - 1, DIM, dtype=model.dtype)
    for layer in range(model.config.num_hidden_layers):
        cache.update(*states, layer)

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([[7]]), past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return step


def static(model: Any, cached: int, backend: str | None) -> Callable[[], torch.Tensor]:
    """A step, compiled by `backend` if there is one, that writes the last token of a full StaticCache again and again."""
    workload = full(model, 1, cached)
    if backend:
        workload.decode = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)

    def step() -> torch.Tensor:
        workload.to_last()
        return workload.step()

    return step


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 8, 4, 2, 1])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{machine()}, {args.dtype}, {args.layers} layers, {args.threads} threads, {args.length} tokens\n")
    print("| KV heads of 16 | dynamic, no mask: stock | packed | static: stock | packed | static, compiled: stock | packed |")
    print("| --: " * 7 + "|")
    for groups in args.groups:
        columns = []
        models = [build(groups, args.layers, getattr(torch, args.dtype)) for _ in range(2 if groups < HEADS else 1)]
        if groups < HEADS:
            pack(models[1])
        for way in (dynamic, partial(static, backend=None), partial(static, backend=args.backend)):
            torch.compiler.reset()
            torch.manual_seed(1)
            steps = [way(models[0], args.length)]
            torch.manual_seed(1)
            steps += [way(model, args.length) for model in models[1:]]
            stock, *ours = (step() for step in steps)
            assert all((each - stock).abs().max() <= 2e-2 * stock.abs().max() for each in ours)
            taken = in_turns([partial(milliseconds, step) for step in steps], args.rounds)
            columns += [f"{ms:.1f} ms" for ms in taken] + [""] * (2 - len(taken))
        print(f"| {groups} | " + " | ".join(columns) + " |", flush=True)


if __name__ == "__main__":
    main()
