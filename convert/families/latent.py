"""Multi-head latent attention as DeepSeek made it (DeepSeek-V2, arXiv 2405.04434), and the same with its norm switched off.

The classes (arXiv 2412.19437; transformers' `deepseek_v3` and `minicpm3`) cache the latent and one rotary key. They also
normalise the latent (`NormalisedLatent`), which a converted attention must not have (`LatentLayout`). Constant channels switch
that off. `join` adds them. They are cached as 0, and `kv_lora_rank` counts them: what the config says is what the cache holds.

A constant is a zero row of the projection with a bias of 2^k times its value. The root mean square becomes 2^k, and gains of
2^k undo it. All other channels are true: they come out as they went in, up to an exponent shift.

2^k is as large as float16 allows, and a latent's root mean square should be about 2^k / 2^12 (`latent_size`). A larger one
changes the norm by more than one ulp of float32. A smaller one, divided by 2^k, has few bits left in float16.

Two latents need this. That of keys and values caches all of its channels, so it has as few constants as possible. That of
queries is not cached. kvfold uses it where queries have biases, for which DeepSeek-V3's class has no place: the latent is the
input itself and a constant one, and the projection behind it is [W_Q | b].

What has a latent is not converted again: `join` writes it, and nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from attention import rope
from attention.record import FactoredAttention, Record
from attention.rope import Pairing, Rotary
from attention.spec import AttentionSpec
from convert.families.base import Family, Traits
from convert.families.projections import join_factors, or_zeros

if TYPE_CHECKING:
    import torch

_LEAST = 2.0**8  # smaller gains are those of trained norms
_ROUNDING = 2.0**-8  # relative: bfloat16 rounds constants by up to 2⁻⁹
_MOST = 65280.0  # the largest bfloat16 that is finite in float16
_RATIO = 2.0**12  # of constants and latents
_MULTIPLE = 16  # of the rank of queries, as matrix products on GPUs want it
_SQUARES = 4  # of integers: every number is a sum of so many (Lagrange, 1770)
_SIZE = 2.0**8  # of latents that are divided by their norm


@dataclass(frozen=True)
class NormalisedLatent(Family):
    """`self_attn.{q_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj}`, and a norm that has an effect.

    Portable results are written so, and models that were published so are only counted. If queries have a latent, too,
    `q_a_proj`, `q_a_layernorm` and `q_b_proj` are in place of `q_proj`.

    Attributes:
        pairing: Which two dims form a rotary pair (see `Rotary`), unless `rope_interleave` says those of two halves.
    """

    layout: ClassVar[str] = "latent projections"
    has_heads: ClassVar[bool] = False
    shares_heads: bool = field(default=False, kw_only=True)
    without_latent: str | None = field(default="it has latent attention already", kw_only=True)
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

    @property
    def traits(self) -> Traits:
        traits = super().traits
        return replace(traits, qkv_bias=traits.qkv_bias and self.decoder.q_lora_rank is not None)

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


V3 = NormalisedLatent("deepseek_v3", "interleaved")
ROWS = (LatentLayout("deepseek_v3", "interleaved"), LatentLayout("minicpm3", "half"))


def constants(rank: int) -> list[float]:
    """The values of the constant channels, without the factor 2^k: they make the root mean square of R channels one.

    One, √R, if its rounding to bfloat16 errs by less than half a unit in the last place of every bfloat16 (1/510 upwards,
    1/512 downwards), because then dividing by the root mean square rounds back to the original bits. Otherwise
    two: √R rounded down, and the root of what its square lacks, which leaves an error of about 2⁻¹⁶.
    """
    root = math.sqrt(rank)
    unit = 2.0 ** (math.frexp(root)[1] - 8)  # bfloat16 has eight bits
    error = root / (round(root / unit) * unit) - 1
    if -1 / 512 + 1e-6 < error < 1 / 510 - 1e-6:
        return [root]
    first = math.floor(root / unit) * unit
    return [first, math.sqrt(rank - first**2)]


def level(values: Sequence[float]) -> float:
    """2^k for constants of these values."""
    return 2.0 ** math.floor(math.log2(_MOST / max(values)))


def constant_channels(weight: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
    """The constant channels of a latent whose norm is neutral.

    Args:
        weight: `[R]`, the norm's.
        down: `[R, E]`, the projection to the latent.
        bias: `[R]`, of the projection. True channels may have one, too.

    Returns:
        `[R]` bool, or None if the norm has an effect.
    """
    weight, constant = weight.double(), weight == 0
    if not bool(constant.any()) or bool(constant.all()) or bool(down[constant].any()):
        return None
    true, size = weight[~constant], (bias[constant].double().square().sum() / len(weight)).sqrt()
    undone = bool((true == true[0]).all()) and float(true[0]) >= _LEAST and bool((true[0] / size - 1).abs() < _ROUNDING)
    return constant if undone else None


def latent_size(values: Sequence[float]) -> float:
    """The root mean square, a power of two, that a latent should have beside constants of these values."""
    return level(values) / _RATIO


def query_rank(width: int) -> int:
    """The rank of a latent of queries that holds an input of E = `width` dims and the constants."""
    return -(-(width + 1 + _SQUARES) // _MULTIPLE) * _MULTIPLE


def query_constants(rank: int) -> list[float]:
    """The values of the constant channels of queries, which come last: the one that biases ride on, then what the norm needs.

    All are integers whose squares sum to the rank, which every dtype holds: the norm is neutral bit for bit in bfloat16, and
    to one unit in the last place in float32.
    """
    found = _squares(rank - 1, _SQUARES)
    assert found is not None
    return [1.0, *(float(value) for value in found if value)]


def query_latent(width: int, scale: float, like: torch.Tensor, large: float | None = None) -> dict[str, torch.Tensor]:
    """`q_a_proj` and `q_a_layernorm` of a latent of the input times `scale`, and the constants.

    Args:
        width: E.
        scale: A power of two.
        like: Its dtype and device are those of the tensors.
        large: 2^k; `level` of the constants if None.
    """
    rank = query_rank(width)
    constant = like.new_tensor(query_constants(rank))
    large = level(query_constants(rank)) if large is None else large
    gain, bias = like.new_full((rank,), large), like.new_zeros(rank)
    gain[-len(constant) :] = 0
    gain[-len(constant)] = 1  # 1 · 2^k divided by 2^k
    bias[-len(constant) :] = constant * large
    weight = like.new_zeros(rank, width).fill_diagonal_(scale)
    return {"q_a_proj.weight": weight, "q_a_proj.bias": bias, "q_a_layernorm.weight": gain}


def query_scale(weight: torch.Tensor) -> float:
    """The scale for inputs of `weight [n, E]`, a power of two: `latent_size`, if they make queries of about one."""
    size = float(weight.double().square().sum(1).mean().sqrt())
    wanted = latent_size(query_constants(query_rank(weight.shape[1]))) * size
    return 2.0 ** max(-12, min(12, round(math.log2(wanted)))) if 0 < wanted < math.inf else 1.0


def is_query_latent(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether these `q_a_proj` and `q_a_layernorm` are the input times a scale, and constants that are large enough."""
    weight, gain = tensors["q_a_proj.weight"], tensors["q_a_layernorm.weight"]
    expected = query_latent(weight.shape[1], float(weight[0, 0]), weight, float(gain[0]))
    same = all(
        tensors[name].shape == tensor.shape and bool((tensors[name] == tensor).all()) for name, tensor in expected.items()
    )
    return same and float(gain[0]) >= _LEAST and float(weight[0, 0]) > 0


def join_query_bias(weight: torch.Tensor, bias: torch.Tensor, rank: int) -> torch.Tensor:
    """`q_b_proj.weight [n, rank]` of queries that read a latent by `weight [n, channels]`, and have `bias [n]`."""
    joined = weight.new_zeros(len(weight), rank)
    joined[:, : weight.shape[1]] = weight
    joined[:, -len(query_constants(rank))] = bias
    return joined


def _squares(total: int, count: int) -> list[int] | None:
    """`count` integers whose squares sum to `total`, the first as large as possible; or None."""
    largest = math.isqrt(total)
    if count == 1:
        return [largest] if largest**2 == total else None
    for first in range(largest, -1, -1):
        if rest := _squares(total - first**2, count - 1):
            return [first, *rest]
    return None
