"""Stock DeepSeek-V3 as DeepSeek's own checkpoints are: no biases, no list of frequencies, for engines' own classes of it.

Its latents have a nearly constant norm (`convert.methods.portable_norm`). Its frequencies are a geometric ladder. That is
written as YaRN of factor 1, which has the same frequencies: vLLM's CPU operator is wrong for `default`. Its head is
a tensor of its own, even where the source ties it to the embedding, because engines expect that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family
from convert.families.latent import V3
from convert.hosts.latent import EXPANDS, DeepseekV3
from convert.hosts.source_class import LLAMA_CPP

_TURNS = 1e12
_EXACT = 1e-5  # of a ladder's ratio: frequencies are computed in fp32


class Portable(DeepseekV3):
    """`deepseek_v3` without biases."""

    name = "portable deepseek_v3"
    opened_by = "transformers ≥ 5.19 loads it without kvfold, and engines run it as they run DeepSeek-V3 without experts."
    remarks = (EXPANDS,)
    portable = True

    def layout(self, family: Family) -> Family:
        return V3

    def reserved(self, kv_lora_rank: int) -> int:
        return 1  # what makes the norm of latents constant

    def engines(self, family: Family) -> frozenset[str]:
        return super().engines(family) | ({"llama.cpp"} if family.model_type in LLAMA_CPP else set())

    def refuses_config(self, family: Family, target: AttentionSpec) -> str | None:
        if reason := super().refuses_config(family, target):
            return reason
        if family.spec.kv_lora_rank:
            return "it has a latent already, which may have biases (convert the original with --portable)"
        if family.traits.qkv_bias:
            return "queries and keys have biases, and the class has none (without --portable, its biases carry them)"
        if (activation := getattr(family.config, "hidden_act", "silu")) != "silu":
            return f"the MLP's activation is {activation}, and engines' own classes compute SiLU, whatever the config says"
        rotary = family.rotary(0)
        if rotary is None or rotary.long_frequencies is not None or ladder_ratio(rotary) is None:
            return "its RoPE frequencies are not a geometric ladder from 1, and the class would need a list of them"
        return None

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        written = super().config(raw, family, target, rotary)
        written |= {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": V3.model_type,
            "attention_bias": False,
            "q_lora_rank": target.q_lora_rank,
            # llama.cpp stops at a single group of a single expert.
            "n_group": None,
            "topk_group": None,
            # Copies that transformers saves lack a tied head, and vLLM would generate nonsense from these without an error.
            "tie_word_embeddings": False,
        }
        return written | ({} if rotary is None else {"rope_parameters": _as_yarn(rotary, family.config)})


def ladder_ratio(rotary: Rotary) -> float | None:
    """The ratio of neighbouring frequencies, from 1 downwards; None if they are not a geometric ladder."""
    found = rotary.frequencies.double()
    if len(found) == 1:
        return 1.0 if float(found[0]) == 1 else None
    ratio = float(found[-1] / found[0]) ** (1 / (len(found) - 1))
    expected = found.new_tensor([ratio**i for i in range(len(found))])
    return ratio if bool(((found / expected - 1).abs() < _EXACT).all()) else None


def _as_yarn(rotary: Rotary, config: Any) -> dict[str, Any]:
    """YaRN of factor 1 on the base θ with θ^(−2i/P) as frequencies; its scales of logits are 1."""
    ratio = ladder_ratio(rotary)
    assert ratio is not None, "only ladders are chosen for this class"
    return {
        "rope_type": "yarn",
        "rope_theta": ratio ** -len(rotary.frequencies) if len(rotary.frequencies) > 1 else 10_000.0,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        # So many turns have no frequency: the ramp between both kinds of them, which would round, is nowhere.
        "beta_fast": _TURNS,
        "beta_slow": _TURNS,
        "original_max_position_embeddings": config.max_position_embeddings,
    }


HOST = Portable()
