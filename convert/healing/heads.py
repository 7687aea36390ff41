"""A causal LM in two parts: the decoder, which makes hidden states, and what its class makes of them, the logits.

Logits of a long block over a large vocabulary take more memory than the model. Apart from the decoder, they can be made for a
few tokens at a time. What a class does around its output embedding (scales, caps, casts) stays the class's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from attention.versions import CACHE


@dataclass
class _Hidden(BaseModelOutputWithPastAndCrossAttentions):  # type: ignore[misc]
    """The output of a decoder, with all that classes read of it."""

    router_logits: Any = None


def hidden_states(model: Any, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
    """The decoder's output for `ids [B, T]`: `[B, T, E]`, without a cache or through one."""
    kept = {"use_cache": False} if cache is None else {"use_cache": True, CACHE: cache}
    found: torch.Tensor = model.get_decoder()(input_ids=ids, **kept).last_hidden_state
    return found


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The class's logits `[n, vocabulary]`, in fp32, of hidden states `[n, E]`."""
    decoder, ids = model.get_decoder(), torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    own = decoder.__dict__.get("forward")  # accelerate's hooks are there
    decoder.forward = lambda *args, **kwargs: _Hidden(last_hidden_state=hidden[None])
    try:
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own
    return found[0].float()
