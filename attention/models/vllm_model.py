"""What vLLM builds for a checkpoint of kvfold's class: its transformers backend, around `modeling_kvfold.KvfoldModel`."""

from __future__ import annotations

import re
from typing import Any

from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from attention.models.vllm import objection


class KvfoldForCausalLM(TransformersForCausalLM):  # type: ignore[misc]
    """vLLM's transformers backend, for what it runs as transformers does.

    Raises:
        ValueError: It would not.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        model = vllm_config.model_config
        if reason := objection(model.hf_config):
            raise ValueError(f"vLLM cannot run {model.model}: {reason}. transformers runs it")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # What GPT-NeoX calls its head.
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_regex={re.compile(r"^(model\.)?embed_out\."): "lm_head."})
