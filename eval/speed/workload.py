"""One model at one batch and context: its prefill and its decode step over a static cache of exactly that size.

Every step rewrites the last token of the context, so that each attends over the same number of tokens, in a
cache without spare room: stock attention reads all of a static cache, masked tokens too. It times nothing.
"""

from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from attention.errors import Failure
from attention.spec import AttentionSpec
from attention.versions import CACHE, logits_kept
from eval.machine.device import input_device

_AT_ONCE = 2**16  # tokens of a prefill pass: one of more takes more memory, and is no faster


class Workload:
    """Random tokens for a model, and a static cache for them.

    Attributes:
        model: A causal LM of transformers, absorbed or not.
        ids: `[batch, context]`.
        cache: A `StaticCache` of `context` tokens.
        chunk: Tokens of each sequence per prefill pass.
        decode: Runs a step: `model`, unless a caller puts something else here.
    """

    def __init__(self, model: Any, batch: int, context: int) -> None:
        """Allocate the tokens; the cache allocates itself at the first write.

        Raises:
            Failure: The model caches more than keys and values, which would have to be rewound too.
        """
        device = input_device(model)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator(device).manual_seed(0)
        self.model = self.decode = model
        self.ids = torch.randint(vocabulary, (batch, context), generator=generator, device=device)
        self.cache = StaticCache(config=model.config, max_cache_len=context)
        self.chunk = min(context, max(1, _AT_ONCE // batch))
        if other := {type(layer).__name__ for layer in self.cache.layers if not isinstance(layer, StaticLayer)}:
            raise Failure(
                f"{type(model).__name__} keeps more than keys and values: {', '.join(sorted(other))}",
                hint="kvfold measures models with attention in all layers",
            )
        self._last = logits_kept(model, 1)

    def rewind(self, tokens: int) -> None:
        """Make the cache take the next token for number `tokens`, counted from 0; its content stays."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(tokens)
            if layer.is_sliding:
                layer.cumulative_length_int = tokens

    def to_start(self) -> None:
        self.rewind(0)

    def to_last(self) -> None:
        self.rewind(self.ids.shape[1] - 1)

    def prefill(self) -> None:
        """Read all tokens into the cache; call `to_start` first."""
        for piece in self.ids.split(self.chunk, 1):
            self.model(piece, use_cache=True, **{CACHE: self.cache}, **self._last)

    def step(self) -> torch.Tensor:
        """Logits `[batch, 1, vocabulary]` of the last token over all others; call `to_last` first."""
        logits: torch.Tensor = self.decode(self.ids[:, -1:], use_cache=True, **{CACHE: self.cache}).logits
        return logits

    @property
    def cache_bytes(self) -> int:
        """Bytes of the live cache; a step reads all of it."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def check_cache(self, name: str, spec: AttentionSpec, dtype: str) -> None:
        """Check that the live cache has the size that `spec` predicts.

        Raises:
            Failure: It has another size.
        """
        batch, context = self.ids.shape
        predicted = batch * spec.cache_bytes(dtype, context, static=True)
        if self.cache_bytes != predicted:
            raise Failure(
                f"the live cache of {name} holds {self.cache_bytes} bytes, its config predicts {predicted}",
                hint="this class caches something that kvfold does not know; please report the model type",
            )

    def check_logits(self, name: str, dtype: str) -> None:
        """Run a step over the full cache, and check that its logits are finite.

        Raises:
            Failure: They are not.
        """
        self.to_last()
        if not self.step().isfinite().all():
            raise Failure(
                f"logits of {name} ({type(self.model).__name__}) are not finite in {dtype}: its speed would mean nothing",
                hint="use --dtype float32 or bfloat16; if that does not help, convert again",
            )
