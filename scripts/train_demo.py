"""Train the checkpoint bundled in `convert/demo/python-5m-mha`: a small true-MHA Llama and its tokenizer.

    python scripts/train_demo.py convert/demo/python-5m-mha [--steps 2400] [--seed 0]

The text is the installed Python's own (convert/demo/showcase.py); modules named there are held out. On two CPU cores
the default takes about an hour with `MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483647`, and up to
twice as long without, since glibc then maps memory anew at every step. `training.json` beside the weights records the
Python version, the hash of the training tokens and the loss on the validation modules as it fell and flattened.
"""

import argparse
import hashlib
import importlib
import inspect
import json
import math
import platform
import sys
import time
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from convert.demo.showcase import HELD_OUT, VALIDATION, held_out_text, library

VOCABULARY, CONTEXT, BATCH, PEAK_RATE, WARM_UP = 2048, 512, 16, 2e-3, 100
END = "<|endoftext|>"
# Tests and vendored tools are repetitive; the last two rows are tables, not text.
_SKIPPED = {
    "site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "config",
    "encodings", "pydoc_data", "entities.py",
}  # fmt: skip


def training_documents() -> list[str]:
    """Documentation topics, built-in docstrings and library sources, without the held-out modules, in a fixed order."""
    return [*_topics(), *_docstrings(), *_sources()]


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items())]


def _docstrings() -> list[str]:
    documents = []
    for name in sorted(sys.builtin_module_names):
        with warnings.catch_warnings():  # some builds of Python have deprecated modules among these
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(name)
        members = [module, *(value for _, value in sorted(vars(module).items()) if callable(value))]
        text = "\n\n".join(doc for doc in map(inspect.getdoc, members) if doc)
        if text:
            documents.append(text)
    return documents


def _sources() -> list[str]:
    documents = []
    for path in sorted(library().rglob("*.py")):
        parts = path.relative_to(library()).parts
        name = parts[0].removesuffix(".py")
        if name in VALIDATION + HELD_OUT or any(part in _SKIPPED or part.startswith("config-") for part in parts):
            continue
        documents.append(path.read_text(encoding="utf-8", errors="replace"))
    return documents


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END, eos_token=END, model_max_length=CONTEXT)


def tokens(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    ids: list[int] = []
    for document in documents:
        ids += [tokenizer.eos_token_id, *tokenizer(document)["input_ids"]]
    return torch.tensor(ids)


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to zero, as a share of the peak."""
    warm = min(1.0, (step + 1) / WARM_UP)
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    blocks = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    losses = [model(x, labels=x).loss.item() * len(x) for x in blocks.split(BATCH)]
    return sum(losses) / len(blocks)


def train(model: LlamaForCausalLM, ids: torch.Tensor, validation: torch.Tensor, steps: int) -> list[dict[str, float]]:
    decay = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    curve, start = [], time.monotonic()
    for step in range(steps):
        offsets = torch.randint(len(ids) - CONTEXT, (BATCH,))
        x = torch.stack([ids[o : o + CONTEXT] for o in offsets])
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if (step + 1) % max(1, steps // 16) == 0:
            curve.append({"step": step + 1, "loss": round(held_out_loss(model, validation), 4)})
            print(f"step {step + 1}/{steps}: train {loss.item():.3f}, validation {curve[-1]['loss']:.4f}, "
                  f"{(step + 1) * BATCH * CONTEXT / (time.monotonic() - start):.0f} tokens/s", flush=True)  # fmt: skip
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    documents = training_documents()
    tokenizer = train_tokenizer(documents)
    ids = tokens(tokenizer, documents)
    validation = tokens(tokenizer, [held_out_text((name,)) for name in VALIDATION])
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=640, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    print(f"{len(ids)} training tokens, {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    curve = train(model, ids, validation, args.steps)
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    record = {
        "python": platform.python_version(), "torch": torch.__version__, "seed": args.seed, "steps": args.steps,
        "tokens_per_step": BATCH * CONTEXT, "training_tokens": len(ids),
        "validation_modules": VALIDATION, "held_out_modules": HELD_OUT,
        "training_token_hash": "sha256:" + hashlib.sha256(ids.to(torch.int32).numpy().tobytes()).hexdigest(),
        "validation_loss": curve,
    }  # fmt: skip
    (args.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
