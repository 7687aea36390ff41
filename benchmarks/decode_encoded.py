"""What a decode step and the prefill of a checkpoint cost over a cache in fewer bits, relative to a float32 cache.

    python benchmarks/decode_encoded.py MODEL … [--length 16384] [--prompt 2048] [--formats int8 int4 …] [--rounds 9]
                                                [--threads 2]

The other benchmarks of decoding run random models over static caches; formats are for dynamic caches, of any model. Weights are
float32, caches hold random numbers, and a step over each takes turns in one process, who is first changing; medians. There are
two float32 caches: transformers' own, which copies all of itself at every step, and the format float32, which does not.
A prefill reads a prompt in one call. Prints a Markdown table.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import in_turns, load_at_the_end, machine, milliseconds
from transformers import DynamicCache

from attention import load
from attention.encoded_forward import store_encoded, store_plain

_OWN = "none"


def stored(model: Any, form: str) -> Any:
    """`model` over caches of a format, or over transformers' own."""
    return store_plain(model) if form == _OWN else store_encoded(model, form)


def filled(model: Any, length: int, shapes: list[tuple[int, int]]) -> DynamicCache:
    """A cache of `length` tokens: one that the model reads, and random numbers for keys and values of `shapes`."""
    cache: DynamicCache = model(torch.tensor([[7]]), use_cache=True).past_key_values
    for layer in cache.layers:
        layer.update(*(torch.randn(1, heads, length - 1, size) for heads, size in shapes))
    return cache


@torch.inference_mode()
def measured(model: Any, forms: list[str], length: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step over a cache of each format, in turns."""
    token = torch.tensor([[7]])
    first = stored(model, _OWN)(token, use_cache=True).past_key_values.layers[0]
    shapes = [(part.shape[1], part.shape[3]) for part in (first.keys, first.values)]
    caches = {form: filled(stored(model, form), length, shapes) for form in forms}

    def step(form: str) -> float:
        return milliseconds(partial(stored(model, form), token, past_key_values=caches[form], use_cache=True))

    return dict(zip(forms, in_turns([partial(step, form) for form in forms], rounds), strict=True))


@torch.inference_mode()
def prefilled(model: Any, forms: list[str], length: int, rounds: int) -> dict[str, float]:
    """Median milliseconds to read a prompt into an empty cache of each format, in turns."""
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    forwards = [stored(model, form).forward for form in forms]
    works = [partial(forward, ids, use_cache=True, logits_to_keep=1) for forward in forwards]
    return dict(zip(forms, in_turns([partial(milliseconds, work) for work in works], rounds), strict=True))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "fp8", "int8", "int4", "int3", "int2"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    print(f"{machine()}, {args.threads} threads, {args.length} tokens, prompts of {args.prompt}\n")
    forms = [_OWN, "float32", *args.formats]
    print("| " + " | ".join(["model", *forms]) + " |\n" + "| --: " * (1 + len(forms)) + "|")
    for path in args.models:
        model = load(path, dtype="float32")
        for what, measure, length in (("step", measured, args.length), ("prefill", prefilled, args.prompt)):
            found = measure(model, forms, length, args.rounds)
            for title, base in (("ms", 1.0), ("of none", found[_OWN]), ("of float32", found["float32"])):
                figures = (f"{found[form] / base:.{1 if base == 1 else 2}f}" for form in forms)
                print(f"| {path.name}, {what}: {title} | " + " | ".join(figures) + " |", flush=True)
    print(f"\n{load_at_the_end(args.threads)}")


if __name__ == "__main__":
    main()
