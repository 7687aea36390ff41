"""The model class of our own, for results that no stock class can hold."""

from __future__ import annotations

from pathlib import Path

MODEL_TYPE = "kvfold"
CODE = Path(__file__).with_name("modeling_kvfold.py")  # all that a checkpoint of that type needs


def provides(model_type: str) -> bool:
    """Whether the class of that model type is this one, so that the code beside the weights is not needed."""
    return model_type == MODEL_TYPE


def register() -> None:
    """Make transformers' Auto classes know it, and copy its code where it is saved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from attention.models.modeling_kvfold import KvfoldConfig, KvfoldForCausalLM

    KvfoldConfig.register_for_auto_class()
    KvfoldForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    AutoConfig.register(MODEL_TYPE, KvfoldConfig, exist_ok=True)
    AutoModelForCausalLM.register(KvfoldConfig, KvfoldForCausalLM, exist_ok=True)
