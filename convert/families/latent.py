"""Multi-head latent attention in DeepSeek-V3's layout, with the latent norm switched off: the MLA that kvfold writes.

The classes (arXiv 2412.19437; transformers' `deepseek_v3` and `minicpm3`) cache the latent and one rotary key. They also
normalise the latent, which a converted attention must not have. Constant channels switch that off (`convert.families.neutral`).
They are cached as 0, and `kv_lora_rank` counts them: what the config says is what the cache holds.

Queries come from the input, or with biases from a latent of their own, which is the input and constants.

`join` adds the constant channels, and `split` removes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from attention import rope
from attention.errors import Failure
from attention.record import FactoredAttention, Record
from attention.rope import Pairing, Rotary
from attention.spec import AttentionSpec
from convert.families.base import Family, Traits, decoder_of
from convert.families.deepseek import MINICPM3, V3
from convert.families.neutral import (
    constant_channels,
    constants,
    is_query_latent,
    join_query_bias,
    level,
    query_latent,
    query_rank,
    query_scale,
    split_query_bias,
)
from convert.families.projections import join_factors, or_zeros, split_factors

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LatentLayout(Family):
    """`self_attn.{q_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj}`, and a norm that constants neutralise.

    With query biases, `q_a_proj`, `q_a_layernorm` and `q_b_proj` are in place of `q_proj`.

    Attributes:
        pairing: Which two dims form a rotary pair (see `Rotary`).
        normalised: The family of checkpoints whose norm has an effect.
    """

    layout: ClassVar[str] = "latent projections"
    has_heads: ClassVar[bool] = False
    shares_heads: bool = field(default=False, kw_only=True)
    pairing: Pairing
    normalised: Family

    def of(self, config: Any) -> Family:
        """Itself for configs that kvfold writes; for all others, the family of a norm that has an effect."""
        decoder = decoder_of(config)
        layers = decoder.num_hidden_layers
        dense = (getattr(decoder, "first_k_dense_replace", layers) or 0) >= layers
        written = dense and decoder.attention_bias and getattr(decoder, "rope_interleave", True)
        written = written and getattr(decoder, "scale_depth", math.sqrt(layers)) == math.sqrt(layers)
        queries = decoder.q_lora_rank in (None, query_rank(decoder.hidden_size))
        scaled = (decoder.rope_parameters or {}).get("mscale_all_dim")
        return super().of(config) if written and queries and not scaled else self.normalised.of(config)

    @property
    def traits(self) -> Traits:
        depth = math.sqrt(self.decoder.num_hidden_layers)  # the class scales what layers add by scale_depth / depth
        adds_output = getattr(self.decoder, "scale_depth", depth) == depth
        return replace(super().traits, qkv_bias=self.decoder.q_lora_rank is not None, o_bias=True, adds_output=adds_output)

    def latent_dims(self, rope_dim: int) -> int:
        rank = self.decoder.kv_lora_rank
        return rank - len(constants(rank)) + self.decoder.qk_rope_head_dim - rope_dim

    def rotary(self, layer: int) -> Rotary:
        return rope.from_config(self.decoder, self.decoder.qk_rope_head_dim, self.pairing)

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        normalised = replace(self.normalised, config=self.config, attention_path=self.attention_path)
        return normalised.shapes(layer)

    def split(self, tensors: Mapping[str, torch.Tensor], layer: int) -> FactoredAttention:
        """The record of a layer.

        Raises:
            Failure: The norm of a latent is not neutral.
        """
        import torch

        prefix, spec = f"{self.module(layer)}.", self.spec
        local = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        rank, down, bias = self.decoder.kv_lora_rank, local["kv_a_proj_with_mqa.weight"], local["kv_a_proj_with_mqa.bias"]
        gain = local["kv_a_layernorm.weight"]
        constant = constant_channels(gain, down[:rank], bias[:rank])
        if constant is None:
            raise self._not_ours(f"the norm of layer {layer}'s latent is not neutral")
        if bool(bias[:rank][~constant].any()):
            raise self._not_ours(f"layer {layer}'s latent has a bias beside its constants")
        if self.decoder.q_lora_rank is not None:
            if not is_query_latent(local):
                raise self._not_ours(f"the latent of layer {layer}'s queries is not its input and constants")
            weight, local["q_proj.bias"] = split_query_bias(local["q_b_proj.weight"], self.decoder.hidden_size)
            local["q_proj.weight"] = local["q_a_proj.weight"][0, 0] * weight
        kept = torch.nn.functional.pad(~constant, (0, spec.qk_rope_head_dim), value=True)
        local |= {
            "kv_a_proj_with_mqa.weight": down[kept],
            "kv_a_proj_with_mqa.bias": bias[kept],
            "kv_b_proj.weight": local["kv_b_proj.weight"][:, ~constant],
        }
        return split_factors(local, spec, self.scale, self.rotary(layer))

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        import torch

        assert isinstance(record, FactoredAttention), "only latent attention is written as such"
        a, rank = record.paired(self.pairing), spec.kv_lora_rank or 0
        # The class scales by (N + P)^-½.
        factors, scale = join_factors(a, rank), a.scale * math.sqrt(a.q_nope.shape[1] + a.q_rope.shape[1])
        queries, biases = factors["q_proj.weight"] * scale, factors.get("q_proj.bias")
        local = {"q_proj.weight": queries}
        if a.q_nope_bias is not None:
            width, size = queries.shape[1], query_scale(queries)
            biases = queries.new_zeros(len(queries)) if biases is None else biases * scale
            joined = join_query_bias(queries / size, biases, query_rank(width))
            local = query_latent(width, size, queries) | {"q_b_proj.weight": joined}
        values = constants(rank)
        constant = a.down.new_tensor(values) * level(values)
        zeros = a.down.new_zeros(rank - len(constant))
        local |= {
            "kv_a_proj_with_mqa.weight": factors["kv_a_proj_with_mqa.weight"],
            "kv_a_proj_with_mqa.bias": torch.cat((zeros, constant, or_zeros(a.k_rope_bias, a.k_rope[:, 0]))),
            "kv_a_layernorm.weight": torch.cat((zeros + level(values), torch.zeros_like(constant))),
            "kv_b_proj.weight": factors["kv_b_proj.weight"],
            "o_proj.weight": factors["o_proj.weight"],
            "o_proj.bias": or_zeros(a.o_bias, a.o[:, 0, 0]),
        }
        return {f"{self.module(layer)}.{name}": tensor for name, tensor in local.items()}

    def _not_ours(self, what: str) -> Failure:
        return Failure(
            f"{what}: of {self.model_type} checkpoints with such a config, kvfold reads only those that it wrote",
            hint="convert the checkpoint that this one was made from",
        )


ROWS = (LatentLayout("deepseek_v3", "interleaved", V3), LatentLayout("minicpm3", "half", MINICPM3))
