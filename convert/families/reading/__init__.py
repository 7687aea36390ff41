"""The family of any config: the row of its model type, or what experiments find if it has none."""

import copy
import logging
import re
from dataclasses import replace
from typing import Any

from attention.errors import Refusal, one_line
from attention.models import MODEL_TYPE
from convert.families import FAMILIES, UNREAD, Family, family_of
from convert.families.base import CLIP, decoder_of
from convert.families.kvfold import around
from convert.families.latent import V3

_log = logging.getLogger("kvfold")

# Model types of transformers without a row that experiments read; tests make each from a small config.
FOUND = (
    "apertus1p5_text", "aria_text", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "flint", "glm4_moe", "gpt-sw3", "gpt_oss", "granite_swa", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "internlm3", "iquestcoder", "kolibri1", "mellum", "minimax_m2",
    "minimax_m3_vl_text", "ministral3", "modernbert-decoder", "nanochat", "persimmon", "phi4_multimodal", "solar_open",
)  # fmt: skip

# Types that were published with latent attention and have no row: they are counted (`plan`, `inspect`), and not converted.
COUNTED = ("axk1", "deepseek_v2", "glm4_moe_lite", "sarvam_mla", "youtu")

# Types with a decoder inside that experiments read. Tests convert each, and see pictures with llava and qwen2_5_vl.
INSIDE = (
    "aya_vision", "emu3", "gemma3", "got_ocr2", "internvl", "llava", "llava_next", "llava_onevision", "mistral3", "paligemma",
    "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm", "vipllava",
)  # fmt: skip


# Config fields that change nothing of an attention's reading, or that tests of the rows prove it with.
_COVERED = re.compile(
    r"^_|^num_|^n_|_size$|_dims?$|_id$|_ids$|_eps$|_epsilon$|^initializer|dropout|^use_cache$|^is_.*coder$|dtype$|^architectures$|"
    r"^transformers_version$|^tie_|_act$|activation|^auto_map$|embeddings$|_labels?|label2id|pdrop$|_bias$|^bias$|^rope_|"
    r"^layer_types$|window|^no_rope|norm$|layernorm$|softcapping$|^partial_rotary|^rotary_|^head_dim$|experts|moe|router|topk|"
    r"multiplier$|^scale_|^logit|_rank$|token|^output_|^return_|^chunk_size|^problem_type$|^quant|^first_k|^d_?model|^dim_|"
    r"^calibrated_positions$|^source_positions$|^attention_types$|^attention_layers$|^attention_heads$|^multi_query$|^query_pre_attn_scalar$"
)


def require_proved(family: Family) -> None:
    """Refuse a config that a row reads wrongly: where fields are set that the rows' tests do not cover, a small twin decides.

    Raises:
        Refusal: The twin's attention computes something else than the row says.
    """
    if not family.is_row or {*family.traits.unmodelled} - {CLIP}:
        return  # the last: the row itself says that its class does more
    config = family.config
    odd: list[str] = []
    try:
        usual = vars(type(config)())
        odd += [name for name, value in vars(config).items() if not _COVERED.search(name) and usual.get(name) != value]
        if not odd:
            return
        from convert.families.reading.twin import Twin, disproof

        wrong = disproof(family, Twin(config))
    except Exception as error:  # classes raise errors of many kinds; then the proof of the tests stands
        _log.warning("not proved whether %s change its attention: %s", ", ".join(odd) or "its settings", one_line(error, 200))
        return
    if wrong:
        raise Refusal(
            f"this {config.model_type} cannot be read: {wrong}",
            hint=f"config.json sets {', '.join(odd)}, one of which may be why; `convert eval` measures it all the same",
        )


def _before_latents(config: Any) -> Any:
    """The config inside one of kvfold's class, without the sizes of a latent that the source did not have."""
    if config.text_config.model_type in FAMILIES:
        return config.text_config
    inner = copy.deepcopy(config.text_config)
    for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        setattr(inner, name, None)
    return inner


def family_for(config: Any) -> Family:
    """The family of checkpoints with this config, bound to it.

    Raises:
        Refusal: As of `convert.families.family_of`, or of `convert.families.reading.experiments.find`.
    """
    if config.model_type == MODEL_TYPE:
        return around(family_for(_before_latents(config)), config)
    alone = decoder_of(config) is config
    if (alone and config.model_type in FAMILIES) or config.model_type in UNREAD:
        return family_of(config.model_type).of(config)
    if alone and config.model_type in COUNTED:
        return replace(V3, model_type=config.model_type, config=config)
    from convert.families.reading.experiments import find  # takes torch

    return find(config)
