"""A model's forward over an encoded cache (`attention.cache`), or, for fits and evaluations, over one that only rounds.

A rounding cache is for one pass over whole texts, whose queries read what a format keeps.
"""

import functools
import inspect
from collections.abc import Collection
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from attention.cache import EncodedLayer
from attention.encoding import rounded
from attention.errors import Refusal
from attention.formats import FORMATS, Format, format_named, parts_of
from attention.models.modeling_kvfold import is_paged
from attention.spec import AttentionSpec
from attention.versions import CACHE

_INPUTS = ("input_ids", "inputs_embeds")
_EXACT = FORMATS["float64"]


class EncodedForward:
    """The forward of a model whose cache is encoded: every call reads what decoding token by token would read.

    It takes and returns what the model's own forward does. A call without a cache, or with an empty one that grows, gets an
    encoded one, also where `use_cache` is false.

    Attributes:
        stock: The model's own forward.
    """

    def __init__(self, model: Any, form: Format) -> None:
        self.model, self.form, self.stock = model, form, model.forward
        self._signature = inspect.signature(self.stock)
        require_cache(model, form)
        spec = AttentionSpec.from_config(model.config)
        spec.bytes_per_token(form.name)  # refuses sizes that the format does not take
        windows, layers = spec.windows or (None,) * spec.num_layers, range(spec.num_layers)
        self._layers = [(spec.format_of(i, form), spec.is_latent(i), windows[i]) for i in layers]
        functools.update_wrapper(self, self.stock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same as the model's own forward over an encoded cache.

        Raises:
            Refusal: The model is in training mode, or the cache is neither encoded nor empty.
        """
        if self.model.training:
            raise Refusal("an encoded cache is for inference, and the model is in training mode", hint="call model.eval()")
        given = self._named(args, kwargs)
        if is_paged(given.get("cache")):
            raise Refusal(
                f"the cache of this model is stored in {self.form.name}, and continuous batching has a cache of its own",
                hint="use generate, or attention.restore(model)",
            )
        total = next((given[name].shape[1] for name in _INPUTS if given.get(name) is not None), None)
        if total is None:
            return self.stock(**given)  # which says what is missing
        wanted, given["use_cache"] = given.get("use_cache"), True
        given[CACHE] = cache = self._encoded(given.get(CACHE))
        as_dict = given.pop("return_dict", None)
        length = cache.get_seq_length() + total
        output = self.stock(**given)
        if cache.get_seq_length() != length:
            raise Refusal(
                f"{type(self.model).__name__} does not keep its keys and values in the cache that it is given",
                hint="load it without cache_dtype",
            )
        if wanted is False:  # generation asks whether the key exists
            output = type(output)(**{name: value for name, value in output.items() if name != CACHE})
        return output if (self.model.config.return_dict if as_dict is None else as_dict) else output.to_tuple()

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind_partial(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            several = self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            named |= value if several else {name: value}
        if (held := named.pop("past_key_values", None)) is not None:  # newer versions still take this name
            named[CACHE] = held if named.get(CACHE) is None else named[CACHE]
        return named

    def _encoded(self, cache: Cache | None) -> Cache:
        cache = DynamicCache() if cache is None else cache
        forms = [layer.form if isinstance(layer, EncodedLayer) else None for layer in cache.layers]
        if cache.layers and forms == [form for form, *_ in self._layers]:
            return cache
        if type(cache) is not DynamicCache or cache.get_seq_length():
            filled = f"a filled {type(cache).__name__}" if cache.get_seq_length() else f"a {type(cache).__name__}"
            raise Refusal(
                f"the cache of this model is stored in {self.form.name}, and cannot be {filled}",
                hint="give none, or an empty DynamicCache",
            )
        recording = any(getattr(layer, "record_past", False) for layer in cache.layers)
        flex = self.model.config.get_text_config(decoder=True)._attn_implementation == "flex_attention"  # it is compiled
        cache.layers = [EncodedLayer(*layer, decoded=flex) for layer in self._layers]
        cache.layer_class_to_replicate = None
        if recording:  # assisted generation takes tokens back, so that windows forget nothing
            cache.activate_past_recording()
        return cache


def require_cache(model: Any, form: Format) -> None:
    """Refuse a model that does not cache keys and values of all its layers."""
    signature = inspect.signature(model.forward)
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds or CACHE not in signature.parameters:
        what = f"a {sorted(kind.__name__ for kind in kinds)[0]}" if kinds else "no cache of keys and values"
        raise Refusal(
            f"a cache in {form.name} needs layers that all cache keys and values, and {type(model).__name__} has {what}",
            hint="load it without cache_dtype",
        )


def store_encoded(model: Any, form: str) -> Any:
    """Make `model` store its KV cache in a format; `attention.restore` undoes it.

    Args:
        model: A transformers model that decodes from a cache.
        form: The name of a format, see `attention.formats`. Of one that only engines store, the cache holds what they read.

    Returns:
        `model` itself.

    Raises:
        Refusal: The format is unknown, or does not take the sizes of the model's heads.
    """
    store_plain(model)
    model.forward = EncodedForward(model, format_named(form))
    return model


def store_plain(model: Any) -> Any:
    """Undo `store_encoded`; return `model` itself."""
    if isinstance(forward := vars(model).get("forward"), EncodedForward):
        del model.forward
        if forward.stock != model.forward:  # an instance had one of its own, such as a hook
            model.forward = forward.stock
    return model


class RoundedLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of one layer: what comes in is read rounded, and not kept."""

    def __init__(self, form: Format, latent: bool) -> None:
        super().__init__()
        self.form, self.latent = form, latent

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of heads, or a latent and its RoPE key, `[B, heads, T, n]` each, as they are read; differentiable."""
        first, second = parts_of(self.latent)
        return rounded(key_states, self.form, first), rounded(value_states, self.form, second)

    def get_seq_length(self) -> int:
        return 0


def rounding_cache(form: Format, spec: AttentionSpec, only: Collection[int] | None = None) -> DynamicCache:
    """The cache of a model with that attention, for texts that begin with the pass; if given, `only` these layers round."""
    layers = range(spec.num_layers)
    forms = [spec.format_of(i, form) if only is None else form if i in only else _EXACT for i in layers]
    cache = DynamicCache()
    cache.layers = [RoundedLayer(own, spec.is_latent(layer)) for layer, own in enumerate(forms)]
    cache.layer_class_to_replicate = None
    return cache
