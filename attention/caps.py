"""Capped logits (soft-capping, arXiv 2408.00118), which sdpa does not compute."""

from __future__ import annotations

from typing import Any


def keep_caps(model: Any) -> Any:
    """Let a model that caps logits attend eagerly if transformers chose sdpa for it; returns `model`.

    Before 5.23 (5.19 was tried) transformers does choose sdpa, which then leaves the caps out without an error.
    """
    decoder = model.config.get_text_config(decoder=True)
    if getattr(decoder, "attn_logit_softcapping", None) is not None and decoder._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    return model
