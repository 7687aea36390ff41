"""Tiny random models with latent attention, with the latent norm switched off as converted checkpoints have it, or not."""

from collections.abc import Iterable
from typing import Any

import torch
from tiny import LATENT, carry_query_biases, neutralise, random_model, tiny_config
from transformers import StaticCache

HEADS, RANK, ROPE, NOPE, VALUE = 4, 16, 8, 12, 10
SIZES: dict[str, Any] = LATENT | {
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": ROPE, "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "first_k_dense_replace": 3,
    "tie_word_embeddings": False,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 1.0, "attention_factor": 1.0,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0, 3.0, 0.7, 9.0], "long_factor": [1.0, 3.0, 0.7, 9.0]}  # fmt: skip


def mla_model(
    model_type: str = "deepseek_v3",
    neutral: tuple[float, ...] = (4.0,),
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    seed: int = 0,
    size: float | None = None,
    **changes: Any,
) -> Any:
    """A random model whose first latent channels are the constants of `neutral` (Σ c² = R); none of them: real norms.

    They are times `size`, or as large as kvfold writes them; 2²⁰ is how it wrote them once.
    """
    model = random_model(tiny_config(model_type, **(SIZES | changes)), seed)
    model.set_attn_implementation(attention)
    if neutral:
        neutralise(model, neutral, size)
        if model.config.q_lora_rank:
            carry_query_biases(model)
    return model.to(dtype)


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(4, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(lengths: list[int]) -> torch.Tensor:
    """Left padding of rows of these many tokens."""
    return (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()


@torch.no_grad()
def logits(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, chunks: Iterable[int] = (10,), cache: Any = None
) -> torch.Tensor:
    """Logits of `ids` fed in pieces of the sizes `chunks`, then token by token, over one cache; `mask` marks no padding."""
    start, pieces = 0, []
    chunks = list(chunks)
    for size in chunks + [1] * (ids.shape[1] - sum(chunks)):
        end = start + size
        seen = None if mask is None else mask[:, :end]
        out = model(ids[:, start:end], attention_mask=seen, past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, end
        pieces.append(out.logits)
    return torch.cat(pieces, 1)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative root mean square."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@torch.no_grad()
def compiles_whole(model: Any, ids: torch.Tensor, backend: str) -> None:
    """Its last two steps over a static cache, in one graph, give what they give without."""
    torch._dynamo.reset()
    steps = []
    for run in (model, torch.compile(model, fullgraph=True, backend=backend)):
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(ids[:, :-2], past_key_values=cache)
        steps.append(torch.cat([run(one, past_key_values=cache).logits for one in ids[:, -2:].split(1, 1)], 1))
    assert error(steps[1], steps[0]) < 1e-6


def checkpoint_activations(model: Any) -> None:
    """By the name that this transformers has for it."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)()
