"""Stock DeepSeek-V3 without experts: the host of MLA for sources that are built like Llama.

Its class (arXiv 2412.19437; transformers' `deepseek_v3`) caches the latent and one rotary key, and normalises the latent,
which a converted attention does not want. A constant channel switches that off: a zero row of W_DKV with bias √R · 2^k makes
the root mean square of the latent 2^k, and norm weights of 2^k undo it by an exponent shift. The constant's own norm weight
is 0, so that it is cached as 0. `kv_lora_rank` counts it: what the config says is what the cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from attention.record import Attention, FactoredAttention
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family

# Blocks of RMSNorm, attention, RMSNorm and SwiGLU with plain residuals, under Llama's names; each is tested to be exact.
_LIKE_LLAMA = ("llama", "mistral", "ministral", "cwm", "seed_oss", "smollm3", "helium", "ernie4_5")
# Frequencies that are a list, or two (LongRoPE); `dynamic` makes them a function of the length.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
_EXPONENT = 20
_CARRIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "tie_word_embeddings",
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


class DeepseekV3:
    """Writes `deepseek_v3` configs and weights: q_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj."""

    name = "deepseek_v3"
    loads_in = "transformers"
    opened_by = "transformers ≥ 5.23 loads it without kvfold, and caches the latent and the rotary key alone."
    remarks = (
        "Stock transformers expands the whole cached latent at every decoded token. kvfold's `attention` package does not:\n"
        '`model = attention.load("path/to/this/directory")`, or `attention.absorb(model)` for a model that is loaded.',
        "Run it in bfloat16 or float32: the constant that switches the latent norm off overflows in float16, unless\n"
        "`attention.load` opens it, which leaves that norm out.",
        "Biases of `kv_a_proj_with_mqa` and `o_proj` are part of it. The DeepSeek classes of vLLM, SGLang and llama.cpp have\n"
        "no place for them, and some drop them without a word: they would give wrong text. An engine that runs transformers'\n"
        "own modules keeps them.",
    )
    replaces = "factored into kv_a_proj_with_mqa and kv_b_proj"
    families: frozenset[str] | None = frozenset(_LIKE_LLAMA)

    def model_type(self, family: Family) -> str:
        return "deepseek_v3"

    def module(self, family: Family, layer: int) -> str:
        return f"model.layers.{layer}.self_attn"

    def output(self, family: Family, layer: int) -> str:
        return f"{self.module(family, layer)}.o_proj"

    def drops(self, name: str) -> str | None:
        return "RoPE's frequencies are in config.json" if name.endswith("rotary_emb.inv_freq") else None

    def refuses(self, family: Family, config: Any, target: AttentionSpec, dtype: str) -> str | None:
        parameters = getattr(config, "rope_parameters", None) or {}
        if self.families is not None and family.model_type not in self.families:
            return f"its blocks are Llama's, and those of {family.model_type} are not (it carries {', '.join(_LIKE_LLAMA)})"
        if parameters.get("rope_type") not in _ROPE_TYPES:
            return f"RoPE of type {parameters.get('rope_type', 'per layer type')!r} is no fixed list of frequencies"
        traits = family.traits(config)
        if traits.qkv_bias:
            return "queries have biases, for which the class has no place"
        if traits.qk_norm:
            return "queries and keys are normalised, and a norm does not commute with mixing heads"
        if any(getattr(config, flag, False) for flag in ("mlp_bias", "use_bias")):
            return "the MLP has biases, for which the class has no place"
        if not traits.layers_with_rotary:
            return "no layer has RoPE, and the class has a rotary key in each"
        if dtype == "float16":
            return f"its latent norm needs constants above 2^{_EXPONENT}, and float16 ends at 65504 (use --dtype bfloat16)"
        return _refuses_window(traits.beyond, config)

    def reserved(self, kv_lora_rank: int) -> int:
        return len(constants(kv_lora_rank))

    def config(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        assert rotary is not None
        kept = {key: getattr(config, key) for key in _CARRIED if hasattr(config, key)}
        named = {key: raw[key] for key in ("dtype", "torch_dtype") if key in raw}
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **named,
            **kept,
            "num_key_value_heads": target.num_heads,
            "kv_lora_rank": target.kv_lora_rank,
            "q_lora_rank": None,
            "qk_nope_head_dim": target.head_dim,
            "qk_rope_head_dim": target.qk_rope_head_dim,
            "v_head_dim": target.head_dim,
            "attention_bias": True,
            "rope_interleave": True,
            "rope_parameters": rope_parameters(rotary, config),
            # All layers dense: no expert is ever built.
            "first_k_dense_replace": target.num_layers,
            "n_routed_experts": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": config.intermediate_size,
            "num_nextn_predict_layers": 0,
        }

    def shapes(self, family: Family, config: Any, target: AttentionSpec, layer: int) -> dict[str, tuple[int, ...]]:
        heads, dim, width = target.num_heads, target.head_dim, config.hidden_size
        rank, rope = target.kv_lora_rank or 0, target.qk_rope_head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "q_proj.weight": (heads * (dim + rope), width),
            "kv_a_proj_with_mqa.weight": (rank + rope, width),
            "kv_a_proj_with_mqa.bias": (rank + rope,),
            "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (heads * 2 * dim, rank),
            "o_proj.weight": (width, heads * dim),
            "o_proj.bias": (width,),
        }
        return {f"{self.module(family, layer)}.{name}": shape for name, shape in shapes.items()}

    def tensors(
        self, family: Family, attention: Attention | FactoredAttention, target: AttentionSpec, layer: int
    ) -> dict[str, torch.Tensor]:
        assert isinstance(attention, FactoredAttention)
        assert attention.q_nope_bias is None, "`refuses` lets no query bias through"
        a, rank = attention, target.kv_lora_rank or 0
        # The class scales by (D + P)^-½.
        scale = a.scale * math.sqrt(a.q_nope.shape[1] + a.q_rope.shape[1])
        constant = a.down.new_tensor(constants(rank)) * 2.0**_EXPONENT
        padding = a.down.new_zeros(rank - a.down.shape[0], a.down.shape[1])
        zeros = a.down.new_zeros(rank - len(constant))
        norm = torch.cat((zeros + 2.0**_EXPONENT, torch.zeros_like(constant)))
        up = torch.nn.functional.pad(torch.cat((a.up_k, a.up_v), 1), (0, len(padding)))  # [H, 2 D, R]
        tensors = {
            "q_proj.weight": (torch.cat((a.q_nope, a.q_rope), 1) * scale).flatten(0, 1),
            "kv_a_proj_with_mqa.weight": torch.cat((a.down, padding, a.k_rope)),
            "kv_a_proj_with_mqa.bias": torch.cat((zeros, constant, _or_zeros(a.k_rope_bias, a.k_rope[:, 0]))),
            "kv_a_layernorm.weight": norm,
            "kv_b_proj.weight": up.flatten(0, 1),
            "o_proj.weight": a.o.flatten(1),
            "o_proj.bias": _or_zeros(a.o_bias, a.o[:, 0, 0]),
        }
        return {f"{self.module(family, layer)}.{name}": tensor for name, tensor in tensors.items()}


def constants(rank: int) -> list[float]:
    """The constant channels, without their 2^k, that make the root mean square of R channels one.

    One, √R, if its rounding to bfloat16 errs by less than half a unit in the last place of every bfloat16 (1/510 upwards,
    1/512 downwards), for then dividing by the root mean square rounds back to the very bits that there were. Otherwise
    two: √R rounded down, and what its square lacks, which leaves an error of about 2⁻¹⁶.
    """
    root = math.sqrt(rank)
    error = root / _bfloat16(root) - 1
    if -1 / 512 + 1e-6 < error < 1 / 510 - 1e-6:
        return [root]
    significand, exponent = math.frexp(root)
    first = math.floor(significand * 2**8) * 2.0 ** (exponent - 8)
    return [first, math.sqrt(rank - first**2)]


def rope_parameters(rotary: Rotary, config: Any) -> dict[str, Any]:
    """The config's entry for any list of frequencies: the default formula's, if they are that, else LongRoPE's factors.

    LongRoPE computes 1 / (factor · θ^(2i/P)); with θ = 1 a factor is one over a frequency, rounded once.
    """
    exponents = torch.arange(0, rotary.dims, 2, dtype=torch.float64) / rotary.dims
    theta = config.rope_parameters["rope_theta"]
    default = torch.allclose(rotary.frequencies, theta**-exponents, rtol=1e-6, atol=0)
    if default and rotary.long_frequencies is None:
        return {"rope_type": "default", "rope_theta": theta}
    long = rotary.frequencies if rotary.long_frequencies is None else rotary.long_frequencies
    return {
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "short_factor": (1 / rotary.frequencies).tolist(),
        "long_factor": (1 / long).tolist(),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": rotary.long_beyond or config.max_position_embeddings,
    }


def _refuses_window(beyond: Mapping[str, Any], config: Any) -> str | None:
    """Why a source's peculiarities (`Traits.beyond`) do not fit; a window that no position exceeds is none."""
    for field, value in beyond.items():
        if field != "sliding_window":
            return f"config.json sets {field} to {value}, which the class does not know"
        if value < config.max_position_embeddings:
            return (
                f"it attends within windows of {value} of its {config.max_position_embeddings} positions, and the class to "
                f"all (for shorter contexts only: set max_position_embeddings to {value} in config.json)"
            )
    return None


def _bfloat16(value: float) -> float:
    return float(torch.tensor(value).bfloat16())


def _or_zeros(bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if bias is None else bias


HOST = DeepseekV3()
