"""The family of any config: the row of its model type, or what experiments find if it has none."""

from __future__ import annotations

from typing import Any

from attention.models import MODEL_TYPE
from convert.families import FAMILIES, UNREAD, Family, family_of
from convert.families.kvfold import KvfoldProjections

# Model types of transformers without a row that experiments read, with an attention that config.json can make so.
FOUND = (
    "aria_text", "axk1", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe",
    "glm4_moe_lite", "gpt-sw3", "gpt_oss", "granite_swa", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3",
    "internlm3", "iquestcoder", "kolibri1", "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral3", "modernbert-decoder",
    "solar_open", "youtu",
)  # fmt: skip


def family_for(config: Any) -> Family:
    """The family of checkpoints with this config.

    Raises:
        Refusal: As of `convert.families.family_of`, or of `convert.families.found.find`.
    """
    if config.model_type == MODEL_TYPE:
        return KvfoldProjections(family_for(config.text_config))
    if config.model_type in FAMILIES or config.model_type in UNREAD:
        return family_of(config.model_type)
    from convert.families.found import find  # takes torch

    return find(config)
