"""kvfold's class: the output class of what no stock class can hold.

It takes GQA and MQA of sources whose class ignores `num_key_value_heads`, or that have QK-norm or a clamp, behind which heads
are then shared; MLA of sources that no stock class can hold; and results in which some layers stay as they are. It is built
around the source's class, or around a stock class that computes the same if only that one gives RoPE to its layers.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attention.auto import config_of
from attention.models import AUTO_MAP, CODE, MODEL_TYPE
from attention.models.vllm import LATENT_PROVEN, PROVEN, TRIED, rope_objection
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import FAMILIES, Family
from convert.families.base import CLIP, SOFTCAP, WINDOWS, has_other_models
from convert.families.kvfold import around
from convert.hosts.base import Host
from convert.hosts.sharing import PHI

_OUTER = ("architectures", "auto_map", "dtype", "torch_dtype")  # keys that only the outermost config has
# Families that share KV heads in their own class, but before a norm or a clamp; behind these, shared heads were proven exact.
_NORMED = (
    "apertus", "cohere", "exaone4", "gemma3_text", "olmo", "olmo2", "olmo3", "olmoe", "phi", "qwen3", "qwen3_moe", "stablelm",
)  # fmt: skip


class Kvfold(Host):
    """The class of `attention.models`: a stock class's config inside, and what its attention became.

    Args:
        families: As in `Host`.
        reason: Why kvfold made the class, for the model card.
        replaces: As in `Host`.
        in_vllm: Families around whose class vLLM runs it, where kvfold is installed beside it.
    """

    name = MODEL_TYPE
    loads_in = "transformers, with kvfold's code"
    served_by = (
        f"where kvfold is installed, vLLM {TRIED} serves GQA and MQA of {', '.join(PROVEN)}, "
        f"and MLA of {', '.join(LATENT_PROVEN)}"
    )
    opened_by = (
        "transformers ≥ 5.19 loads it with the code beside the weights, and so its tokenizer: give\n"
        '`trust_remote_code=True` to both. Where kvfold is installed, `attention.load("path/to/this/directory")` does without.'
    )
    code = CODE

    def __init__(self, families: frozenset[str], reason: str, replaces: str, in_vllm: tuple[str, ...]) -> None:
        self.families, self.replaces, self._in_vllm = families, replaces, in_vllm
        self.remarks = (
            f"kvfold made this class, because {reason}. SGLang and llama.cpp do not know it; vLLM {TRIED} does where kvfold is "
            f"installed, for sources of type {', '.join(in_vllm)}.",
            "A later transformers may need newer code: `convert refresh path/to/this/directory` renews it, and no weights.\n"
            "Results whose `modeling_kvfold.py` has no `CODE_VERSION` need that for transformers ≥ 5.24.",
        )

    def engines(self, family: Family) -> frozenset[str]:
        run = family.model_type in self._in_vllm
        if run and family.config is not None:  # vLLM's plugin refuses windows, caps, and RoPE that depends on the length
            limited = family.traits.extra_features.keys() & {*WINDOWS, SOFTCAP}
            run = not limited and rope_objection(family.config) is None
        return frozenset({"transformers", *(["vllm"] if run else [])})

    def layout(self, family: Family) -> Family:
        stock = _stock(family)
        return around(stock.layout(family) if stock else family)

    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        # Where layers are kept, it also shares heads of sources whose own class can share them in all.
        if target.kept and AttentionSpec.of_heads(family.decoder).num_kv_heads != family.spec.num_kv_heads:
            return "its own class caches keys and values of all query heads, also in layers that stay as they are"
        traits, config = family.traits, family.config
        behind = family.needs_projections
        if not target.kv_lora_rank:
            if target.num_kv_heads == family.spec.num_kv_heads:
                return "no KV heads are shared, and the source's class holds its own"
            if traits.qk_norm and traits.qk_norm.after_rotary:
                return "queries and keys are normalised behind RoPE, and kvfold's class rotates behind a norm"
            if family.shares_heads and not behind and not target.kept:
                return "the source's class can share KV heads, and no norm or clamp comes before them"
        elif family.without_latent:
            return family.without_latent
        for field, value in traits.extra_features.items():
            if field not in (CLIP, SOFTCAP, *WINDOWS):
                return f"config.json sets {field} to {value}, which kvfold's attention does not do"
        rotaries = [rotary for rotary in family.rotaries if rotary]
        if not target.kv_lora_rank and not behind and any(rotary.pairing != "half" for rotary in rotaries):
            return "RoPE pairs neighbouring dims, and kvfold's grouped attention pairs those of two halves"
        if len({rotary.dims for rotary in rotaries}) > 1:
            return "layers rotate different numbers of dims, and kvfold's RoPE keys have one list for all layers"
        lists = [_frequencies(rotary) for rotary in rotaries]
        if any(len(set(found)) < len(found) for found in lists) and any(found != lists[0] for found in lists):
            return "layers rotate with different frequencies, some of which are equal: kvfold cannot tell them apart"
        if (stock := _stock(family)) and (reason := stock.refuses(family, family.spec)):
            return f"it is built around {stock.name}: {reason}"
        if family.decoder is not config or (not family.is_row and has_other_models(config)):
            return "its decoder is inside another model, and the class holds decoders alone"
        if config.model_type not in self.families and family.is_row and not target.kept:
            return f"it was not made for {config.model_type} (`convert families` lists the types that it is for)"
        return None

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        source = family
        windows = [source.inner_window(layer) for layer in range(target.num_layers)]
        if stock := _stock(source):
            raw = stock.config(raw, source, source.spec, None)
            family = stock.layout(source).of(config_of(raw))
        inner = {key: value for key, value in raw.items() if key not in (*_OUTER, *source.folded)}
        outer = {
            "architectures": ["KvfoldForCausalLM"],
            "model_type": MODEL_TYPE,
            "auto_map": AUTO_MAP,
            **{key: raw[key] for key in ("dtype", "torch_dtype") if key in raw},
            "tie_word_embeddings": family.config.tie_word_embeddings,
            "attention_path": family.attention_path,
            "qkv_bias": source.traits.qkv_bias,
            "o_bias": source.traits.o_bias,
            "scaling": source.scale,
            **({"inner_windows": windows} if any(windows) else {}),
            **({"kept_layers": list(target.kept)} if target.kept else {}),
        }
        if target.kv_lora_rank is None:
            outer |= _of_heads(family)
            if target.kept:
                return {**outer, "shared_kv_heads": target.num_kv_heads, "text_config": inner}
            return {**outer, "text_config": {**inner, "num_key_value_heads": target.num_kv_heads}}
        sizes = {
            "kv_lora_rank": target.kv_lora_rank,
            "qk_rope_head_dim": target.qk_rope_head_dim,
            "qk_nope_head_dim": target.qk_nope_head_dim,
            "v_head_dim": target.head_dim,
        }
        return {
            **outer,
            "o_bias": True,
            **_kept_projections(family),
            **_rotation(family, rotary, target.qk_rope_head_dim),
            "text_config": {**inner, **sizes},
        }


def _stock(family: Family) -> Host | None:
    """The stock class that the class is built around for a source of `family`; None for the source's own.

    It passes cosines and sines to its layers, and the source's own computes them inside its attention.
    """
    return PHI if family.model_type in PHI.families else None


def _kept_projections(family: Family) -> dict[str, Any]:
    """What follows a source's projections: QK-norm, a clamp."""
    traits, left_out = family.traits, ("after_rotary", "fixed")  # in this class the norm comes before RoPE, and has gains
    norm = traits.qk_norm and {key: value for key, value in asdict(traits.qk_norm).items() if key not in left_out}
    return {key: value for key, value in (("qk_norm", norm), ("clip_qkv", traits.clip)) if value is not None}


def _of_heads(family: Family) -> dict[str, Any]:
    """What shared heads need to know of the source, whose projections they may be behind."""
    spec = family.spec
    plain = [layer for layer, rotary in enumerate(family.rotaries) if rotary is None]
    behind = {**_kept_projections(family), "projected_kv_heads": spec.num_kv_heads, **_stride(family)}
    return {
        **(behind if family.needs_projections else {}),
        **({"unrotated_layers": plain} if 0 < len(plain) < spec.num_layers else {}),
    }


def _rotation(family: Family, rotary: Rotary | None, rope_dim: int) -> dict[str, Any]:
    """Which of the frequencies of the source's class the pairs of a RoPE key have."""
    source = family.first_rotary
    if source is None:
        return {"rope_pairs": []}
    if rotary is None:  # only sizes matter
        return {"rope_pairs": [0] * (rope_dim // 2)}
    pairs = [_frequencies(source).index(pair) for pair in _frequencies(rotary)]
    factors = [each.attention_factor if each else 1.0 for each in family.rotaries]
    return {"rope_pairs": pairs, "rope_factor": factors if len(set(factors)) > 1 else factors[0], **_stride(family)}


def _stride(family: Family) -> dict[str, int]:
    return {"rope_stride": family.rope_stride} if family.rope_stride > 1 else {}


def _frequencies(rotary: Rotary) -> list[tuple[float, float]]:
    """Of each pair: in short sequences, and in long ones."""
    long = rotary.frequencies if rotary.long_frequencies is None else rotary.long_frequencies
    return list(zip(rotary.frequencies.tolist(), long.tolist(), strict=True))


HOST = Kvfold(
    frozenset((*_NORMED, *(n for n, of in FAMILIES.items() if of.has_heads and not of.shares_heads and _stock(of) is None))),
    "the source's class cannot share KV heads, only before its norm or clamp, or only in all layers",
    "became q_proj, k_proj, v_proj and o_proj; a norm or clamp and what comes before it stay, under names of the class",
    in_vllm=PROVEN,
)
LATENT_HOST = Kvfold(
    # Of each, a latent of full size was proven to be exact; Llama's like are here for configs that deepseek_v3 refuses.
    frozenset(name for name, of in FAMILIES.items() if of.has_heads and not of.without_latent),
    "no stock class can hold this model's blocks, RoPE or QK-norm with latent attention, or layers that stay as they are",
    "factored into kv_a_proj_with_mqa and kv_b_proj; projections behind which it is stay, under names of the class",
    in_vllm=LATENT_PROVEN,
)
