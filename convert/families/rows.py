"""The rows of families whose heads are stacked in the output rows of projections (`convert.families.heads`).

What a class does beyond the canonical record (windows, soft-capping, …) is listed, too, so that a host other than the source's
own class can refuse it.
"""

from typing import Any

from convert.families.base import CLIP, SOFTCAP
from convert.families.heads import BEHIND_ROPE, BY_KV_HEAD, IN_BLOCKS, NormRow, Projections, nowhere
from convert.families.names import (
    EXPERTS,
    FUSED_MLP,
    GPT2,
    GPTJ,
    LLAMA,
    MLP,
    NORMS_AROUND,
    NORMS_BEHIND,
    NUMBERED_EXPERTS,
    WITHOUT_GAINS,
    Row,
    in_llama,
    like_opt,
    megatron,
)
from convert.families.projections import PARTS


def _no_rope_layers(config: Any, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])  # 1 means that the layer has RoPE, despite the name


def _sliding_layers(config: Any, layer: int) -> bool:
    return config.sliding_window is not None and config.layer_types[layer] == "sliding_attention"


def _sliding_or_no_window(config: Any, layer: int) -> bool:
    return config.sliding_window is None or config.layer_types[layer] == "sliding_attention"


_BY_LENGTH = "its class scales RoPE by a factor that depends on the length, and keys from a latent have no such factor"
_WINDOW = ("sliding_window",)
_BIDIRECTIONAL = ("use_bidirectional_attention",)  # of embedding models: records are causal
_LIKE_GPTJ: dict[str, Any] = {
    "names": GPTJ,
    "projections": (*PARTS, "out_proj"),
    "pairing": "interleaved",
    "rotary_dims": "rotary_dim",
    "adds_output": False,
    "shares_heads": False,
    "attention_path": "transformer.h.{layer}.attn",
    "base": "transformer",
    "computed": ("inv_freq", ".attn.bias", ".attn.masked_bias", ".attn.causal_mask"),  # masks of old checkpoints
}
_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_GRANITE: dict[str, Any] = {**_ATTENTION_BIAS, "adds_output": False, "scaled_by": "attention_multiplier"}
_COHERE: dict[str, Any] = {**_ATTENTION_BIAS, "adds_output": False, "pairing": "interleaved", "rope_stride": 2}
_LIKE_OPT: dict[str, Any] = {"projections": (*PARTS, "out_proj"), "rotates": nowhere, "shares_heads": False}
_POST_NORM: dict[str, Any] = {"names": NORMS_BEHIND, "adds_output": False}
_GEMMA2: dict[str, Any] = {**_ATTENTION_BIAS, "scaled_by": "query_pre_attn_scalar", "scale_power": -0.5}

MEGATRON: dict[str, Any] = {"projections": ("query_key_value", "dense"), "order": BY_KV_HEAD, "shares_heads": False}

ROWS = [
    Projections("llama", **_ATTENTION_BIAS),
    Projections("arcee", **_ATTENTION_BIAS),
    *(Projections(model_type, extra_features=_WINDOW) for model_type in ("cwm", "mistral", "ministral")),
    Projections("mixtral", names=NUMBERED_EXPERTS, extra_features=_WINDOW),
    Projections("qwen2", qkv_bias=True, extra_features=_WINDOW),  # None or 0 in these, if `use_sliding_window` is off
    Projections(
        "qwen2_moe",
        names=EXPERTS.replacing(
            in_llama("mlp.shared_expert_gate", "mlp.shared_router"),
            *(in_llama(f"mlp.shared_expert.{part}_proj", f"mlp.shared.{part}") for part in MLP),
        ),
        qkv_bias="qkv_bias",
        extra_features=_WINDOW,
    ),
    Projections("qwen3", **_ATTENTION_BIAS, norm=NormRow(), extra_features=_WINDOW),
    Projections("qwen3_moe", names=EXPERTS, **_ATTENTION_BIAS, norm=NormRow(), extra_features=_WINDOW),
    Projections("seed_oss", qkv_bias="attention_bias", o_bias="attention_out_bias"),
    Projections(
        "smollm3", **_ATTENTION_BIAS, rotates=_no_rope_layers, extra_features=_WINDOW, extra_switch="use_sliding_window"
    ),
    Projections("granite", **_GRANITE),
    Projections(
        "granitemoe",
        names=LLAMA.replacing(
            in_llama("block_sparse_moe.router.layer", "mlp.router"),
            in_llama("block_sparse_moe.input_linear", "mlp.experts.gate", "mlp.experts.up"),
            in_llama("block_sparse_moe.output_linear", "mlp.experts.down"),
        ),
        **_GRANITE,
    ),
    Projections(
        "hyperclovax",
        names=LLAMA.replacing(in_llama("post_norm1", "attention_output_norm"), in_llama("post_norm2", "mlp_output_norm")),
        **_GRANITE,
    ),
    Projections("gemma", names=LLAMA.storing_gains_less_one(), **_ATTENTION_BIAS, extra_features=_BIDIRECTIONAL),
    Projections(
        "gemma2",
        names=NORMS_AROUND.storing_gains_less_one(),
        adds_output=False,
        **_GEMMA2,
        extra_features=(SOFTCAP, *_WINDOW, *_BIDIRECTIONAL),
    ),
    Projections(
        "vaultgemma",
        names=LLAMA.replacing(in_llama("pre_feedforward_layernorm", "mlp_norm")).storing_gains_less_one(),
        **_GEMMA2,
        extra_features=(SOFTCAP, *_WINDOW),
    ),
    Projections(
        "gemma3_text",
        names=NORMS_AROUND.storing_gains_less_one(),
        adds_output=False,
        **_GEMMA2,
        norm=NormRow(gain_offset=1.0),
        extra_features=(*_WINDOW, *_BIDIRECTIONAL),
        required_values=((SOFTCAP, None, f"config.json sets {SOFTCAP}, which its class of transformers ignores"),),
    ),
    Projections("olmo", names=WITHOUT_GAINS, **_ATTENTION_BIAS, extra_features=(CLIP,)),
    Projections("olmo2", **_POST_NORM, **_ATTENTION_BIAS, norm=NormRow(storage="flat")),
    Projections("olmo3", **_POST_NORM, **_ATTENTION_BIAS, norm=NormRow(storage="flat"), extra_features=_WINDOW),
    Projections("olmoe", names=EXPERTS, **_ATTENTION_BIAS, norm=NormRow(storage="flat"), extra_features=(CLIP,)),
    Projections("exaone4", **_POST_NORM, norm=NormRow(), rotates=_sliding_or_no_window, extra_features=_WINDOW),
    Projections(
        "apertus",
        names=LLAMA.replacing(
            in_llama("attention_layernorm", "attention_norm"),
            in_llama("feedforward_layernorm", "mlp_norm"),
            in_llama("mlp.act_fn", "mlp.activation"),
        ),
        **_ATTENTION_BIAS,
        norm=NormRow(),
    ),
    Projections(
        "hunyuan_v1_dense",
        **_ATTENTION_BIAS,
        norm=NormRow("query_layernorm", "key_layernorm", after_rotary=True),
        without_latent=BEHIND_ROPE,
    ),
    Projections("jais2", **_ATTENTION_BIAS),
    Projections(
        "starcoder2",
        names=LLAMA.replacing(in_llama("mlp.c_fc", "mlp.up"), in_llama("mlp.c_proj", "mlp.down")),
        qkv_bias="use_bias",
        o_bias="use_bias",
        extra_features=_WINDOW,
    ),
    Projections("nemotron", names=LLAMA.storing_gains_less_one(), **_ATTENTION_BIAS, partial_rotary=True),
    Projections(
        "stablelm",
        adds_output=False,
        qkv_bias="use_qkv_bias",
        partial_rotary=True,
        norm=NormRow("q_layernorm", "k_layernorm", kind="layer", storage="list", switch="qk_layernorm", eps="layer_norm_eps"),
    ),
    Projections(
        "phi",
        names=LLAMA.replacing(
            in_llama("mlp.fc1", "mlp.up"),
            in_llama("mlp.fc2", "mlp.down"),
            Row("model.final_layernorm", ("final_norm",)),
        ),
        adds_output=False,
        qkv_bias=True,
        partial_rotary=True,
        o_bias=True,
        projections=(*PARTS, "dense"),
        norm=NormRow("q_layernorm", "k_layernorm", kind="layer", switch="qk_layernorm", eps="layer_norm_eps", bias=True),
    ),
    Projections("phimoe", names=NUMBERED_EXPERTS, **_ATTENTION_BIAS, without_latent=_BY_LENGTH, extra_features=_WINDOW),
    Projections("cohere", **_COHERE, norm=NormRow(kind="layer", storage="matrix", switch="use_qk_norm", eps="layer_norm_eps")),
    Projections("cohere2", **_COHERE, rotates=_sliding_layers, extra_features=_WINDOW),
    Projections("glm", names=FUSED_MLP, qkv_bias="attention_bias", pairing="interleaved", partial_rotary=True),
    Projections(
        "glm4",
        names=FUSED_MLP.replacing(
            in_llama("post_self_attn_layernorm", "attention_output_norm"),
            in_llama("post_mlp_layernorm", "mlp_output_norm"),
        ),
        adds_output=False,
        qkv_bias="attention_bias",
        pairing="interleaved",
        partial_rotary=True,
    ),
    Projections("helium", qkv_bias="attention_bias", pairing="interleaved"),
    Projections(
        "opt",
        names=like_opt("model.decoder", "final_layer_norm").replacing(
            Row("model.decoder.project_in", ("embedding_projection",)),
            Row("model.decoder.project_out", ("head_projection",)),
        ),
        qkv_bias="enable_bias",
        o_bias="enable_bias",
        **_LIKE_OPT,
        attention_path="model.decoder.layers.{layer}.self_attn",
        base="model",
        required_values=(("do_layer_norm_before", True, "it normalises behind its attention (do_layer_norm_before is false)"),),
    ),
    Projections("gptj", **_LIKE_GPTJ),
    Projections(
        "biogpt",
        names=like_opt("biogpt", "layer_norm", "output_projection"),
        qkv_bias=True,
        o_bias=True,
        **_LIKE_OPT,
        attention_path="biogpt.layers.{layer}.self_attn",
        base="biogpt",
    ),
    Projections(
        "xglm",
        names=like_opt("model", "layer_norm", learned=False),
        qkv_bias=True,
        o_bias=True,
        **_LIKE_OPT,
        base="model",
        required_values=(("add_cross_attention", False, "it has cross-attention (add_cross_attention)"),),
    ),
    Projections(
        "gpt_neo",
        names=GPT2,
        o_bias=True,
        **_LIKE_OPT | {"projections": tuple(f"attention.{name}" for name in (*PARTS, "out_proj"))},
        scaled_by=1.0,
        local=lambda config, layer: bool(config.attention_layers[layer] == "local"),
        attention_path="transformer.h.{layer}.attn",
        base="transformer",
        computed=(".attention.bias", ".attention.masked_bias"),  # the masks of old checkpoints
    ),
    Projections("ernie4_5", qkv_bias="use_bias", o_bias="use_bias", pairing="interleaved"),
    Projections(
        "phi3",
        names=FUSED_MLP,
        projections=("qkv_proj", "o_proj"),
        partial_rotary=True,
        restarts_cache=True,
        extra_features=_WINDOW,
    ),
    Projections("codegen", **_LIKE_GPTJ | {"projections": ("qkv_proj", "out_proj")}, order=IN_BLOCKS),
    Projections(
        "gpt_neox",
        **MEGATRON,
        names=megatron("gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        partial_rotary=True,
        sums_unless=("use_parallel_residual",),
        attention_path="gpt_neox.layers.{layer}.attention",
        base="gpt_neox",
        computed=("inv_freq", ".attention.bias", ".attention.masked_bias"),  # the causal mask of old checkpoints
    ),
]
