"""Rules for the values of a config.json, checked before anything is computed from them: sizes, and what classes would misread.

`check_raw` checks the JSON before transformers builds a config from it, so that building cannot hang. `check_config` checks the
built config, with the defaults of its class. All else is for the class to judge, whose error becomes one line.
"""

import dataclasses
import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from attention import calibrated, models
from attention.errors import Refusal, one_line

_MAX_DEPTH = 32  # nested objects and lists; real configs have about six levels
MAX_LAYERS = 2048

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxlist, _REPR.maxdict, _REPR.maxlevel = 4, 3, 2

# Sizes, by which kvfold computes; also one for each layer. Configs that switch latent attention off have dims of 0.
_SIZES: dict[str, range] = {
    "num_hidden_layers": range(1, MAX_LAYERS + 1),  # but not for each layer
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_kv_heads", "head_dim"), range(1, 2**16 + 1)),
    **dict.fromkeys(("hidden_size", "intermediate_size", "kv_lora_rank", "q_lora_rank"), range(1, 2**20 + 1)),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), range(2**16 + 1)),
    "vocab_size": range(1, 2**28 + 1),
    **dict.fromkeys(("max_position_embeddings", calibrated.POSITIONS, calibrated.OF_SOURCE), range(1, 2**40 + 1)),
    "sliding_window": range(2**40 + 1),  # see `check_config` for 0
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), range(2**16 + 1)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), range(2**20 + 1)),
}
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FLOAT = (
    lambda v: isinstance(v, str) and (v.removeprefix("torch.") in _FLOATS or v.startswith("float8_")),
    f"the name of a float dtype ({', '.join(_FLOATS)})",
)
_OBJECT = (lambda v: isinstance(v, dict), "an object")
# What other values of the JSON have to be, and that in words. (In a built config, some of these are objects.)
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tie_word_embeddings": (lambda v: isinstance(v, bool), "true or false"),
    **dict.fromkeys(("dtype", "torch_dtype"), _FLOAT),
    **dict.fromkeys(("auto_map", "text_config", "vision_config", "audio_config", "rope_parameters", "rope_scaling"), _OBJECT),
    "layer_types": (lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v), "a list of strings"),
    "return_dict": (lambda v: v is True, "true, since classes of transformers read their own output by name"),
    # Not all that reads a checkpoint follows it: others would read the weights of another run.
    "transformers_weights": (lambda v: False, "left out, and the file be named model.safetensors"),
}
# Classes make lists of so many entries, in whatever part of the config these keys are.
_MOST: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks"), MAX_LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), MAX_LAYERS),
    "num_labels": 10**6,
}
# Keys of code from before transformers had a class, and what the class calls them: it would take its default for these.
_OLD_NAMES = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads"}


def check_raw(raw: Mapping[str, Any], where: str) -> None:
    """Check the values of a config.json as it was read.

    Args:
        raw: Its values.
        where: The file's name in messages: "config.json of MODEL".

    Raises:
        Refusal: A value breaks a rule (the message has key, value and rule), or values are nested too deeply.
    """
    waiting: list[tuple[int, str, Any]] = [(1, "", raw)]
    for depth, path, values in waiting:  # not recursive, since JSON may nest deeper than Python's stack
        if depth > _MAX_DEPTH:
            raise Refusal(f"{where} nests values more than {_MAX_DEPTH} deep", hint="is it the config of a model?")
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            if key in _MOST and isinstance(value, int | float) and not value <= _MOST[key]:
                _refuse(where, path + key, value, f"at most {_MOST[key]:,}")
            if isinstance(value, dict | list):
                waiting.append((depth + 1, f"{path}{key}.", value))
    for path, values in (("", raw), ("text_config.", raw.get("text_config"))):
        if isinstance(values, dict):
            _check_sizes(values, where, path)
            for key, (holds, says) in _KINDS.items():
                if (value := values.get(key)) is not None and not holds(value):
                    _refuse(where, path + key, value, says)


def check_keys(raw: Mapping[str, Any], config_class: type, where: str) -> None:
    """Refuse keys that would replace a method of the config's class: every key becomes an attribute of the config.

    Raises:
        Refusal: There is such a key.
    """
    for key in raw:
        found = getattr(config_class, key, None)
        read_only = isinstance(found, property) and found.fset is None
        if key.startswith("__") or key == "attribute_map" or callable(found) or read_only:
            raise Refusal(
                f"{where} has a key {key!r}, which is not a setting: {config_class.__name__} of transformers uses it itself",
                hint="take it out",
            )
    fields = {field.name for field in dataclasses.fields(config_class)} if dataclasses.is_dataclass(config_class) else set()
    for old, new in _OLD_NAMES.items():
        if old in raw and raw.get(new) is None and new in fields and old not in fields:
            raise Refusal(
                f"{where} says {old}, which {config_class.__name__} of transformers calls {new} and would not read",
                hint=f"rename it to {new} in config.json",
            )


def check_config(config: Any, where: str) -> None:
    """Check a built config; if the model has several parts, its text part.

    Args:
        config: The config from transformers.
        where: The file's name in messages.

    Raises:
        Refusal: A value breaks a rule, or does not fit another value.
    """
    try:
        text = config.get_text_config(decoder=True)
    except (AttributeError, TypeError, ValueError) as error:
        raise Refusal(f"{where} has no single text config: {one_line(error)}") from None
    if not hasattr(text, "get_text_config"):
        raise Refusal(f"{where} has a text config that model type {config.model_type!r} does not read", hint="take it out")
    varying = getattr(text, "per_layer_attributes", None) or ()  # reading these raises
    declared = {field.name for field in dataclasses.fields(text)} if dataclasses.is_dataclass(text) else set()
    declared |= getattr(text, "attribute_map", {}).keys()  # older names under the common ones, too
    values = {name: getattr(text, name, None) for name in declared if name not in varying}
    _check_sizes(values, where)
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int) and heads > width and not values.get("head_dim"):
        _refuse(where, "num_attention_heads", heads, f"at most hidden_size, which is {width}, unless there is a head_dim")
    stock = type(text).__module__.startswith("transformers.")
    strays = {name: value for name, value in vars(text).items() if stock and name not in declared and name not in varying}
    if not models.provides(config.model_type):  # a class inside it need not know of a latent
        if rank := strays.get("kv_lora_rank"):
            _refuse(where, "kv_lora_rank", rank, f"left out: model type {text.model_type!r} has no latent attention")
        for key in ("qk_rope_head_dim", "v_head_dim") if (rank := values.get("kv_lora_rank")) else ():
            if key in values and not values[key]:
                _refuse(where, key, values[key], f"above 0 where kv_lora_rank is {rank}")
    if values.get("sliding_window") == 0 and values.get("use_sliding_window") is not False:
        _refuse(where, "sliding_window", 0, "an integer above 0, or null")
    # What caches of transformers read from any config, where the class computes its attention without it.
    for key in ("layer_types", "sliding_window", "attention_chunk_size"):
        stated = strays.get(key)
        whole = isinstance(stated, list) and set(stated) == {"full_attention"}
        if stated and not whole and not hasattr(type(text)(), key):  # some classes set it when they are made
            kind = type(text).__name__
            _refuse(where, key, stated, f"left out: {kind} of transformers does not know it, and the cache would follow it")


def _check_sizes(values: Mapping[str, Any], where: str, path: str = "") -> None:
    """Refuse a size out of range. Null always passes: the class knows what may be null."""
    for key, sizes in _SIZES.items():
        value = values.get(key)
        each = value if isinstance(value, list) and key != "num_hidden_layers" else [value]
        if not all(size is None or (type(size) is int and size in sizes) for size in each):
            _refuse(where, path + key, value, f"an integer from {sizes[0]:,} to {sizes[-1]:,}")


def _refuse(where: str, key: str, value: Any, rule: str) -> None:
    shown = json.dumps(value) if value is None or isinstance(value, bool) else _REPR.repr(value)
    raise Refusal(f"{where}: {key} is {shown}; it must be {rule}", hint="correct it in config.json")
