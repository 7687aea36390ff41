"""The auto class of transformers that loads a language model: of text alone, or of pictures and text."""

from __future__ import annotations

from typing import Any


def auto_class(config: Any) -> Any:
    """`AutoModelForCausalLM`, or `AutoModelForImageTextToText` for a config that only the latter has a class for."""
    import transformers

    alone = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    pictures = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if pictures and not alone else transformers.AutoModelForCausalLM
