"""What calibration text gains in every family: a small model of each type is trained for a minute, converted and evaluated.

    python benchmarks/families.py TOKENIZER --text FILE [--seconds 60] [--rate 3e-3] [--types gpt2,opt,…]

Each model has 4 layers of width 128 with 4 KV heads of 32 dims, or a latent of 64 + 32. It is trained on the text's first
half, for so many seconds of CPU time, so that its steps depend on the machine. 8,192 tokens of that half calibrate; losses are
of 16,384 tokens of the second. A row shows the nats over the source without text and with it, for GQA with half of the KV
heads, MQA, and MLA with a quarter of the cache.
"""

import argparse
import logging
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import convert
from attention.errors import KvfoldError
from convert.families import FAMILIES
from eval import evaluate

CONTEXT, BATCH = 256, 8
CALIBRATION = {"calibration_tokens": 8192, "calibration_context": CONTEXT, "heal": 0}
EVALUATED = 16384
NOTHING = 0.0005  # nats: the model hardly uses its attention, or nothing is lost
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 512, "sliding_window": 64, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96,
}  # fmt: skip
# Where a class has names or defaults of its own.
OWN: dict[str, dict[str, Any]] = {
    "cohere2": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "logit_scale": 1.0},
    "cohere": {"logit_scale": 1.0},
    "falcon": {"multi_query": False, "new_decoder_architecture": False},
    "gemma": {"query_pre_attn_scalar": 32},
    "gpt_bigcode": {"multi_query": False, "n_head": 4, "n_inner": 384},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 64},
    "mpt": {"expansion_ratio": 3},
    "opt": {"ffn_dim": 384, "word_embed_proj_dim": 128},
    "xglm": {"ffn_dim": 384},
    "codegen": {"rotary_dim": 16},
    "gptj": {"rotary_dim": 16},
}
ALL: dict[str, Any] = {"all_layers": True}  # those with a window, too
TARGETS: dict[str, dict[str, Any]] = {"gqa": {"groups": 2} | ALL, "mqa": ALL, "mla": {"kv_budget": "25%"} | ALL}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a checkpoint or directory with a tokenizer of few words")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=3e-3, help="the learning rate, which is too high for some types")
    parser.add_argument("--types", default=",".join(sorted(name for name, family in FAMILIES.items() if family.has_heads)))
    args = parser.parse_args(arguments)
    types = [name.strip() for name in args.types.split(",")]
    if unknown := [name for name in types if name not in FAMILIES]:
        parser.error(f"these are no families: {', '.join(unknown)}")
    logging.getLogger("kvfold").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    threads, versions = torch.get_num_threads(), f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{platform.platform()}, {threads} threads, {versions}, {args.seconds:g} s each at {args.rate:g}, {args.text.name}\n")
    tokenizer, text = transformers.AutoTokenizer.from_pretrained(args.tokenizer), args.text.read_text(encoding="utf-8")
    halves = text[: len(text) // 2], text[len(text) // 2 :]
    print("Nats over the source, without text → with it:\n")
    print(f"| type | steps | perplexity | {' | '.join(TARGETS)} |\n|{' --- |' * (3 + len(TARGETS))}", flush=True)
    worse = []
    for model_type in types:
        with tempfile.TemporaryDirectory() as work:
            source = Path(work, model_type)
            steps = train(model_type, source, tokenizer, halves[0], args.seconds, args.rate)
            perplexity, nats = losses(source, *halves)
        cells = [" → ".join(f"{value:.4f}" for value in nats[target]) if target in nats else "-" for target in TARGETS]
        print(f"| {model_type} | {steps} | {perplexity:.2f} | {' | '.join(cells)} |", flush=True)
        worse += [
            f"{model_type} to {target}" for target, (without, calibrated) in nats.items() if calibrated > max(without, NOTHING)
        ]
    print(f"\nmore than {NOTHING} nats, and no less with text than without: {', '.join(worse) or 'none'}")


def config(model_type: str, tokenizer: Any) -> Any:
    """That of a small model of the type."""
    family = FAMILIES[model_type]
    values: dict[str, Any] = SIZES | OWN.get(model_type, {}) | {"vocab_size": len(tokenizer)}
    if not family.shares_heads:
        del values["num_key_value_heads"], values["head_dim"]
    default = transformers.AutoConfig.for_model(model_type)
    values |= {name: value for name, value in EXPERTS.items() if hasattr(default, name)}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return transformers.AutoConfig.for_model(model_type, **values, **special)


def train(model_type: str, path: Path, tokenizer: Any, text: str, seconds: float, rate: float, seed: int = 0) -> int:
    """Train a model of the type on `text` for so much CPU time and save it at `path`; returns the number of steps."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(model_type, tokenizer), dtype=torch.float32).train()
    tokenizer.save_pretrained(path)
    model.config.save_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)  # the config may choose another class, which splits otherwise
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    start, steps = time.process_time(), 0
    while (passed := (time.process_time() - start) / seconds) < 1:
        at = torch.randint(len(ids) - CONTEXT, (BATCH,)).tolist()
        rows = torch.stack([ids[first : first + CONTEXT] for first in at])
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (steps + 1) / 20) * max(0.02, 1 - passed)
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
    model.save_pretrained(path)
    return steps


def losses(source: Path, calibration: str, held_out: str) -> tuple[float, dict[str, tuple[float, float]]]:
    """The source's perplexity, and for each target that it has the nats over the source without text and with it."""
    made = []
    for target, options in TARGETS.items():
        for name, more in (("without", {}), ("with", {"text": [calibration]} | CALIBRATION)):
            output = source.with_name(f"{target}-{name}")
            try:
                getattr(convert, target)(source, output, **options, **more)
            except KvfoldError as error:
                print(f"{source.name} to {target}: {error}", file=sys.stderr)
            else:
                made.append(output)
    found = evaluate([source, *made], text=[held_out], context=CONTEXT, max_tokens=EVALUATED)["models"]
    nats = {Path(model["path"]).name: model["loss_nats"] for model in found}
    both = [target for target in TARGETS if {f"{target}-without", f"{target}-with"} <= nats.keys()]
    pairs = {target: (nats[f"{target}-without"], nats[f"{target}-with"]) for target in both}
    return found[0]["perplexity"], pairs


if __name__ == "__main__":
    main()
