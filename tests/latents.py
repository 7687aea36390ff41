"""What tests of conversions to latent attention share: sizes, ways to make it, and when logits are the same."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from attention.record import FactoredAttention
from attention.reference import latent_attention
from convert.families.latent import constants
from convert.methods import LATENT

SMALL = ["--kv-lora-rank", 16, "--qk-rope-head-dim", 8]
# `weighted` runs with text or without it; with text, queries and outputs are refitted.
WAYS = (*LATENT, "weighted with text")


def full_size(kv_heads: int, dim: int, width: int = 64) -> list[Any]:
    """The options of full size: every component is rope, and the latent holds all the rest."""
    channels = min(width, kv_heads * dim)
    rank = next(r for r in range(channels, channels + 3) if r - len(constants(r)) >= channels)
    return ["--kv-lora-rank", rank, "--qk-rope-head-dim", kv_heads * dim]


def method_options(way: str, text: Path) -> list[Any]:
    name, _, with_text = way.partition(" with ")
    given = {"pca": ["--text", text], "weighted": ["--text", text, "--calibration-tokens", 384]}
    return ["--method", name, *(given[name] if name == "pca" or with_text else [])]


def tolerance(way: str) -> float:
    """Where least squares have had their say: their ridge keeps what is exact, but rounding is fitted too."""
    return 1e-3 if way == "weighted with text" else 1e-4


def stock_module_computes(config: Any, tensors: Mapping[str, torch.Tensor], record: FactoredAttention) -> None:
    """DeepSeek-V3's own attention with a layer's tensors computes the record, as the reference says it."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    module = DeepseekV3Attention(config, 0)
    module.load_state_dict({name.removeprefix("model.layers.0.self_attn."): t for name, t in tensors.items()}, strict=True)
    x = torch.randn(2, 7, config.hidden_size, generator=torch.Generator().manual_seed(9))
    mask = torch.full((7, 7), -math.inf).triu(1)[None, None]
    with torch.no_grad():
        found = module(x, DeepseekV3RotaryEmbedding(config)(x, torch.arange(7)[None]), mask)[0]
    torch.testing.assert_close(found, latent_attention(x, record), rtol=1e-4, atol=1e-4)


def same_logits(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """To `tolerance` of the largest logit: those of random weights reach tens, and fp32 is relative."""
    assert torch.isfinite(found).all()
    assert float((found - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def logits_of(path: Path, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(ids).logits
