"""Multi-head latent attention as DeepSeek made it (DeepSeek-V2, arXiv 2405.04434), and the same with its norm switched off.

The classes (arXiv 2412.19437; transformers' `deepseek_v3` and `minicpm3`) cache the latent and one rotary key. They also
normalise the latent (`NormalisedLatent`), which a converted attention must not have (`LatentLayout`). Constant channels switch
that off (`convert.families.neutral`). They are cached as 0, and `kv_lora_rank` counts them: what the config says is what the
cache holds.

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

_SIZE = 2.0**8  # of latents that are divided by their norm


@dataclass(frozen=True)
class NormalisedLatent(Family):
    """`self_attn.{q_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj}`, and a norm that has an effect.

    Such models are only counted, and portable results are written so. If queries have a latent, too, `q_a_proj`,
    `q_a_layernorm` and `q_b_proj` are in place of `q_proj`.

    Attributes:
        pairing: Which two dims form a rotary pair (see `Rotary`), unless `rope_interleave` says those of two halves.
    """

    layout: ClassVar[str] = "latent projections"
    has_heads: ClassVar[bool] = False
    shares_heads: bool = field(default=False, kw_only=True)
    without_latent: str | None = field(
        default="it has latent attention already, and kvfold makes a smaller latent only of what it wrote itself", kw_only=True
    )
    pairing: Pairing

    @property
    def traits(self) -> Traits:
        biased = bool(getattr(self.decoder, "attention_bias", False))
        return Traits(qkv_bias=biased, o_bias=biased)

    def rotary(self, layer: int) -> Rotary:
        pairing = self.pairing if getattr(self.decoder, "rope_interleave", True) else "half"
        return rope.from_config(self.decoder, self.decoder.qk_rope_head_dim, pairing)

    @property
    def scale(self) -> float:
        """YaRN's second factor multiplies logits (`mscale_all_dim`)."""
        scale, parameters = super().scale, self.decoder.rope_parameters or {}
        if parameters.get("rope_type", "default") == "default" or not (mscale := parameters.get("mscale_all_dim")):
            return scale
        factor = parameters["factor"]
        return scale if factor <= 1 else scale * float(0.1 * mscale * math.log(factor) + 1) ** 2

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        spec, width, queries, bias = self.spec, self.decoder.hidden_size, self.decoder.q_lora_rank, self.traits.o_bias
        rank, heads = spec.kv_lora_rank or 0, spec.num_heads
        rows, cached, made = heads * spec.key_dim, rank + spec.qk_rope_head_dim, heads * (spec.qk_nope_head_dim + spec.head_dim)
        shapes: dict[str, tuple[int, ...]] = {"q_proj.weight": (rows, width)}
        if queries is not None:
            shapes = {"q_a_proj.weight": (queries, width), "q_b_proj.weight": (rows, queries)}
        shapes["kv_a_proj_with_mqa.weight"] = (cached, width)
        biased = ("kv_a_proj_with_mqa",) if queries is None else ("q_a_proj", "kv_a_proj_with_mqa")
        shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased} if bias else {}
        shapes |= {"kv_a_layernorm.weight": (rank,), **({} if queries is None else {"q_a_layernorm.weight": (queries,)})}
        shapes |= {"kv_b_proj.weight": (made, rank), "o_proj.weight": (width, heads * spec.head_dim)}
        shapes |= {"o_proj.bias": (width,)} if bias else {}
        return {f"{self.module(layer)}.{name}": shape for name, shape in shapes.items()}

    def split(self, tensors: Mapping[str, torch.Tensor], layer: int) -> FactoredAttention:
        raise AssertionError("such attention is not converted")

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of a latent that is divided by its norm: `up` undoes RMSNorm's √R. Larger latents hide its epsilon."""
        import torch

        assert isinstance(record, FactoredAttention), "only latent attention is written as such"
        assert record.normalised, "its class normalises the latent"
        a = record.paired("interleaved")
        assert spec.kv_lora_rank is not None, "a latent has a rank"
        assert a.q_nope_bias is None, "the class has no place for biases"
        assert a.k_rope_bias is None, "nor for this one"
        local = join_factors(replace(a, down=_SIZE * a.down), spec.kv_lora_rank)
        queries = local.pop("q_proj.weight") * (a.scale * math.sqrt(spec.key_dim))
        if a.q_down is None:
            local["q_proj.weight"] = queries
        else:  # its root mean square is one (`convert.methods.portable_norm.behind_norm`)
            ones = queries.new_ones(len(a.q_down))
            local |= {"q_a_proj.weight": a.q_down, "q_a_layernorm.weight": ones, "q_b_proj.weight": queries}
        gain = a.down.new_ones(len(a.down)) if a.gain is None else a.gain
        local |= {
            "kv_a_layernorm.weight": torch.nn.functional.pad(gain, (0, spec.kv_lora_rank - len(a.down))),
            "kv_b_proj.weight": local["kv_b_proj.weight"] / math.sqrt(spec.kv_lora_rank),
        }
        return {f"{self.module(layer)}.{name}": tensor for name, tensor in local.items()}


@dataclass(frozen=True)
class LatentLayout(NormalisedLatent):
    """The same tensors, with a norm that constants neutralise."""

    without_latent: str | None = field(default=None, kw_only=True)

    def of(self, config: Any) -> Family:
        """Itself for configs that kvfold writes; for all others, the family of a norm that has an effect."""
        decoder = decoder_of(config)
        layers, depth = decoder.num_hidden_layers, math.sqrt(decoder.num_hidden_layers)
        dense = (getattr(decoder, "first_k_dense_replace", layers) or 0) >= layers
        written = dense and decoder.attention_bias and getattr(decoder, "rope_interleave", True)
        unscaled = getattr(decoder, "scale_depth", depth) == depth  # the class scales what layers add by scale_depth / depth
        queries = decoder.q_lora_rank in (None, query_rank(decoder.hidden_size))
        if written and unscaled and queries and not (decoder.rope_parameters or {}).get("mscale_all_dim"):
            return super().of(config)
        return NormalisedLatent(self.model_type, self.pairing).of(config)

    @property
    def traits(self) -> Traits:
        return replace(super().traits, qkv_bias=self.decoder.q_lora_rank is not None)

    def latent_dims(self, rope_dim: int) -> int:
        rank = self.decoder.kv_lora_rank
        return rank - len(constants(rank)) + self.decoder.qk_rope_head_dim - rope_dim

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


V3 = NormalisedLatent("deepseek_v3", "interleaved")
ROWS = (LatentLayout("deepseek_v3", "interleaved"), LatentLayout("minicpm3", "half"))
