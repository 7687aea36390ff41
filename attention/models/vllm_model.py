"""What vLLM builds for a checkpoint of kvfold's class: its transformers backend, around `modeling_kvfold.KvfoldModel`."""

import re
from typing import Any

import torch
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.fusers import MLAFuser
from vllm.model_executor.models.utils import WeightsMapper

from attention.models.modeling_kvfold import KvfoldLatentAttention
from attention.models.vllm import latent_objection, length_objection, objection


class KvfoldForCausalLM(TransformersForCausalLM):  # type: ignore[misc]
    """vLLM's transformers backend, for what it runs as transformers does.

    Raises:
        ValueError: It would not.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        model, processes = vllm_config.model_config, vllm_config.parallel_config.world_size
        self._refuse(model, objection(model.hf_config))
        self._refuse(model, length_objection(model.hf_config, model.max_model_len), "give --max-model-len")
        if processes > 1:
            self._refuse(model, f"it was tried in one process, and these are {processes}", "leave out options of parallelism")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # What GPT-NeoX calls its head.
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_regex={re.compile(r"^(model\.)?embed_out\."): "lm_head."})

    @staticmethod
    def _refuse(model: Any, reason: str | None, step: str = "run it in transformers") -> None:
        if reason:
            raise ValueError(f"vLLM cannot run {model.model}: {reason}; {step}")

    def recursive_replace(self) -> None:
        """Replace modules by vLLM's, then let its latent attention, which expands latents itself, take them as they are."""
        super().recursive_replace()
        for path, _ in self.attention_fusers.values():
            module = self.get_submodule(path)
            if isinstance(module, KvfoldLatentAttention):
                self._check_latents(module)
                self.fusers[path].append(_handing_over_latents(module))

    def _check_latents(self, module: KvfoldLatentAttention) -> None:
        """Refuse what vLLM would leave out of a latent attention."""
        model, config = self.model_config, self.vllm_config
        self._refuse(model, latent_objection(module))
        if not model.use_mla:
            self._refuse(model, "VLLM_MLA_DISABLE is set, with which vLLM does not cache its latents", "unset it")
        if config.lora_config is not None:
            self._refuse(model, "decoding over latents ignores adapters of kv_b_proj", "leave out --enable-lora")
        if (stored := config.cache_config.cache_dtype) != "auto":
            self._refuse(model, f"its latents were not tried in {stored}, and have no norm", "leave out --kv-cache-dtype")


def _not_expanded(latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, k_rope


def _handing_over_latents(module: Any) -> MLAFuser:
    """Let a `KvfoldLatentAttention` give latents to vLLM's attention, and tell the backend what expands them."""
    module.expand_kv = _not_expanded
    module.kv_b_proj.return_bias = True  # as vLLM's latent attention calls it
    return MLAFuser(
        source_cls=type(module).__name__,
        q_proj_name="q_proj",
        q_a_proj_name=None,
        q_a_layernorm_name=None,
        q_b_proj_name=None,
        kv_a_proj_name="kv_a_proj_with_mqa",
        kv_a_layernorm_name="kv_a_layernorm",
        kv_b_proj_name="kv_b_proj",
        o_proj_name="o_proj",
    )
