"""kvfold's class in vLLM: a plugin that vLLM loads where kvfold is installed beside it (entry point `vllm.general_plugins`).

vLLM's transformers backend builds the model, and gives it vLLM's attention and its cache of KV heads. Caches of latents,
positions that are added to scores (ALiBi) and windows inside an attention are not part of that, and are refused.
"""

from __future__ import annotations

import logging
from typing import Any

TRIED = "0.32"  # the version of vLLM in which it was run
# Stock classes around which vLLM was proven to generate what transformers does.
PROVEN = ("cohere", "gpt2", "gpt_neox", "olmo2", "opt", "qwen3")
_log = logging.getLogger("kvfold")


def register() -> None:
    """Make vLLM know the class. Each of its processes calls this, some of them twice; whatever fails here is only warned of."""
    try:
        import vllm

        import attention.models  # noqa: F401  # from then on transformers' Auto classes know the config

        if not vllm.__version__.startswith(f"{TRIED}."):
            _log.warning(
                "kvfold's class was run in vLLM %s, and this is %s: checkpoints of that class do not start here",
                TRIED,
                vllm.__version__,
            )
        elif "KvfoldForCausalLM" not in vllm.ModelRegistry.get_supported_archs():
            vllm.ModelRegistry.register_model("KvfoldForCausalLM", f"{__name__}_model:KvfoldForCausalLM")
    except Exception as error:  # other models have to start
        _log.warning("vLLM will not know kvfold's class: %s", error)


def objection(config: Any) -> str | None:
    """Why vLLM does not run a checkpoint with this config of kvfold's class, or None if it does."""
    inner = config.text_config
    if getattr(inner, "kv_lora_rank", None) is not None:
        return "vLLM would cache keys and values of every head in place of its latent"
    if config.inner_windows is not None:
        return "it has windows inside its attention, which vLLM would leave out"
    if inner.model_type not in PROVEN:
        return f"it is built around {inner.model_type}, which was not run there (these were: {', '.join(PROVEN)})"
    return None
