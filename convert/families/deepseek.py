"""Multi-head latent attention as DeepSeek made it (DeepSeek-V2, arXiv 2405.04434): with a norm of the latent.

Such models are only counted, and portable results are written so. `convert.families.latent` reads and writes the class where
kvfold has switched its norm off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

from attention import rope
from attention.record import FactoredAttention, Record
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families.base import Family, Traits
from convert.families.projections import join_factors

if TYPE_CHECKING:
    import torch

_SIZE = 2.0**8  # of latents that are divided by their norm


@dataclass(frozen=True)
class NormalisedLatent(Family):
    """`self_attn.{q_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj}`.

    If queries have a latent, too, `q_a_proj`, `q_a_layernorm` and `q_b_proj` are in place of `q_proj`.

    Attributes:
        pairing: Which two dims form a rotary pair: those of two halves, or "config" if `rope_interleave` says so.
    """

    layout: ClassVar[str] = "latent projections"
    has_heads: ClassVar[bool] = False
    shares_heads: bool = field(default=False, kw_only=True)
    pairing: Literal["half", "config"] = "config"

    @property
    def without_latent(self) -> str:
        return "it has latent attention already, and kvfold makes a smaller latent only of what it wrote itself"

    @property
    def traits(self) -> Traits:
        return Traits(
            qkv_bias=bool(getattr(self.decoder, "attention_bias", False)),
            o_bias=bool(getattr(self.decoder, "attention_bias", False)),
            layers_with_rotary=self.decoder.num_hidden_layers,
        )

    def rotary(self, layer: int) -> Rotary:
        interleaved = self.pairing == "config" and getattr(self.decoder, "rope_interleave", True)
        return rope.from_config(self.decoder, self.decoder.qk_rope_head_dim, "interleaved" if interleaved else "half")

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

    def split(self, tensors: Mapping[str, torch.Tensor], layer: int) -> NoReturn:
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


V3 = NormalisedLatent("deepseek_v3")
MINICPM3 = NormalisedLatent("minicpm3", "half")
