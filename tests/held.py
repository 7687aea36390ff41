"""Sources of latents in kvfold's class and in others, with their sizes; and what tests of results ask of them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from tiny import ROPES
from transformers import AutoModelForCausalLM

from attention.models import MODEL_TYPE
from attention.versions import keep_caps
from convert.families import FAMILIES
from convert.families.latent import constants
from convert.hosts.kvfold import HOST, LATENT_HOST
from convert.planning.budget import LatentBounds
from eval.inputs.source import Source

SLIDING = ["sliding_attention"] * 3
PLAIN: dict[str, dict[str, Any]] = {  # Leave out what DeepSeek-V3's class cannot hold, such as windows.
    "smollm3": {"no_rope_layers": [1, 1, 1]},
    "mistral": {"sliding_window": 128},
    "ministral": {"sliding_window": 128, "layer_types": SLIDING},
    "cwm": {"sliding_window": 128, "layer_types": SLIDING},
}
GLOBAL = {"attention_types": [[["global"], 3]]}
ONE: dict[str, tuple[str, dict[str, Any]]] = {  # by GPT-2's blocks, one KV head
    "gpt2": ("gpt2", {}),
    "gpt2, without a scale": ("gpt2", {"scale_attn_weights": False, "num_attention_heads": 4}),
    "gpt2, logits divided by the layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "num_hidden_layers": 2}),
    "gpt2, four times the width": ("gpt2", {"n_inner": None, "tie_word_embeddings": False}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neo": ("gpt_neo", GLOBAL | {"num_attention_heads": 4}),
    "gpt_neo, windows of all positions": ("gpt_neo", {"window_size": 128, "num_attention_heads": 4}),
    "opt": ("opt", {}),
    "opt, a GELU": ("opt", {"activation_function": "gelu_new"}),
}


class Row(NamedTuple):
    """A source, and the class that holds what is made of it.

    Attributes:
        model_type: The source's.
        holds: The result's, in its config.json.
        changes: Fields of the source's config.
        groups: KV heads of a result with fewer of them, of which all others are copies.
        options: Those of the conversion to fewer KV heads.
        kept: Layers that stay as they are. All others are converted, also those with windows.
        tolerance: Of its logits, relative to the largest; below 1e-6 they are computed in fp64.
    """

    model_type: str
    holds: str
    changes: Mapping[str, Any] = MappingProxyType({})
    groups: int = 0
    options: tuple[Any, ...] = ()
    tolerance: float = 1e-4
    kept: tuple[int, ...] = ()

    @property
    def layers(self) -> list[Any]:
        """The options for those that are converted."""
        return ["--all-layers", *(["--keep-layers", ",".join(map(str, self.kept))] if self.kept else [])]


DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
MIXED: dict[str, Any] = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
YARN = DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# What no stock class of latent attention can hold, of families that one can hold otherwise.
BEYOND: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True, "attention_bias": True},
    "mistral": {"sliding_window": 7},
    "ministral": {"sliding_window": 7, "layer_types": ["sliding_attention"] * 3},
    "ernie4_5": {"use_bias": True, "mlp_bias": True},
    "gemma": {"rope_parameters": ROPES["dynamic"]},
    "helium": {"mlp_bias": True},
    **dict.fromkeys(("cohere2", "exaone4", "gemma3_text"), MIXED),
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 0.5},
    "vaultgemma": {"attn_logit_softcapping": 0.5},
    "olmo3": MIXED | {"rope_parameters": {"sliding_attention": DEFAULT, "full_attention": YARN}},
    "cwm": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "phi3": {"sliding_window": 7},
    "gpt_neo": {"window_size": 7},
    "qwen2": {"sliding_window": 7, "use_sliding_window": True, "layer_types": None, "max_window_layers": 1},
    "seed_oss": {"mlp_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1], "mlp_bias": True},
}
IGNORING = sorted(name for name in HOST.families if not FAMILIES[name].shares_heads)
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 12}
# Families whose class shares heads before a norm or a clamp, and kvfold's behind it.
BEHIND: dict[str, dict[str, Any]] = {
    "apertus": {},
    "cohere": {"use_qk_norm": True},
    "exaone4": ALTERNATING,
    "gemma3_text": ALTERNATING,
    "mpt": {"attn_config": {"clip_qkv": 0.3}},
    "olmo": {"clip_qkv": 0.3},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "olmoe": {"clip_qkv": 0.5},
    "phi": {"qk_layernorm": True},
    "qwen3": {"attention_bias": True},
    "qwen3_moe": {},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
}
NO_ROPE = ("biogpt", "bloom", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "opt", "xglm")
NORM_SWITCHES = {"cohere": {"use_qk_norm": True}, "phi": {"qk_layernorm": True}, "stablelm": {"qk_layernorm": True}}
CLIPPED: dict[str, dict[str, Any]] = {  # to less than most of what is projected
    "mpt": {"attn_config": {"clip_qkv": 0.5}},
    "olmo": {"clip_qkv": 0.5},
    "olmoe": {"clip_qkv": 0.5},
}


def latent_of(case: str) -> Row:
    """Of a model type, perhaps with QK-norm or a clamp: "olmo, clipped"; in kvfold's class."""
    name, _, also = case.partition(", ")
    more = {"": {}, "QK-norm": NORM_SWITCHES, "clipped": CLIPPED}[also].get(name, {})
    return Row(name, MODEL_TYPE, {**BEYOND.get(name, {}), **more})


def sized(rank: int, rope: int) -> list[Any]:
    return ["--kv-lora-rank", rank, *(["--qk-rope-head-dim", rope] if rope else [])]


def full(source: Path, row: Row) -> list[Any]:
    """The options of full size: every rotary component, all the rest in the latent, and beside it what a stock class needs."""
    read = Source.parse(str(source))
    family = FAMILIES[row.model_type].of(read.config)
    rotaries = [family.rotary(layer) for layer in range(3)]
    rope = family.spec.num_kv_heads * max((rotary.dims for rotary in rotaries if rotary), default=0)
    rank = LatentBounds(read, family, LATENT_HOST).full_rank(rope)
    if row.holds != MODEL_TYPE:
        rank = next(r for r in range(rank, rank + 3) if r - len(constants(r)) >= rank)
    return sized(rank, rope) + row.layers


def small(row: Row) -> list[Any]:
    return sized(24, 0 if row.model_type in NO_ROPE else 4) + row.layers


def stock(path: Path, **arguments: Any) -> Any:
    """The class as transformers loads it, not absorbed."""
    return keep_caps(AutoModelForCausalLM.from_pretrained(path, **arguments)).eval()


def said(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits
