"""What vLLM generates from a checkpoint, as JSON: MODEL DTYPE TOKENS OUTPUT OPTIONS, and prompts as lists of ids on stdin.

It runs in a process of its own, because vLLM starts others, and keeps their settings.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    model, dtype, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    config = json.loads((Path(model) / "config.json").read_text())
    latent = "kv_lora_rank" in config | config.get("text_config", {})
    # What vLLM chooses for latents on CPUs with AMX takes bfloat16 alone.
    backend = {"attention_backend": "CPU_MLA"} if latent and dtype != "bfloat16" else {}
    engine = LLM(**{"model": model, "dtype": dtype, "seed": 0} | backend | json.loads(sys.argv[5]))
    prompts = [{"prompt_token_ids": ids} for ids in json.load(sys.stdin)]
    asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=1)
    results = engine.generate(prompts, asked)
    found = [result.outputs[0] for result in results]
    steps = [
        [(token, step[token].logprob) for token, step in zip(made.token_ids, made.logprobs, strict=True)] for made in found
    ]
    cached = sum(result.num_cached_tokens for result in results)
    Path(sys.argv[4]).write_text(json.dumps({"steps": steps, "cached": cached}))


if __name__ == "__main__":
    main()
