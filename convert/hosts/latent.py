"""The stock output class with latent attention, DeepSeek-V3's without experts, alone or inside another model.

`convert.families.latent` writes its tensors and the constant channels that neutralise its latent norm. Query biases, for which
the class has no place, go through its latent of queries. Models that build the decoder inside them by its type (llava and its
like) take this one; others, which have a decoder of their own, do not.
"""

from collections.abc import Collection, Mapping
from typing import Any

from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family, family_of
from convert.families.base import decoder_of
from convert.families.latent import V3, constants, latent_size, query_rank
from convert.hosts.base import TRANSFORMERS, StockClass
from convert.hosts.source_class import LLAMA_CPP

# RoPE types with one or two (LongRoPE) lists of frequencies; `dynamic` makes them a function of the length.
LISTED_ROPE = ("default", "linear", "llama3", "yarn", "longrope")
EXPANDS = (  # a remark on all that stock transformers runs
    "Stock transformers expands the whole cached latent for every new token. kvfold's `attention` package does not:\n"
    '`model = attention.load("path/to/this/directory")`, or `attention.absorb(model)` for a loaded model.\n'
    "On CPUs with AMX, vLLM generates wrong text from latents in float16: give it `--dtype bfloat16`."
)


class DeepseekV3(StockClass):
    """The stock class `deepseek_v3`, which caches a latent and a RoPE key."""

    name = "deepseek_v3"
    blocks = "Llama's"
    # Families with Llama's names and blocks (RMSNorm, attention, RMSNorm, SwiGLU, plain residuals); each is tested to be exact.
    families: Collection[str] = (
        "llama", "mistral", "ministral", "cwm", "seed_oss", "smollm3", "helium", "ernie4_5", "qwen2", "phi3"
    )  # fmt: skip
    runs = frozenset({"transformers", "vllm"})
    served_by = (
        "vLLM serves it through transformers' modules, SGLang and llama.cpp do not; with --portable, vLLM's own class does, "
        "and of llama with --engine llama.cpp also llama.cpp"
    )
    architecture = TRANSFORMERS  # engines' own classes would drop the biases
    eager = True
    carried = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
        "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "tie_word_embeddings",
        "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    opened_by = "transformers ≥ 5.19 loads it without kvfold, and caches only the latent and the RoPE key."
    remarks: tuple[str, ...] = (
        EXPANDS,
        "The model needs the biases of `kv_a_proj_with_mqa`, `o_proj` and, if it has one, `q_a_proj`. DeepSeek classes of\n"
        "engines would drop them. So config.json names TransformersForCausalLM: vLLM then runs transformers' modules. Saving\n"
        "the model again with transformers changes that field, and vLLM does not start: change it back before serving.",
    )
    replaces = "factored into kv_a_proj_with_mqa and kv_b_proj"

    def refuses_config(self, family: Family, target: AttentionSpec) -> str | None:
        config = family.config
        parameters = getattr(config, "rope_parameters", None) or {}
        if parameters.get("rope_type") not in LISTED_ROPE:
            return f"RoPE of type {parameters.get('rope_type', 'per layer type')!r} has no fixed list of frequencies"
        rotary = family.rotary(0)
        if family.restarts_cache and rotary and rotary.long_frequencies is not None:
            return (
                f"its LongRoPE has other frequencies beyond {rotary.long_beyond} tokens, where its own class computes the "
                "cache anew, and this one does not"
            )
        if family.without_latent:
            return family.without_latent
        traits = family.traits
        if traits.qk_norm:
            return "queries and keys are normalised (QK-norm), so their heads cannot be mixed"
        if any(getattr(config, flag, False) for flag in ("mlp_bias", "use_bias")):
            return "the MLP has biases, which the class does not support"
        if not any(family.rotaries):
            return "no layer has RoPE, and the class needs a RoPE key in every layer"
        for field, value in traits.extra_features.items():
            if field != "sliding_window":
                return f"config.json sets {field} to {value}, which the class does not support"
            if value < (positions := config.max_position_embeddings):  # a window over all positions is fine
                return (
                    f"the sliding window of {value} tokens is shorter than the {positions} positions, and the class has no "
                    f"window (for contexts up to {value}, set max_position_embeddings to {value} in config.json)"
                )
        return None

    def reserved(self, kv_lora_rank: int) -> int:
        return len(constants(kv_lora_rank))

    def latent_size(self, kv_lora_rank: int) -> float | None:
        return latent_size(constants(kv_lora_rank))

    def own(self, family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        config = family.config
        return {
            "num_key_value_heads": target.num_heads,
            "kv_lora_rank": target.kv_lora_rank,
            "q_lora_rank": query_rank(config.hidden_size) if family.traits.qkv_bias else None,
            "qk_nope_head_dim": target.qk_nope_head_dim,
            "qk_rope_head_dim": target.qk_rope_head_dim,
            "v_head_dim": target.head_dim,
            "attention_bias": True,
            **({} if rotary is None else {"rope_parameters": rope_parameters(rotary, config)}),
            "rope_interleave": True,
            # All layers are dense, so no expert is built.
            "first_k_dense_replace": target.num_layers,
            "n_routed_experts": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": config.intermediate_size,
            "num_nextn_predict_layers": 0,
        }

    def notes(self, family: Family) -> tuple[str, ...]:
        if not family.traits.qkv_bias:
            return ()
        width = family.config.hidden_size
        rank = query_rank(width)
        return (f"query biases go through q_a_proj, an identity with a constant: {width} × {rank} more weights in each layer",)


def rope_parameters(rotary: Rotary, config: Any) -> dict[str, Any]:
    """The config's entry for any list of frequencies: LongRoPE's factors.

    LongRoPE computes 1 / (factor · θ^(2i/P)); with θ = 1 each factor is the inverse of a frequency, rounded once. It is written
    even if the default formula gives the frequencies: vLLM's DeepSeek class, which drops biases without an error, does not
    start with it. That class is chosen once transformers has saved the model again.
    """
    long = rotary.frequencies if rotary.long_frequencies is None else rotary.long_frequencies
    return {
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "short_factor": (1 / rotary.frequencies).tolist(),
        "long_factor": (1 / long).tolist(),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": rotary.long_beyond or config.max_position_embeddings,
    }


DEEPSEEK = DeepseekV3()


class InsideClass(DeepseekV3):
    """The class of a model with a decoder inside, which becomes one that `deepseek_v3` holds."""

    name = f"its own class around {DEEPSEEK.name}"
    served_by = "no engine was tried"
    runs = frozenset({"transformers"})
    families = ()

    def layout(self, family: Family) -> Family:
        return DEEPSEEK.layout(family).inside(family.path, family.config)

    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        if not family.path:
            return "the class is for decoders inside other models, of types that are also read alone"
        if reason := DEEPSEEK.refuses(alone(family), target):
            return reason
        raw = {**family.config.to_dict(), "text_config": family.decoder.to_dict()}
        made = decoder_of(self.sized(raw, family, target))
        if made.model_type != DEEPSEEK.name:
            return f"the class of {family.model_type} always builds {made.model_type} as its decoder"
        return None

    def notes(self, family: Family) -> tuple[str, ...]:
        return DEEPSEEK.notes(alone(family))

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        return {**raw, "text_config": DEEPSEEK.config(raw["text_config"], alone(family), target, rotary)}


def alone(family: Family) -> Family:
    """The family of the decoder inside a model, without what is around it."""
    return family_of(family.decoder.model_type).of(family.decoder)


_TURNS = 1e12
_EXACT = 1e-5  # of a ladder's ratio: frequencies are computed in fp32


class Portable(DeepseekV3):
    """`deepseek_v3` as DeepSeek's own checkpoints are: no biases, no list of frequencies, for engines' own classes of it.

    Its latents have a nearly constant norm (`convert.methods.portable_norm`). Its frequencies are a geometric ladder. That is
    written as YaRN of factor 1, which has the same frequencies: vLLM's CPU operator is wrong for `default`. Its head is a
    tensor of its own, even where the source ties it to the embedding, because engines expect that.
    """

    name = "portable deepseek_v3"
    opened_by = "transformers ≥ 5.19 loads it without kvfold, and engines run it as they run DeepSeek-V3 without experts."
    remarks = (EXPANDS,)
    portable = True
    eager = False

    def layout(self, family: Family) -> Family:
        return V3

    def reserved(self, kv_lora_rank: int) -> int:
        return 1  # what makes the norm of latents constant

    def engines(self, family: Family) -> frozenset[str]:
        return super().engines(family) | ({"llama.cpp"} if family.model_type in LLAMA_CPP else set())

    def refuses_config(self, family: Family, target: AttentionSpec) -> str | None:
        if reason := super().refuses_config(family, target):
            return reason
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


INSIDE, PORTABLE = InsideClass(), Portable()
