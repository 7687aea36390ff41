"""SDPA with values as wide as keys on a CPU, where torch has no other kernel that avoids the [B, H, T, S] probabilities.

Values of MLA are narrower than its keys. Padded with zeros they give the same output, 5 to 8 times faster at 512 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from attention.forward import widened
from attention.patch import is_latent

PADDED = "kvfold_sdpa_padded"


def pad_values(model: Any) -> Any:
    """Let latent attention that uses "sdpa" pad its values wherever it runs on a CPU. Other models stay as they are.

    Returns:
        `model` itself.
    """
    latent = any(is_latent(module) for module in model.modules())
    if latent and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(PADDED, _attend)
        AttentionMaskInterface.register(PADDED, sdpa_mask)
        model.set_attn_implementation(PADDED)
    return model


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    dims = value.shape[-1]
    if value.device.type == "cpu":
        value = widened(value, key.shape[-1])
    out, probabilities = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    return out[..., :dims], probabilities
