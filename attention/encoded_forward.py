"""A model's forward over an encoded cache (`attention.cache`), which reads the same however a text is cut into calls."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from attention.cache import EncodedLayer
from attention.errors import Refusal
from attention.formats import Format, format_named
from attention.models.modeling_kvfold import is_paged
from attention.spec import AttentionSpec
from attention.versions import CACHE

_PIECE = 1024  # tokens at once where a mask says which keys a query reads: the keys of these tokens are there twice
_NOISE = 4  # times what cutting a text changes in the logits: what a mask may change
_BY_LENGTH = ("dynamic", "longrope")  # kinds of RoPE that depend on the length of what a call has read
_CUT = ("input_ids", "position_ids", "cache_position", "token_type_ids")  # [..., T]
_INPUTS = ("input_ids", "inputs_embeds")
# Outputs that those of pieces do not make up.
_UNCUT = ("labels", "output_attentions", "output_hidden_states", "output_router_logits")


class EncodedForward:
    """The forward of a model whose cache is encoded: every call reads what decoding token by token would read.

    It takes and returns what the model's own forward does. A call without a cache, or with an empty one that grows, gets an
    encoded one, also where `use_cache` is false. Where keys are grouped along time, a mask says which of them a query reads; a
    class that does not follow such a mask gets its input cut at the bounds of groups.

    Attributes:
        stock: The model's own forward.
    """

    def __init__(self, model: Any, form: Format) -> None:
        self.model, self.form, self.stock = model, form, model.forward
        self._signature = inspect.signature(self.stock)
        require_cache(model, form)
        spec = AttentionSpec.from_config(model.config)
        spec.cache_bytes(form.name, 1, 0)  # refuses sizes that the format does not take
        self._windows, self._latent = spec.windows or (None,) * spec.num_layers, spec.kv_lora_rank is not None
        self._tried: dict[str, bool] = {}  # by attention implementation
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
        output = self._in_pieces(given, cache, total) if self.form.tokens and not self._latent else self.stock(**given)
        if cache.get_seq_length() != length:
            raise Refusal(
                f"{type(self.model).__name__} does not keep its keys and values in the cache that it is given",
                hint="load it without cache_dtype",
            )
        if wanted is False:
            output[CACHE] = None
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
        if cache.layers and all(isinstance(layer, EncodedLayer) and layer.form == self.form for layer in cache.layers):
            return cache
        if type(cache) is not DynamicCache or cache.get_seq_length():
            filled = f"a filled {type(cache).__name__}" if cache.get_seq_length() else f"a {type(cache).__name__}"
            raise Refusal(
                f"the cache of this model is stored in {self.form.name}, and cannot be {filled}",
                hint="give none, or an empty DynamicCache",
            )
        return self._emptied(cache, self.form)

    def _emptied(self, cache: DynamicCache, form: Format) -> DynamicCache:
        """The cache, with empty layers of a format; windows forget nothing where assisted generation takes tokens back."""
        recording = any(getattr(layer, "record_past", False) for layer in cache.layers)
        cache.layers = [EncodedLayer(form, self._latent, window) for window in self._windows]
        cache.layer_class_to_replicate = None
        if recording:
            cache.activate_past_recording()
        return cache

    def _in_pieces(self, given: dict[str, Any], cache: Cache, total: int) -> Any:
        """Run the input in pieces, each of tokens of one group, or of many where masks are followed."""
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
        if masked := len(bounds) > 1 and self._follows_masks():
            bounds = [*range(_PIECE - past % size, total, _PIECE), total]
        kept, outputs, start = given.pop("logits_to_keep", 0), [], 0
        kept = kept % total if isinstance(kept, torch.Tensor) else kept
        for layer in cache.layers:
            layer.seen, layer.masked = None if mask is None else mask.bool(), masked
        try:
            for end in bounds:
                wanted, piece = self._wanted_logits(kept, start, end, total), _piece(given, start, end, past)
                if masked:
                    piece["attention_mask"] = self._mask(piece, past + start, past + end)
                outputs.append(self.stock(**piece, **wanted))
                start = end
        finally:
            for layer in cache.layers:
                layer.seen, layer.masked = None, False  # another call has another mask
        last = outputs[-1]
        last["logits"] = torch.cat([output["logits"] for output in outputs], 1)
        if isinstance(kept, torch.Tensor):  # they come in the order of pieces
            pieces = torch.bucketize(kept, torch.tensor(bounds, device=kept.device), right=True)
            last["logits"] = last["logits"][:, pieces.argsort(stable=True).argsort()]
        return last

    def _mask(self, piece: dict[str, Any], start: int, end: int) -> torch.Tensor:
        """`[B, 1, T, columns]`, added to logits: which keys of `EncodedLayer` tokens `start` … `end` - 1 read."""
        given = next(piece[name] for name in _INPUTS if piece.get(name) is not None)
        size, tokens = self.form.tokens, torch.arange(end, device=given.device)
        queries, closed = tokens[start:, None], self.form.tokens_encoded(end)
        first = start - start % size
        groups = queries // size * size
        opened = (groups <= tokens[first:]) & (tokens[first:] <= queries)
        read = torch.cat((tokens[:closed] < groups, opened), 1).expand(len(given), -1, -1)
        if (mask := piece.get("attention_mask")) is not None:
            seen = mask.bool().to(read.device)
            read = read & torch.cat((seen[:, :closed], seen[:, first:]), 1)[:, None]
        dtype = self.model.dtype
        return torch.zeros(read.shape, dtype=dtype, device=read.device).masked_fill(~read, torch.finfo(dtype).min)[:, None]

    def _follows_masks(self) -> bool:
        """Whether the class reads what such a mask says: tried once, if its positions come from RoPE alone.

        Others may count columns, or read positions off a mask. Windows may be longer than what is tried.
        """
        config = self.model.config
        kind, windows = config._attn_implementation, ("window", "window_size")
        if (
            kind not in ("sdpa", "eager")
            or config.get_text_config(decoder=True) is not config
            or (getattr(config, "rope_parameters", None) or {}).get("rope_type") is None
            or {type(layer) for layer in DynamicCache(config=config).layers} != {DynamicLayer}
            or any(value for name, value in config.to_dict().items() if name.endswith(windows))
        ):
            return False
        if kind not in self._tried:
            try:
                self._tried[kind] = self._reads_alike(config.vocab_size)
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):  # of a class that takes no such mask
                self._tried[kind] = False
        return self._tried[kind]

    @torch.no_grad()
    def _reads_alike(self, vocabulary: int) -> bool:
        """Whether random tokens, and padding, have the same logits at once as group by group, where nothing is rounded."""
        size, device = self.form.tokens, self.model.get_input_embeddings().weight.device
        ids = torch.randint(vocabulary, (2, 3 * size), generator=torch.Generator().manual_seed(0)).to(device)
        seen = torch.ones_like(ids)
        seen[1, size // 2 : size] = 0  # every token sees another one: eager attention may give NaN where there is none
        expected = self.stock(input_ids=ids, attention_mask=seen, use_cache=False)["logits"]
        # A plain dtype, whose keys come in groups all the same.
        lossless = replace(format_named(str(self.model.dtype).removeprefix("torch.")), tokens=size)

        def error(length: int) -> float:
            cache, found = self._emptied(DynamicCache(), lossless), []
            for layer in cache.layers:
                layer.seen, layer.masked = seen.bool(), length > size
            for start in range(0, 3 * size, length):
                piece = {"input_ids": ids[:, start : start + length], "attention_mask": seen[:, : start + length]}
                if length > size:
                    piece["attention_mask"] = self._mask(piece, 0, length)
                found.append(self.stock(**piece, use_cache=True, **{CACHE: cache})["logits"])
            return float((torch.cat(found, 1) - expected)[seen.bool()].double().square().mean().sqrt())

        tiny = 2**10 * torch.finfo(torch.float64).eps * float(expected.double().square().mean().sqrt())
        return error(3 * size) <= _NOISE * error(size) + tiny

    def _require_pieces(self, given: dict[str, Any], total: int) -> None:
        """Refuse what cannot be had, or cannot be given, in pieces."""
        config = self.model.config
        asks = {name: getattr(config, name, None) if given.get(name) is None else given[name] for name in _UNCUT}
        asked = [name for name, value in asks.items() if value is not None and value is not False]
        tensors = {name for name, value in given.items() if isinstance(value, torch.Tensor)}
        others = tensors - {*_CUT, "inputs_embeds", "attention_mask", "logits_to_keep"}
        if wrong := asked or sorted(others):
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


def require_cache(model: Any, form: Format) -> None:
    """Refuse a model that does not cache keys and values of all its layers, or that does not read alike in groups of tokens:
    whose tokens see later ones, or whose RoPE depends on the length of what it reads at once.
    """
    signature = inspect.signature(model.forward)
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds or CACHE not in signature.parameters:
        what = f"a {sorted(kind.__name__ for kind in kinds)[0]}" if kinds else "no cache of keys and values"
        raise Refusal(
            f"a cache in {form.name} needs layers that all cache keys and values, and {type(model).__name__} has {what}",
            hint="load it without cache_dtype",
        )
    decoder = model.config.get_text_config(decoder=True)
    scalings = getattr(decoder, "rope_parameters", None) or {}
    ropes = {str(part.get("rope_type")) for part in (scalings, *scalings.values()) if isinstance(part, dict)}
    latent = getattr(decoder, "kv_lora_rank", None) is not None
    if form.tokens and not latent and (by_length := sorted(ropes.intersection(_BY_LENGTH))):
        raise Refusal(
            f"a cache in {form.name} takes texts in pieces of {form.tokens} tokens, and RoPE of {type(model).__name__} "
            f"({by_length[0]}) depends on the length of a text",
            hint="use int8, fp8 or q4_0",
        )
    if form.tokens and getattr(decoder, "use_bidirectional_attention", None):
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
