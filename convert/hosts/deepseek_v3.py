"""Stock DeepSeek-V3 without experts: the output class of MLA for sources whose blocks are Llama's."""

from __future__ import annotations

from typing import Any

from attention.spec import AttentionSpec
from convert.hosts.latent import StockLatent

# Families with Llama's names and blocks (RMSNorm, attention, RMSNorm, SwiGLU, plain residuals); each is tested to be exact.
_LIKE_LLAMA = ("llama", "mistral", "ministral", "cwm", "seed_oss", "smollm3", "helium", "ernie4_5", "qwen2", "phi3")


class DeepseekV3(StockLatent):
    """The stock class `deepseek_v3`."""

    name = "deepseek_v3"
    blocks = "Llama's"
    families = _LIKE_LLAMA
    runs = frozenset({"transformers", "vllm"})
    served_by = (
        "vLLM serves it through transformers' modules, SGLang and llama.cpp do not; with --portable, vLLM's own class does, "
        "and of llama with --engine llama.cpp also llama.cpp"
    )
    remarks = (
        *StockLatent.remarks,
        "The model needs the biases of `kv_a_proj_with_mqa`, `o_proj` and, if it has one, `q_a_proj`. The DeepSeek classes of\n"
        "vLLM, SGLang and llama.cpp do not have them, and would generate wrong text. So config.json says that the\n"
        "architecture is TransformersForCausalLM: vLLM then runs transformers' own modules. Saving the model again with\n"
        "transformers changes that field, and vLLM then fails to start: change it back before serving the copy.",
    )

    def refuses_blocks(self, config: Any) -> str | None:
        if any(getattr(config, flag, False) for flag in ("mlp_bias", "use_bias")):
            return "the MLP has biases, which the class does not support"
        return None

    def own(self, config: Any, target: AttentionSpec) -> dict[str, Any]:
        return {
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


HOST = DeepseekV3()
