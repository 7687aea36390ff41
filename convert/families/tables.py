"""Tables of names that several families share, or that differ from a shared one."""

from __future__ import annotations

from functools import partial

from convert.families.names import NameTable, Row, in_layers


def megatron(layers: str, embedding: str, final_norm: str, head: str) -> NameTable:
    """The table of classes that keep Megatron's names, with the modules around `layers` named as given."""
    return NameTable(
        [
            Row(embedding, ("embedding",)),
            in_layers(layers, "input_layernorm", "attention_norm"),
            in_layers(layers, "post_attention_layernorm", "mlp_norm"),  # none where both run in parallel
            in_layers(layers, "mlp.dense_h_to_4h", "mlp.up"),
            in_layers(layers, "mlp.dense_4h_to_h", "mlp.down"),
            Row(final_norm, ("final_norm",)),
            Row(head, ("head",)),
        ]
    )


def like_opt(decoder: str, final_norm: str, head: str = "lm_head", learned: bool = True) -> NameTable:
    """The table of OPT and its like, with or without learned positions, of which the first two are for padding."""
    layers = partial(in_layers, f"{decoder}.layers")
    positions = Row(f"{decoder}.embed_positions", ("padding_positions", "positions"), leading=2)
    return NameTable(
        [
            Row(f"{decoder}.embed_tokens", ("embedding",)),
            *([positions] if learned else []),
            layers("self_attn_layer_norm", "attention_norm"),
            layers("final_layer_norm", "mlp_norm"),
            layers("fc1", "mlp.up"),
            layers("fc2", "mlp.down"),
            Row(f"{decoder}.{final_norm}", ("final_norm",)),
            Row(head, ("head",)),
        ]
    )


in_llama = partial(in_layers, "model.layers")
MLP = ("gate", "up", "down")
LLAMA = NameTable(
    [
        Row("model.embed_tokens", ("embedding",)),
        in_llama("input_layernorm", "attention_norm"),
        in_llama("post_attention_layernorm", "mlp_norm"),
        *(in_llama(f"mlp.{part}_proj", f"mlp.{part}") for part in MLP),
        Row("model.norm", ("final_norm",)),
        Row("lm_head", ("head",)),
    ]
)
NORMS_BEHIND = LLAMA.replacing(
    in_llama("post_attention_layernorm", "attention_output_norm"),
    in_llama("post_feedforward_layernorm", "mlp_output_norm"),
    without=("layers.{layer}.attention_norm",),
)
NORMS_AROUND = NORMS_BEHIND.replacing(
    in_llama("input_layernorm", "attention_norm"),
    in_llama("pre_feedforward_layernorm", "mlp_norm"),
)
WITHOUT_GAINS = LLAMA.replacing(without=("layers.{layer}.attention_norm", "layers.{layer}.mlp_norm", "final_norm"))
GPT2 = NameTable(
    [
        Row("transformer.wte", ("embedding",)),
        Row("transformer.wpe", ("positions",)),
        in_layers("transformer.h", "ln_1", "attention_norm"),
        in_layers("transformer.h", "ln_2", "mlp_norm"),
        in_layers("transformer.h", "mlp.c_fc", "mlp.up"),
        in_layers("transformer.h", "mlp.c_proj", "mlp.down"),
        Row("transformer.ln_f", ("final_norm",)),
        Row("lm_head", ("head",)),
    ]
)
GPTJ = GPT2.replacing(
    in_layers("transformer.h", "mlp.fc_in", "mlp.up"),
    in_layers("transformer.h", "mlp.fc_out", "mlp.down"),
    without=("positions", "layers.{layer}.mlp_norm"),
)
FUSED_MLP = LLAMA.replacing(in_llama("mlp.gate_up_proj", "mlp.gate", "mlp.up"))
EXPERTS = LLAMA.replacing(
    in_llama("mlp.gate", "mlp.router"),
    *(in_llama(f"mlp.experts.{{expert}}.{part}_proj", f"mlp.experts.{{expert}}.{part}") for part in MLP),
)
NUMBERED_EXPERTS = LLAMA.replacing(
    in_llama("block_sparse_moe.gate", "mlp.router"),
    *(
        in_llama(f"block_sparse_moe.experts.{{expert}}.{name}", f"mlp.experts.{{expert}}.{part}")
        for name, part in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ),
)
