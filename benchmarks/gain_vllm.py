"""What vLLM's CPU build reaches, for gain.py: MODEL CONTEXT BATCH STEPS; it prints a line of JSON.

Prompts differ, and are read once for their time. Their blocks then stay in the prefix cache, so that decoding is timed alone:
what one token takes is subtracted from what 1 + STEPS tokens take.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "8")  # GB; a sequence takes whole blocks of 128 tokens
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> None:
    from vllm import LLM, SamplingParams

    model, (context, batch, steps) = sys.argv[1], map(int, sys.argv[2:])
    settings = {"dtype": "bfloat16", "max_model_len": context + steps + 1, "enable_prefix_caching": True, "seed": 0}
    record = Path(model) / "conversion.json"  # which has the command that serves a result
    eager = record.exists() and "--enforce-eager" in record.read_text(encoding="utf-8")
    engine = LLM(model=model, enforce_eager=eager, **settings)
    words = engine.get_tokenizer().vocab_size
    prompts = [{"prompt_token_ids": random.choices(range(words), k=context)} for _ in range(batch)]

    def seconds(tokens: int) -> float:
        asked, begun = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False), time.perf_counter()
        engine.generate(prompts, asked, use_tqdm=False)
        return time.perf_counter() - begun

    reading, first = seconds(1), seconds(1)
    decoding = seconds(1 + steps) - first
    print(json.dumps({"prompt": batch * context / reading, "decode": batch * steps / decoding}))


if __name__ == "__main__":
    main()
