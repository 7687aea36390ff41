"""Multi-head latent attention as DeepSeek made it (DeepSeek-V2, arXiv 2405.04434): with a norm of the latent.

A record reads the normalised latent and the RoPE key (`attention.record.LatentProjections`): a smaller latent is made of these,
and the source's projections and norms stay. `convert.families.latent` reads the class where kvfold has switched its norm off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from attention import rope
from attention.qk_norm import NormForm
from attention.record import FactoredAttention, LatentProjections, Record
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families.base import Family, Traits
from convert.families.names import NameTable, in_layers
from convert.families.projections import join_latent, latent_shapes, split_factors, split_latent
from convert.families.tables import EXPERTS, LLAMA

if TYPE_CHECKING:
    import torch

_SIZE = 2.0**8  # of latents that are divided by their norm
_NORM = NormForm("rms", "head", False, False, 1e-6)  # whatever the config's rms_norm_eps
_OWN = {"kv_a_proj_with_mqa": "kv_proj", "kv_a_layernorm": "kv_norm", "q_a_layernorm": "q_norm"}  # names of projections.py
_WITH_EXPERTS = EXPERTS.replacing(
    *(in_layers("model.layers", f"mlp.shared_experts.{part}_proj", f"mlp.shared.{part}") for part in ("gate", "up", "down")),
)


@dataclass(frozen=True)
class NormalisedLatent(Family):
    """`self_attn.{q_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj}`.

    If queries have a latent, too, `q_a_proj`, `q_a_layernorm` and `q_b_proj` are in place of `q_proj`.

    Attributes:
        model_type: As in config.json.
        names: The table of all other tensors of a checkpoint.
        pairing: Which two dims form a rotary pair; "config" if `rope_interleave` says so.
        adds_output: Whether a layer continues with the plain sum of its input and its attention's output.
    """

    model_type: str
    names: NameTable
    pairing: Literal["half", "interleaved", "config"]
    adds_output: bool = True

    layout = "latent projections"
    has_heads = shares_heads = False

    def unreadable(self, config: Any) -> str | None:
        if not type(config).__module__.startswith("transformers.models."):
            return "it brings code of its own, and kvfold reads transformers' class: leave out --trust-remote-code"
        parameters = config.rope_parameters
        if parameters.get("mscale_all_dim") and not parameters.get("factor") and parameters.get("rope_type") != "default":
            return f"its RoPE scales logits (mscale_all_dim {parameters['mscale_all_dim']}) by a factor that it lacks"
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if kv_heads != heads:
            return f"its latent makes keys of {heads} heads, and its class repeats those of {kv_heads} (num_key_value_heads)"
        if (dims := self.rotary(config, 0).dims) != config.qk_rope_head_dim:
            return f"RoPE rotates {dims} dims, and the RoPE key has {config.qk_rope_head_dim} (qk_rope_head_dim)"
        return None

    def traits(self, config: Any) -> Traits:
        return Traits(
            qkv_bias=bool(config.attention_bias),
            o_bias=bool(config.attention_bias),
            layers_with_rotary=config.num_hidden_layers,
            adds_output=self.adds_output,
            latent_norm=_NORM,
        )

    def rotary(self, config: Any, layer: int) -> Rotary:
        pairing = self.pairing
        if pairing == "config":
            pairing = "interleaved" if config.rope_interleave else "half"
        return rope.from_config(config, config.qk_rope_head_dim, pairing)

    def scale(self, config: Any) -> float:
        """YaRN's second factor multiplies logits (`mscale_all_dim`)."""
        scale, parameters = super().scale(config), config.rope_parameters
        if parameters.get("rope_type", "default") == "default" or not (mscale := parameters.get("mscale_all_dim")):
            return scale
        factor = parameters["factor"]
        return scale if factor <= 1 else scale * float(0.1 * mscale * math.log(factor) + 1) ** 2

    def shapes(self, config: Any, layer: int) -> dict[str, tuple[int, ...]]:
        spec, width, queries = self.spec(config), config.hidden_size, config.q_lora_rank
        rank, heads = spec.kv_lora_rank or 0, spec.num_heads
        shapes = latent_shapes(spec, width, queries, bool(config.attention_bias)) | {"kv_norm.weight": (rank,)}
        shapes |= {} if queries is None else {"q_norm.weight": (queries,)}
        shapes["kv_b_proj.weight"] = (heads * (spec.qk_nope_head_dim + spec.head_dim), rank)
        shapes["o_proj.weight"] = (width, heads * spec.head_dim)
        shapes |= {"o_proj.bias": (width,)} if config.attention_bias else {}
        return {f"{self.module(layer)}.{_renamed(name, to_own=False)}": shape for name, shape in shapes.items()}

    def split(self, tensors: Mapping[str, torch.Tensor], config: Any, layer: int) -> FactoredAttention:
        import torch

        prefix, spec = f"{self.module(layer)}.", self.spec(config)
        local = {_renamed(name.removeprefix(prefix)): tensor for name, tensor in tensors.items()}
        up, both = local["kv_b_proj.weight"], (spec.kv_lora_rank or 0) + spec.qk_rope_head_dim
        queries, cached = (torch.eye(n, dtype=up.dtype, device=up.device) for n in (spec.key_dim, both))
        behind = local | {"q_proj.weight": queries.repeat(spec.num_heads, 1), "kv_a_proj_with_mqa.weight": cached}
        record = split_factors(behind, spec, self.scale(config), self.rotary(config, layer))
        return replace(record, projections=split_latent(local, spec.num_heads, _NORM))

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        import torch

        assert isinstance(record, FactoredAttention), "only latent attention is written as such"
        if record.normalised:
            return self._normalised(record.paired("interleaved"), spec, layer)
        assert isinstance(record.projections, LatentProjections), "its class normalises the latent"
        local = {name: gain[0] if "norm." in name else gain for name, gain in join_latent(record.projections).items()}
        local |= {
            "kv_b_proj.weight": torch.cat((record.up_k, record.up_v), 1).flatten(0, 1),
            "o_proj.weight": record.o.flatten(1),
            **({} if record.o_bias is None else {"o_proj.bias": record.o_bias}),
        }
        return {f"{self.module(layer)}.{_renamed(name, to_own=False)}": tensor for name, tensor in local.items()}

    def _normalised(self, a: FactoredAttention, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of a latent that is divided by its norm: `up` undoes RMSNorm's √R. Larger latents hide its epsilon."""
        import torch

        assert spec.kv_lora_rank is not None, "a latent has a rank"
        assert a.q_nope_bias is None, "the class has no place for biases"
        assert a.k_rope_bias is None, "nor for this one"
        scale, missing = a.scale * math.sqrt(spec.key_dim), spec.kv_lora_rank - len(a.down)
        down = torch.nn.functional.pad(_SIZE * a.down, (0, 0, 0, missing))
        up = torch.nn.functional.pad(torch.cat((a.up_k, a.up_v), 1), (0, missing)) / math.sqrt(spec.kv_lora_rank)
        kv_gain = a.down.new_ones(len(a.down)) if a.gain is None else a.gain
        queries = (torch.cat((a.q_nope, a.q_rope), 1) * scale).flatten(0, 1)
        of_queries = {"q_proj.weight": queries}
        if a.q_down is not None:  # its root mean square is one (`convert.methods.constant_norm.behind_norm`)
            gain = queries.new_ones(len(a.q_down))
            of_queries = {"q_a_proj.weight": a.q_down, "q_a_layernorm.weight": gain, "q_b_proj.weight": queries}
        local = of_queries | {
            "kv_a_proj_with_mqa.weight": torch.cat((down, a.k_rope)),
            "kv_a_layernorm.weight": torch.nn.functional.pad(kv_gain, (0, missing)),
            "kv_b_proj.weight": up.flatten(0, 1),
            "o_proj.weight": a.o.flatten(1),
        }
        return {f"{self.module(layer)}.{name}": tensor for name, tensor in local.items()}


def _renamed(name: str, to_own: bool = True) -> str:
    """The name of a tensor in the class, in `convert.families.projections`, or the other way round."""
    module, _, last = name.rpartition(".")
    names = _OWN if to_own else {own: name for name, own in _OWN.items()}
    return f"{names.get(module, module)}.{last}"


V3 = NormalisedLatent("deepseek_v3", _WITH_EXPERTS, "config")
MINICPM3 = NormalisedLatent("minicpm3", LLAMA, "half", adds_output=False)
ROWS = [NormalisedLatent("deepseek_v2", _WITH_EXPERTS, "interleaved")]
