"""GPT-NeoX (Pythia), and what it shares with others: queries, keys and values are one projection, its rows by KV head.

Of each KV head, the rows are the Qs of its query heads, its K and its V; with as many KV heads as query heads, Q, K, V.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attention import rope
from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.families.base import Family, Traits
from convert.families.tables import megatron

if TYPE_CHECKING:
    import torch

_LAYERS = "gpt_neox.layers"


class InterleavedProjections(Family):
    """`query_key_value [G (H/G + 2) D, E]` and `dense [E, H D]`.

    Attributes:
        qkv_name: The name of the first.
        o_name: The name of the second.
        biased_by: The config field that says whether both have biases; always if None.
    """

    layout = "interleaved projections"
    shares_heads = False
    qkv_name = "query_key_value"
    o_name = "dense"
    biased_by: str | None = None

    def shapes(self, config: Any, layer: int) -> dict[str, tuple[int, ...]]:
        spec, width = self.spec(config), config.hidden_size
        rows, queries = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, spec.num_heads * spec.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            f"{self.qkv_name}.weight": (rows, width),
            f"{self.o_name}.weight": (width, queries),
        }
        if self._biased(config):
            shapes |= {f"{self.qkv_name}.bias": (rows,), f"{self.o_name}.bias": (width,)}
        return {f"{self.module(layer)}.{name}": shape for name, shape in shapes.items()}

    def split(self, tensors: Mapping[str, torch.Tensor], config: Any, layer: int) -> Attention:
        spec, prefix = self.spec(config), f"{self.module(layer)}."
        local = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        q, k, v = _split_heads(local[f"{self.qkv_name}.weight"], spec)
        biases = _split_heads(local[f"{self.qkv_name}.bias"], spec) if self._biased(config) else (None, None, None)
        return Attention(
            q=q,
            k=k,
            v=v,
            o=local[f"{self.o_name}.weight"].unflatten(1, (spec.num_heads, spec.head_dim)),
            scale=self.scale(config),
            rotary=self.rotary(config, layer),
            q_bias=biases[0],
            k_bias=biases[1],
            v_bias=biases[2],
            o_bias=local.get(f"{self.o_name}.bias"),
            scoring=self.scoring(config, layer),
        )

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        assert isinstance(record, Attention), "a latent has no projections of keys and values"
        a = record
        local = {f"{self.qkv_name}.weight": _join_heads(a.q, a.k, a.v), f"{self.o_name}.weight": a.o.flatten(1)}
        if a.q_bias is not None and a.k_bias is not None and a.v_bias is not None:
            local[f"{self.qkv_name}.bias"] = _join_heads(a.q_bias, a.k_bias, a.v_bias)
        if a.o_bias is not None:
            local[f"{self.o_name}.bias"] = a.o_bias
        return {f"{self.module(layer)}.{name}": tensor for name, tensor in local.items()}

    def output(self, layer: int) -> str:
        return f"{self.module(layer)}.{self.o_name}"

    def _biased(self, config: Any) -> bool:
        return self.biased_by is None or bool(getattr(config, self.biased_by))


def _split_heads(rows: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q `[H, D, …]`, K and V `[G, D, …]` of stacked rows, as views, but for a Q whose heads share."""
    repeats = spec.num_heads // spec.num_kv_heads
    groups = rows.unflatten(0, (spec.num_kv_heads, repeats + 2, spec.head_dim))
    return groups[:, :repeats].flatten(0, 1), groups[:, -2], groups[:, -1]


def _join_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The inverse of `_split_heads`."""
    import torch

    return torch.cat((q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]), 1).flatten(0, 2)


class GPTNeoX(InterleavedProjections):
    """Its class ignores `num_key_value_heads`, so only other classes can share KV heads."""

    model_type = "gpt_neox"
    names = megatron(_LAYERS, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")
    attention_path = f"{_LAYERS}.{{layer}}.attention"
    base = "gpt_neox"
    computed = ("inv_freq", ".attention.bias", ".attention.masked_bias")  # the causal mask of old checkpoints
    biased_by = "attention_bias"

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        assert spec.num_kv_heads == spec.num_heads, "the class has as many keys as queries"
        return super().join(record, spec, layer)

    def traits(self, config: Any) -> Traits:
        return Traits(
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            qk_norm=None,
            layers_with_rotary=config.num_hidden_layers,
            adds_output=not config.use_parallel_residual,
            extra_features={},
        )

    def rotary(self, config: Any, layer: int) -> rope.Rotary:
        return rope.from_config(config, self.spec(config).head_dim, "half", partial=True)


FAMILY = GPTNeoX()
