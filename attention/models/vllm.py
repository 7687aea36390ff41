"""kvfold's class in vLLM: a plugin that vLLM loads where kvfold is installed beside it (entry point `vllm.general_plugins`).

vLLM's transformers backend builds the model, and gives it vLLM's attention and its cache: of KV heads, or of latents. Positions
that are added to scores (ALiBi), windows inside an attention, and windows and caps of logits beside a latent are not part of
that, and are refused.
"""

import logging
from typing import Any

from attention.calibrated import Calibrated

TRIED = "0.32"  # the version of vLLM in which it was run
# Stock classes around which vLLM was proven to generate what transformers does: with KV heads, and with a latent.
PROVEN = ("cohere", "gpt2", "gpt_neox", "olmo2", "opt", "qwen3")
LATENT_PROVEN = ("codegen", "cohere", "glm4", "gpt_neox", "gptj", "olmo2", "phi", "qwen3", "stablelm", "starcoder2")
_log = logging.getLogger("kvfold")


def register() -> None:
    """Make vLLM know the class. Each of its processes calls this, some of them twice; whatever fails here is only warned of."""
    try:
        import vllm

        from attention import models

        if not vllm.__version__.startswith(f"{TRIED}."):
            _log.warning(
                "kvfold's class was run in vLLM %s, and this is %s: checkpoints of that class do not start here",
                TRIED,
                vllm.__version__,
            )
        elif "KvfoldForCausalLM" not in vllm.ModelRegistry.get_supported_archs():
            models.register()
            _declare_latents(models.MODEL_TYPE)
            vllm.ModelRegistry.register_model("KvfoldForCausalLM", f"{__name__}_model:KvfoldForCausalLM")
            if vllm.platforms.current_platform.is_cpu():
                _refuse_dtypes()
    except Exception as error:  # other models have to start
        _log.warning("vLLM will not know kvfold's class: %s", error)


def _declare_latents(model_type: str) -> None:
    """Let vLLM cache one latent per token where a config of that type has one."""
    from vllm.transformers_utils import model_arch_config_convertor as sizes

    class Sizes(sizes.ModelArchConfigConvertorBase):  # type: ignore[misc]
        def is_deepseek_mla(self) -> bool:
            return getattr(self.hf_text_config, "kv_lora_rank", None) is not None

    sizes.MODEL_ARCH_CONFIG_CONVERTORS[model_type] = Sizes


def _refuse_dtypes() -> None:
    """Let AMX_MLA refuse dtypes that it does not list. vLLM gives it latents of any, and in float16 it generates wrong text."""
    import torch
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl

    begin = AMXMLAImpl.__init__

    def begin_in_its_dtypes(self: Any, *given: Any, **named: Any) -> None:
        if (dtype := torch.get_default_dtype()) not in AMXMLABackend.supported_dtypes:
            raise ValueError(f"AMX_MLA computes wrongly in {dtype}; give --dtype bfloat16 or --attention-backend CPU_MLA")
        begin(self, *given, **named)

    AMXMLAImpl.__init__ = begin_in_its_dtypes


def objection(config: Any) -> str | None:
    """Why vLLM does not run a checkpoint with this config of kvfold's class, or None if it does."""
    inner = config.text_config
    latent = getattr(inner, "kv_lora_rank", None) is not None
    proven = LATENT_PROVEN if latent else PROVEN
    if inner.model_type not in proven:
        kind = "latent attention" if latent else "grouped attention"
        return f"its {kind} is built around {inner.model_type}, which was not run there (these were: {', '.join(proven)})"
    if reason := rope_objection(inner):
        return reason
    if config.inner_windows is not None:
        return "it has windows inside its attention, which vLLM would leave out"
    if not latent and "sliding_attention" in (getattr(inner, "layer_types", None) or ()):
        return "it has sliding windows, for which vLLM's cache would be larger than planned"
    if config.kept_layers:
        return f"{len(config.kept_layers)} of its layers are as in its source, and vLLM caches one kind of attention"
    return None


def rope_objection(inner: Any) -> str | None:
    """Why vLLM does not rotate as a stock class with this config does, or None if it does: it runs all requests in one call."""
    scalings = getattr(inner, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (scalings, *scalings.values()) if isinstance(part, dict)}
    if found := sorted(kinds & {"dynamic", "longrope"}):
        return f"its RoPE ({found[0]}) depends on the length, and vLLM would take the longest of all requests"
    return None


def length_objection(config: Any, positions: int) -> str | None:
    """Why vLLM must not take so many positions, or None if it may: it multiplies those of config.json by RoPE's factor."""
    limited = Calibrated.of_config(config)
    if limited is None or positions <= limited.positions:
        return None
    return f"vLLM would take {positions:,} positions, and it is {limited}"


def latent_objection(attention: Any) -> str | None:
    """Why vLLM's latent attention does not compute what a layer's `KvfoldLatentAttention` does, or None if it does."""
    if attention.sliding_window is not None:
        return f"its attention sees {attention.sliding_window} tokens, and vLLM's latent attention sees all"
    if attention.softcap is not None:
        return f"its logits are capped at {attention.softcap}, which vLLM's latent attention leaves out"
    return None
