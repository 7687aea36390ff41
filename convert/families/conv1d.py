"""GPT-2: one projection for queries, keys and values, and all weights stored `[in, out]` (Conv1D).

Its class ignores `num_key_value_heads`, so only other classes can share KV heads. Positions are learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.families.base import Family, Traits
from convert.families.names import in_layers
from convert.families.tables import GPT2

if TYPE_CHECKING:
    import torch


class Conv1DProjections(Family):
    """`c_attn [E, 3 H D]` and `c_proj [H D, E]`, both with biases."""

    model_type = "gpt2"
    names = GPT2.replacing(
        in_layers("transformer.h", "mlp.c_fc", "mlp.up", transposed=True),
        in_layers("transformer.h", "mlp.c_proj", "mlp.down", transposed=True),
    )
    attention_path = "transformer.h.{layer}.attn"
    base = "transformer"
    computed = ("inv_freq", ".attn.bias", ".attn.masked_bias")  # the causal mask of old checkpoints
    layout = "stacked projections, transposed"
    shares_heads = False

    def unreadable(self, config: Any) -> str | None:
        if config.scale_attn_by_inverse_layer_idx:
            return "each layer scales its logits by another factor (scale_attn_by_inverse_layer_idx)"
        return "it has cross-attention (add_cross_attention)" if config.add_cross_attention else None

    def shapes(self, config: Any, layer: int) -> dict[str, tuple[int, ...]]:
        width = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "c_attn.weight": (width, 3 * width),
            "c_attn.bias": (3 * width,),
            "c_proj.weight": (width, width),
            "c_proj.bias": (width,),
        }
        return {f"{self.module(layer)}.{name}": shape for name, shape in shapes.items()}

    def split(self, tensors: Mapping[str, torch.Tensor], config: Any, layer: int) -> Attention:
        spec, prefix = self.spec(config), f"{self.module(layer)}."
        local = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        heads = (3, spec.num_heads, spec.head_dim)
        q, k, v = local["c_attn.weight"].mT.unflatten(0, heads)
        q_bias, k_bias, v_bias = local["c_attn.bias"].unflatten(0, heads)
        o = local["c_proj.weight"].mT.unflatten(1, heads[1:])
        return Attention(q, k, v, o, self.scale(config), None, q_bias, k_bias, v_bias, local["c_proj.bias"])

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        import torch

        assert isinstance(record, Attention), "a latent has no projections of keys and values"
        a = record
        assert a.q_bias is not None, "the class has biases"
        assert a.k_bias is not None
        assert a.v_bias is not None
        assert a.o_bias is not None
        local = {
            "c_attn.weight": torch.cat((a.q, a.k, a.v)).flatten(0, 1).mT,
            "c_attn.bias": torch.cat((a.q_bias, a.k_bias, a.v_bias)).flatten(),
            "c_proj.weight": a.o.flatten(1).mT,
            "c_proj.bias": a.o_bias,
        }
        return {f"{self.module(layer)}.{name}": tensor for name, tensor in local.items()}

    def traits(self, config: Any) -> Traits:
        return Traits(qkv_bias=True, o_bias=True, qk_norm=None, layers_with_rotary=0, adds_output=True, extra_features={})

    def rotary(self, config: Any, layer: int) -> None:
        return None

    def scale(self, config: Any) -> float:
        return super().scale(config) if config.scale_attn_weights else 1.0

    def output(self, layer: int) -> str:
        return f"{self.module(layer)}.c_proj"


FAMILY = Conv1DProjections()
