"""GPT-NeoX (Pythia): queries, keys and values are one projection with the rows of each head together: its Q, its K, its V.

Its class ignores `num_key_value_heads`, so only other classes can share KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attention import rope
from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.families.base import Family, Traits
from convert.families.names import NameTable, Row, in_layers

if TYPE_CHECKING:
    import torch

_LAYERS = "gpt_neox.layers"


class InterleavedProjections(Family):
    """`query_key_value [H 3 D, E]` and `dense [E, H D]`."""

    model_type = "gpt_neox"
    names = NameTable(
        [
            Row("gpt_neox.embed_in", ("embedding",)),
            in_layers(_LAYERS, "input_layernorm", "attention_norm"),
            in_layers(_LAYERS, "post_attention_layernorm", "mlp_norm"),
            in_layers(_LAYERS, "mlp.dense_h_to_4h", "mlp.up"),
            in_layers(_LAYERS, "mlp.dense_4h_to_h", "mlp.down"),
            Row("gpt_neox.final_layer_norm", ("final_norm",)),
            Row("embed_out", ("head",)),
        ]
    )
    attention_path = f"{_LAYERS}.{{layer}}.attention"
    base = "gpt_neox"
    computed = ("inv_freq", ".attention.bias", ".attention.masked_bias")  # the causal mask of old checkpoints
    layout = "interleaved projections"
    shares_heads = False

    def shapes(self, config: Any, layer: int) -> dict[str, tuple[int, ...]]:
        spec, width = self.spec(config), config.hidden_size
        rows = spec.num_heads * spec.head_dim
        shapes: dict[str, tuple[int, ...]] = {"query_key_value.weight": (3 * rows, width), "dense.weight": (width, rows)}
        if config.attention_bias:
            shapes |= {"query_key_value.bias": (3 * rows,), "dense.bias": (width,)}
        return {f"{self.module(layer)}.{name}": shape for name, shape in shapes.items()}

    def split(self, tensors: Mapping[str, torch.Tensor], config: Any, layer: int) -> Attention:
        spec, prefix = self.spec(config), f"{self.module(layer)}."
        local = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        heads = (spec.num_heads, 3, spec.head_dim)
        q, k, v = local["query_key_value.weight"].unflatten(0, heads).unbind(1)
        biases = local["query_key_value.bias"].unflatten(0, heads).unbind(1) if config.attention_bias else (None, None, None)
        return Attention(
            q=q,
            k=k,
            v=v,
            o=local["dense.weight"].unflatten(1, (spec.num_heads, spec.head_dim)),
            scale=self.scale(config),
            rotary=self.rotary(config, layer),
            q_bias=biases[0],
            k_bias=biases[1],
            v_bias=biases[2],
            o_bias=local.get("dense.bias"),
        )

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        import torch

        assert isinstance(record, Attention), "a latent has no projections of keys and values"
        a = record
        assert len(a.k) == len(a.q), "the class has as many keys as queries"
        local = {
            "query_key_value.weight": torch.stack((a.q, a.k, a.v), 1).flatten(0, 2),
            "dense.weight": a.o.flatten(1),
        }
        if a.q_bias is not None and a.k_bias is not None and a.v_bias is not None:
            local["query_key_value.bias"] = torch.stack((a.q_bias, a.k_bias, a.v_bias), 1).flatten()
        if a.o_bias is not None:
            local["dense.bias"] = a.o_bias
        return {f"{self.module(layer)}.{name}": tensor for name, tensor in local.items()}

    def traits(self, config: Any) -> Traits:
        return Traits(
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            qk_norm=None,
            layers_with_rotary=config.num_hidden_layers,
            adds_output=not config.use_parallel_residual,
            beyond={},
        )

    def rotary(self, config: Any, layer: int) -> rope.Rotary:
        return rope.from_config(config, self.spec(config).head_dim, "half", partial=True)

    def output(self, layer: int) -> str:
        return f"{self.module(layer)}.dense"


FAMILY = InterleavedProjections()
