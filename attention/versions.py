"""What differs between the versions and classes of transformers that results run on."""

import inspect
from typing import Any

import torch
from transformers import LlamaForCausalLM

# The argument by which models take their cache, and the field of their outputs that has it: `past_key_values` up to 5.23.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def keep_caps(model: Any) -> Any:
    """Let a model that caps logits (arXiv 2408.00118) attend eagerly if transformers chose sdpa for it; returns `model`.

    Before 5.23 (5.19 was tried) transformers does choose sdpa, which then leaves the caps out without an error.
    """
    decoder = model.config.get_text_config(decoder=True)
    if getattr(decoder, "attn_logit_softcapping", None) is not None and decoder._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    return model


def logits_kept(model: Any, tokens: int | torch.Tensor) -> dict[str, Any]:
    """Return the argument that asks a model for the logits of its last tokens alone, or of those at indices `[n]`.

    The logits of a long text can be larger than the model. Some classes have no such argument, and make those of all tokens.
    """
    return {"logits_to_keep": tokens} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
