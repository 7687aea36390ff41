"""A KV cache that stores its numbers in a format of `attention.formats`, for any model that caches in transformers' `Cache`.

transformers' own `QuantizedCache` differs in what matters here: it returns the originals during the prefill, so that an
evaluation in one pass shows no loss; it keeps the newest 128 tokens in full precision; it packs nothing below a byte without
another library; and it takes no latents.

What a query reads does not depend on how its text was cut into forward passes. Values, latents and their RoPE keys are read
as they are stored, those of the query's own token as well. Keys of heads that are grouped along time are encoded once a token
of the next group arrives; so a query reads the keys of its own group in full precision, and those of earlier groups encoded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from attention.encoding import Encoded, decode, encode
from attention.errors import Refusal
from attention.formats import Format, format_named
from attention.spec import AttentionSpec

_CUT = ("input_ids", "position_ids", "cache_position", "token_type_ids")  # [..., T]
_INPUTS = ("input_ids", "inputs_embeds")
_UNCUT = (
    "labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
)  # outputs that those of pieces do not make up


class _Rows:
    """Cached `[B, heads, S, n]`, each token encoded by itself.

    Attributes:
        stored: What is cached; None before the first token.
    """

    def __init__(self, form: Format, group: int) -> None:
        self.form, self.group = form, group
        self.stored: Encoded | None = None

    @property
    def length(self) -> int:
        """S."""
        return 0 if self.stored is None else self.stored.codes.shape[2]

    def stored_bytes(self, full: int) -> int:
        """Bytes of what is stored."""
        return 0 if self.stored is None else self.stored.nbytes

    def append(self, new: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Cache further tokens `[B, heads, T, n]`; return all as they are read."""
        added = encode(new, self.form, self.group)
        self.stored = added if self.stored is None else _joined(self.stored, added)
        return decode(self.stored, self.form, self.group, new.dtype)

    def change(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change all that is stored by a function that leaves its dims in their order."""
        if self.stored is not None:
            self.stored = _changed(self.stored, how)


class _Groups:
    """Cached keys `[B, heads, S, n]`, encoded per channel in groups of consecutive tokens.

    Attributes:
        closed: `[B, heads, groups, n, tokens]` of the groups before the newest token's; None if there are none.
        opened: `[B, heads, 1 … tokens, n]`, those of the newest token's group, in full precision; None before the first token.
    """

    def __init__(self, form: Format) -> None:
        self.form = form
        self.closed: Encoded | None = None
        self.opened: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """S."""
        encoded = 0 if self.closed is None else self.closed.codes.shape[2] * self.form.tokens
        return encoded + (0 if self.opened is None else self.opened.shape[2])

    def stored_bytes(self, full: int) -> int:
        """Bytes of what is stored, if a value in full precision takes `full` of them."""
        encoded = 0 if self.closed is None else self.closed.nbytes
        return encoded + (0 if self.opened is None else self.opened.numel() * full)

    def append(self, new: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Cache further tokens `[B, heads, T, n]` of one group; return all as they are read.

        `seen` `[B, S]` is false for padding, which no scale counts; None if there is none.
        """
        tokens = self.form.tokens
        if self.opened is not None and self.opened.shape[2] == tokens:
            first = self.length - tokens
            counted = None if seen is None else seen[:, None, None, first : first + tokens].to(new.device)
            group = encode(self.opened.transpose(2, 3), self.form, tokens, counted)
            closed = _changed(group, lambda part: part.unsqueeze(2))
            self.closed = closed if self.closed is None else _joined(self.closed, closed)
            self.opened = None
        self.opened = new if self.opened is None else torch.cat([self.opened, new], 2)
        if self.opened.shape[2] > tokens:
            raise Refusal(
                f"a cache in {self.form.name} takes tokens of one group of {tokens} at a time",
                hint="call the model that attention.load(…, cache_dtype=…) returns, which cuts its input",
            )
        if self.closed is None:
            return self.opened
        read = decode(self.closed, self.form, tokens, new.dtype).transpose(3, 4).flatten(2, 3)
        return torch.cat([read, self.opened], 2)

    def change(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """As of `_Rows`; of the groups, the third dim are groups, not tokens."""
        if self.closed is not None:
            self.closed = _changed(self.closed, how)
        if self.opened is not None:
            self.opened = how(self.opened)


class EncodedLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of one layer: keys and values of heads, or a latent and its RoPE key.

    A layer with a sliding window caches all tokens, too; the mask leaves out those before the window.
    """

    def __init__(self, form: Format, latent: bool) -> None:
        super().__init__()
        self.form, self.latent = form, latent
        self.is_croppable = latent or not form.tokens
        self.seen: torch.Tensor | None = None  # [B, S], false for padding
        self.reset()

    def reset(self) -> None:
        group = self.form.latent_group if self.latent else self.form.group
        rows = _Rows(self.form, group)
        self.parts: tuple[_Rows | _Groups, _Rows] = (rows if self.is_croppable else _Groups(self.form), _Rows(self.form, group))
        self.is_initialized = False

    def stored_bytes(self, full: int) -> int:
        """Bytes that it holds, if a value that is not encoded yet takes `full` of them."""
        return sum(part.stored_bytes(full) for part in self.parts)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache the new tokens of `[B, heads, T, n]` each; return all that is cached, as queries read it.

        Raises:
            Refusal: They are of several groups of keys.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, second = self.parts
        return first.append(key_states, self.seen), second.append(value_states, self.seen)

    def get_seq_length(self) -> int:
        return self.parts[0].length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens, as many as -`tokens_to_remove`; above 0, as older transformers has it, all but so many.

        Raises:
            Refusal: Keys of several tokens are encoded together.
        """
        if not self.is_croppable:
            raise Refusal(
                f"a cache in {self.form.name} cannot forget single tokens: the keys of {self.form.tokens} are encoded together",
                hint="use int8, fp8 or a floating dtype where tokens are taken back",
            )
        length = self.get_seq_length()
        kept = max(0, length + tokens_to_remove) if tokens_to_remove <= 0 else min(length, tokens_to_remove)
        self._change(lambda part: part[:, :, :kept])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._change(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda part: part.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change(lambda part: part[indices])

    def offload(self) -> None:
        self._change(lambda part: part.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change(lambda part: part.to(self.device, non_blocking=True))

    def _change(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for part in self.parts:
            part.change(how)


class EncodedForward:
    """The forward of a model whose cache is encoded: every call reads what decoding token by token would read.

    It takes and returns what the model's own forward does. A call without a cache, or with an empty one that grows, gets an
    encoded one, also where `use_cache` is false. Where keys are grouped along time, input is cut at the bounds of groups.

    Attributes:
        stock: The model's own forward.
    """

    def __init__(self, model: Any, form: Format) -> None:
        self.model, self.form, self.stock = model, form, model.forward
        _require_cache(model, form)
        spec = AttentionSpec.from_config(model.config)
        spec.cache_bytes(form.name, 1, 0)  # refuses sizes that the format does not take
        self._layers, self._latent = spec.num_layers, spec.kv_lora_rank is not None
        self._signature = inspect.signature(self.stock)
        functools.update_wrapper(self, self.stock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same as the model's own forward over an encoded cache.

        Raises:
            Refusal: The model is in training mode, the cache is neither encoded nor empty, or, where keys are grouped along
                time, masks are not `[B, S]`, or outputs are asked for that pieces of the input do not add up to.
        """
        if self.model.training:
            raise Refusal("an encoded cache is for inference, and the model is in training mode", hint="call model.eval()")
        given = self._named(args, kwargs)
        if "cache" in given:
            raise Refusal(
                f"the cache of this model is stored in {self.form.name}, and continuous batching has a cache of its own",
                hint="use generate, or attention.restore(model)",
            )
        total = next((given[name].shape[1] for name in _INPUTS if given.get(name) is not None), None)
        if total is None:
            return self.stock(**given)  # which says what is missing
        wanted, given["use_cache"] = given.get("use_cache"), True
        given["past_key_values"] = cache = self._encoded(given.get("past_key_values"))
        as_dict = given.pop("return_dict", None)
        length = cache.get_seq_length() + total
        output = self._in_pieces(given, cache, total) if self.form.tokens and not self._latent else self.stock(**given)
        if cache.get_seq_length() != length:
            raise Refusal(
                f"{type(self.model).__name__} does not keep its keys and values in the cache that it is given",
                hint="load it without cache_dtype",
            )
        if wanted is False:
            output["past_key_values"] = None
        return output if (self.model.config.return_dict if as_dict is None else as_dict) else output.to_tuple()

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind_partial(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            several = self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            named |= value if several else {name: value}
        return named

    def _encoded(self, cache: Cache | None) -> Cache:
        cache = DynamicCache() if cache is None else cache
        if cache.layers and all(isinstance(layer, EncodedLayer) and layer.form == self.form for layer in cache.layers):
            return cache
        if type(cache) is not DynamicCache or cache.get_seq_length():
            filled = f"a filled {type(cache).__name__}" if cache.get_seq_length() else f"a {type(cache).__name__}"
            raise Refusal(
                f"the cache of this model is stored in {self.form.name}, and cannot be {filled}",
                hint="give none, or an empty DynamicCache",
            )
        cache.layers = [EncodedLayer(self.form, self._latent) for _ in range(self._layers)]
        cache.layer_class_to_replicate = None
        return cache

    def _in_pieces(self, given: dict[str, Any], cache: Cache, total: int) -> Any:
        """Run the input in pieces, each of tokens of one group."""
        past, size = cache.get_seq_length(), self.form.tokens
        mask = given.get("attention_mask")
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape[1:] != (past + total,)):
            raise Refusal(
                f"a cache in {self.form.name} needs an attention mask [B, {past + total}], which keeps padding out of scales",
                hint="give such a mask, or none",
            )
        bounds = [*range(size - past % size, total, size), total]
        if len(bounds) > 1:
            self._require_pieces(given, total)
        kept, outputs, start = given.pop("logits_to_keep", 0), [], 0
        kept = kept % total if isinstance(kept, torch.Tensor) else kept
        for end in bounds:
            for layer in cache.layers:
                layer.seen = None if mask is None else mask.bool()
            outputs.append(self.stock(**_piece(given, start, end, past), **self._wanted_logits(kept, start, end, total)))
            start = end
        for layer in cache.layers:
            layer.seen = None  # the next call has a longer one
        last = outputs[-1]
        last["logits"] = torch.cat([output["logits"] for output in outputs], 1)
        if isinstance(kept, torch.Tensor):  # they come in the order of pieces
            pieces = torch.bucketize(kept, torch.tensor(bounds, device=kept.device), right=True)
            last["logits"] = last["logits"][:, pieces.argsort(stable=True).argsort()]
        return last

    def _require_pieces(self, given: dict[str, Any], total: int) -> None:
        """Refuse what cannot be had, or cannot be given, in pieces."""
        config = self.model.config
        asks = {name: getattr(config, name, None) if given.get(name) is None else given[name] for name in _UNCUT}
        asked = [name for name, value in asks.items() if value is not None and value is not False]
        others = {name for name, value in given.items() if isinstance(value, torch.Tensor)} - {
            *_CUT,
            "attention_mask",
            "inputs_embeds",
        }
        if wrong := asked or sorted(others - {"logits_to_keep"}):
            raise Refusal(
                f"a cache in {self.form.name} takes {total} tokens in pieces of {self.form.tokens}, "
                f"and {wrong[0]} cannot be cut",
                hint=f"leave it out, or give at most {self.form.tokens} tokens at once",
            )

    def _wanted_logits(self, kept: int | torch.Tensor, start: int, end: int, total: int) -> dict[str, Any]:
        """The argument of a piece that asks for its part of the logits at the last `kept`, or at these positions."""
        if "logits_to_keep" not in self._signature.parameters:
            return {}
        if isinstance(kept, torch.Tensor):
            return {"logits_to_keep": kept[(kept >= start) & (kept < end)] - start}
        first = max(start, total - kept) if kept else start
        return {"logits_to_keep": torch.arange(first - start, max(first, end) - start)}


def _require_cache(model: Any, form: Format) -> None:
    """Refuse a model that does not cache keys and values of all its layers, or whose tokens see later ones."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds or "past_key_values" not in inspect.signature(model.forward).parameters:
        what = f"a {sorted(kind.__name__ for kind in kinds)[0]}" if kinds else "no cache of keys and values"
        raise Refusal(
            f"a cache in {form.name} needs layers that all cache keys and values, and {type(model).__name__} has {what}",
            hint="load it without cache_dtype",
        )
    if form.tokens and getattr(model.config.get_text_config(decoder=True), "use_bidirectional_attention", None):
        raise Refusal(
            f"a cache in {form.name} takes tokens in groups, and tokens of {type(model).__name__} see later ones",
            hint="use int8 or fp8",
        )


def _piece(given: dict[str, Any], start: int, end: int, past: int) -> dict[str, Any]:
    """The arguments for some of the tokens, behind `past` tokens that were cached before the first of them."""
    piece = given | {name: given[name][..., start:end] for name in _CUT if given.get(name) is not None}
    if given.get("inputs_embeds") is not None:
        piece["inputs_embeds"] = given["inputs_embeds"][:, start:end]
    if given.get("attention_mask") is not None:
        piece["attention_mask"] = given["attention_mask"][:, : past + end]
    return piece


def _joined(one: Encoded, other: Encoded) -> Encoded:
    """The tokens of both, or their groups."""
    return Encoded(
        *(torch.cat([old, new], 2) for old, new in zip(one, other, strict=True) if old is not None and new is not None)
    )


def _changed(stored: Encoded, how: Callable[[torch.Tensor], torch.Tensor]) -> Encoded:
    return Encoded(*(how(part) for part in stored if part is not None))


def store_encoded(model: Any, form: str) -> Any:
    """Make `model` store its KV cache in a format; `attention.restore` undoes it.

    Args:
        model: A transformers model that decodes from a cache.
        form: The name of a format, see `attention.formats`.

    Returns:
        `model` itself.

    Raises:
        Refusal: There is no such format, or it does not take the sizes of the model's heads.
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
