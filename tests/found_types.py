"""Small configs of the model types that experiments read."""

from typing import Any

import tiny
from transformers import CONFIG_MAPPING, AutoConfig

from convert.families import reading

SIZES: dict[str, Any] = tiny.SIZES | {
    "num_hidden_layers": 4, "pad_token_id": tiny.VOCABULARY - 1, "moe_intermediate_size": 16, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_topk": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "num_key_value_heads": 8,
}  # fmt: skip
_SEES_AND_HEARS: dict[str, Any] = {
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                      "image_size": 28, "crop_size": 28},
    "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 4,
                     "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32},
}  # fmt: skip
# Granite 4 without Mamba layers and experts.
_DENSE = {"layer_types": ["attention"] * 4, "num_local_experts": 0, "shared_intermediate_size": 32, "mamba_n_heads": 8,
          "mamba_d_head": "auto", "position_embedding_type": "rope"}  # fmt: skip
BESIDES: dict[str, dict[str, Any]] = {  # by type
    "granitemoehybrid": _DENSE,
    "phi4_multimodal": _SEES_AND_HEARS,
    **dict.fromkeys((name for name in reading.COUNTED if name != "deepseek_v2"), LATENT),
}  # fmt: skip
FOUND = [name for name in reading.FOUND if name in CONFIG_MAPPING]  # some came after the oldest transformers
LATENTS = [name for name, besides in BESIDES.items() if besides is LATENT and name in CONFIG_MAPPING]  # are refused
UNSHARED = ("gpt-sw3", "modernbert-decoder", "persimmon")  # their classes ignore the number of KV heads
SINKS = [name for name in ("gpt_oss", "granite_swa", "granitemoe_swa", "flint") if name in FOUND]  # whose heads have sinks
# Types that kvfold's class has no latent for: norms behind RoPE, senses, and a config that other sizes do not fit.
WITHOUT_LATENT = ("hunyuan_v1_moe", "nanochat", "phi4_multimodal", "granitemoehybrid", *SINKS)
SHARING = [name for name in FOUND if name not in UNSHARED]


def small(model_type: str, **changes: Any) -> Any:
    sizes = SIZES | BESIDES.get(model_type, {}) | changes
    if model_type in UNSHARED:
        sizes = {name: value for name, value in sizes.items() if name not in ("num_key_value_heads", "head_dim")}
    return AutoConfig.for_model(model_type, **sizes)
