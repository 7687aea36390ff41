"""Rules for the values of a config.json, checked before anything is computed from them.

`check_raw` checks the JSON before transformers builds a config from it, so that building cannot hang.
`check_config` checks the built config, with the defaults of its class, and values that have to fit each other.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from attention import calibrated, models
from attention.errors import Refusal, one_line

_MAX_DEPTH = 32  # nested objects and lists; real configs have about six levels
_MAX_LAYERS = 2048

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxlist, _REPR.maxdict, _REPR.maxlevel = 4, 3, 2


class Rule(NamedTuple):
    """A rule that a value must satisfy.

    Attributes:
        holds: Whether a value satisfies it.
        says: The rule in words, after "it must be".
        per_layer: Whether the value may also be a list of such values, one for each layer.
    """

    holds: Callable[[Any], bool]
    says: str
    per_layer: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether the rule holds. Null always passes: the class knows what may be null."""
        if self.per_layer and isinstance(value, list):
            return all(map(self.accepts, value))
        return value is None or self.holds(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(low: int, high: int, per_layer: bool = False) -> Rule:
    says = f"an integer from {low:,} to {high:,}"
    return Rule(lambda v: _is_number(v) and isinstance(v, int) and low <= v <= high, says, per_layer)


def _number(low: float, high: float) -> Rule:
    """A number from `low` to `high`, both included; NaN is in no range."""
    return Rule(lambda v: _is_number(v) and low <= v <= high, f"a number from {low:g} to {high:g}")


def _above_zero(high: float) -> Rule:
    return Rule(lambda v: _is_number(v) and 0 < v <= high, f"a number above 0 and up to {high:g}")


def _list_of(holds: Callable[[Any], bool], what: str) -> Rule:
    return Rule(lambda v: isinstance(v, list) and all(map(holds, v)), f"a list of {what}")


def _all(rule: Rule, *keys: str) -> dict[str, Rule]:
    return dict.fromkeys(keys, rule)


_FLOATS = ("float64", "float32", "float16", "bfloat16")
_POSITIVE = _above_zero(1e30)
_ANY_NUMBER = _number(-1e30, 1e30)
_ORIGINAL_POSITIONS = _number(2, 2.0**40)
_PARTIAL_ROTARY = _above_zero(1)

# Only for the JSON: in a built config these values are objects.
RAW_RULES: dict[str, Rule] = {
    **_all(
        Rule(
            lambda v: isinstance(v, str) and (v.removeprefix("torch.") in _FLOATS or v.startswith("float8_")),
            f"the name of a float dtype ({', '.join(_FLOATS)})",
        ),
        "dtype",
        "torch_dtype",
    ),
    **_all(Rule(lambda v: isinstance(v, dict), "an object"), "auto_map", "text_config", "vision_config", "audio_config"),
    "return_dict": Rule(lambda v: v is True, "true, since classes of transformers read their own output by name"),
    # Not all that reads a checkpoint follows it: others would read the weights of another run.
    "transformers_weights": Rule(lambda v: False, "left out, and the file be named model.safetensors"),
}

RULES: dict[str, Rule] = {
    "num_hidden_layers": _integer(1, _MAX_LAYERS),
    **_all(_integer(1, 2**16, per_layer=True), "num_attention_heads", "num_key_value_heads", "num_kv_heads"),
    **_all(_integer(1, 2**20, per_layer=True), "hidden_size", "intermediate_size"),
    "head_dim": _integer(1, 2**16, per_layer=True),
    "rotary_dim": _integer(0, 2**16),
    "vocab_size": _integer(1, 2**28),
    **_all(_integer(1, 2**40), "max_position_embeddings", calibrated.POSITIONS, calibrated.OF_SOURCE),
    "original_max_position_embeddings": _ORIGINAL_POSITIONS,
    "sliding_window": _integer(0, 2**40, per_layer=True),  # see `_check_window` for 0
    "pad_token_id": _integer(-(2**28), 2**28),  # a negative one counts from the end of the vocabulary
    "tie_word_embeddings": Rule(lambda v: isinstance(v, bool), "true or false"),
    "layer_types": _list_of(lambda entry: isinstance(entry, str), "strings, one for each layer"),
    **_all(Rule(lambda v: isinstance(v, dict), "an object"), "rope_parameters", "rope_scaling"),
    "partial_rotary_factor": _PARTIAL_ROTARY,
    # Latent attention. Configs that switch it off (DeepSeek-VL2) have a rank of null and dims of 0.
    **_all(_integer(1, 2**20), "kv_lora_rank", "q_lora_rank"),
    **_all(_integer(0, 2**16), "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    # Experts.
    **_all(_integer(0, 2**20, per_layer=True), "moe_intermediate_size", "shared_expert_intermediate_size"),
    **_all(_integer(0, 2**16, per_layer=True), "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    **_all(_integer(0, 2**16), "n_shared_experts", "first_k_dense_replace", "max_window_layers"),
    **_all(_integer(1, 2**16), "decoder_sparse_step", "no_rope_layer_interval"),
    # Norms, scales and dropout.
    **_all(_number(0, 1), "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    **_all(_number(0, 1), "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"),
    "initializer_range": _number(0, 1e6),
    **_all(_POSITIVE, "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"),
    **_all(_ANY_NUMBER, "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
}

ROPE_RULES: dict[str, Rule] = {
    **_all(Rule(lambda v: isinstance(v, str), "a string"), "rope_type", "type"),
    "rope_theta": _number(1, 1e30),
    "partial_rotary_factor": _PARTIAL_ROTARY,
    **_all(_POSITIVE, "factor", "attention_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    **_all(_number(0, 1e30), "mscale", "mscale_all_dim"),
    "original_max_position_embeddings": _ORIGINAL_POSITIONS,
    **_all(_list_of(_POSITIVE.holds, "numbers above 0"), "short_factor", "long_factor"),
}

# The keys that each type of scaling needs. The class fills in `original_max_position_embeddings`.
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}

# Keys of code from before transformers had a class, and what the class calls them: it would take its default for these.
_OLD_NAMES = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads"}

# Types of scaling that other code knows, and what transformers has for them.
_FOREIGN_ROPE = {
    "mrope": "on text alone, it is default: set it to that if the weights are of a model for text",
    "ntk": "a fixed factor is a larger rope_theta without scaling: rope_theta · factor^(d / (d − 2)) for d rotary dims",
}

# Classes make lists of so many entries, in whatever part of the config these keys are.
_MOST: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks"), _MAX_LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), _MAX_LAYERS),
    "num_labels": 10**6,
}


def check_raw(raw: Mapping[str, Any], where: str) -> None:
    """Check the values of a config.json as it was read.

    Args:
        raw: Its values.
        where: The file's name in messages: "config.json of MODEL".

    Raises:
        Refusal: A value breaks a rule (the message has key, value and rule), or values are nested too deeply.
    """
    for path, values in _objects(raw, where):
        for key, most in _MOST.items():
            if _is_number(values.get(key)) and not values[key] <= most:
                _refuse(where, path + key, values[key], f"at most {most:,}")
    text = raw.get("text_config")
    for path, values in [("", raw), ("text_config.", text)] if isinstance(text, dict) else [("", raw)]:
        _check(values, RAW_RULES | RULES, where, path)
        if _is_number(theta := values.get("rope_theta")) or isinstance(theta, bool | str):
            _check(values, {"rope_theta": ROPE_RULES["rope_theta"]}, where, path)
        for name in ("rope_parameters", "rope_scaling"):
            for inner, parameters in _rope_sets(values.get(name), path + name):
                _check(parameters, ROPE_RULES, where, f"{inner}.")
                # Its class renames it, but not before it looks for what longrope needs.
                if parameters.get("type") == "su" and "original_max_position_embeddings" not in parameters:
                    _refuse(where, f"{inner}.type", "su", "longrope, as it is called now")


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
    text = _text_config(config, where)
    values = _settings(text)
    _check(values, RULES, where, "")
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        if key in values and values[key] is None:
            _refuse(where, key, None, RULES[key].says)
    _check_heads(values, where)
    if not models.provides(config.model_type):  # a class inside it need not know of a latent
        _check_latent(values, text, where)
    _check_window(values, where)
    _check_of_caches(text, values, where)
    _check_padding(values, where)
    _check_lengths(values, where)
    _check_activation(text, where)
    for path, parameters in _rope_sets(values.get("rope_parameters"), "rope_parameters"):
        _check_rope(parameters, where, path)
        if parameters.get("rope_type") == "longrope":
            _check_factor_lists(parameters, text, where, path)


def _text_config(config: Any, where: str) -> Any:
    try:
        text = config.get_text_config(decoder=True)
    except (AttributeError, TypeError, ValueError) as error:
        raise Refusal(f"{where} has no single text config: {one_line(error)}") from None
    if not hasattr(text, "get_text_config"):
        raise Refusal(f"{where} has a text config that model type {config.model_type!r} does not read", hint="take it out")
    return text


def _read(text: Any, name: str) -> Any:
    """A setting; None where there is none, and where layers differ in it, since reading that raises."""
    return None if name in (getattr(text, "per_layer_attributes", None) or ()) else getattr(text, name, None)


def _settings(text: Any) -> dict[str, Any]:
    """The declared settings that all layers share, older names under the common ones too."""
    names = [field.name for field in dataclasses.fields(text)] if dataclasses.is_dataclass(text) else []
    varying = getattr(text, "per_layer_attributes", None) or ()
    return {name: getattr(text, name, None) for name in (*names, *getattr(text, "attribute_map", {})) if name not in varying}


def _check(values: Mapping[str, Any], rules: Mapping[str, Rule], where: str, path: str) -> None:
    for key, rule in rules.items():
        if not rule.accepts(values.get(key)):
            _refuse(where, path + key, values[key], rule.says)


def _rope_sets(parameters: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sets of RoPE parameters with the path to each: one set, or one per layer type."""
    if isinstance(parameters, dict):
        yield path, parameters
        yield from ((f"{path}.{key}", inner) for key, inner in parameters.items() if isinstance(inner, dict))


def _check_heads(values: Mapping[str, Any], where: str) -> None:
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int) and heads > width and not values.get("head_dim"):
        _refuse(where, "num_attention_heads", heads, f"at most hidden_size, which is {width}, unless there is a head_dim")


def _check_latent(values: Mapping[str, Any], text: Any, where: str) -> None:
    rank = _read(text, "kv_lora_rank")
    if rank and "kv_lora_rank" not in values and type(text).__module__.startswith("transformers."):
        _refuse(where, "kv_lora_rank", rank, f"left out: model type {text.model_type!r} has no latent attention")
    for key in ("qk_rope_head_dim", "v_head_dim") if rank else ():
        if key in values and not values[key]:
            _refuse(where, key, values[key], f"above 0 where kv_lora_rank is {rank}")


def _check_window(values: Mapping[str, Any], where: str) -> None:
    if values.get("sliding_window") == 0 and values.get("use_sliding_window") is not False:
        _refuse(where, "sliding_window", 0, "an integer above 0, or null")


def _check_of_caches(text: Any, values: Mapping[str, Any], where: str) -> None:
    """Refuse what caches of transformers read from any config, where the class computes its attention without it."""
    if not type(text).__module__.startswith("transformers."):
        return
    for key in ("layer_types", "sliding_window", "attention_chunk_size"):
        stated = _read(text, key)
        whole = not stated or (isinstance(stated, list) and set(stated) == {"full_attention"})
        if not whole and key not in values and not hasattr(type(text)(), key):  # some classes set it when they are made
            kind = type(text).__name__
            _refuse(where, key, stated, f"left out: {kind} of transformers does not know it, and the cache would follow it")


def _check_padding(values: Mapping[str, Any], where: str) -> None:
    pad, vocabulary = values.get("pad_token_id"), values.get("vocab_size")
    # Classes since Llama pass the id to their embedding, which refuses it; older ones ignore it.
    if "num_key_value_heads" in values and isinstance(pad, int) and vocabulary and not -vocabulary <= pad < vocabulary:
        _refuse(where, "pad_token_id", pad, f"below vocab_size, which is {vocabulary:,}")


def _check_lengths(values: Mapping[str, Any], where: str) -> None:
    layers = values.get("num_hidden_layers")
    for key in ("layer_types", "no_rope_layers"):
        entries = values.get(key)
        if isinstance(entries, list) and isinstance(layers, int) and len(entries) != layers:
            rule = f"a list of num_hidden_layers = {layers} entries, and has {len(entries)}"
            _refuse(where, key, entries, rule)


_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")


def _check_activation(text: Any, where: str) -> None:
    for field in dataclasses.fields(text) if dataclasses.is_dataclass(text) else ():
        name = _read(text, field.name) if field.name in _ACTIVATIONS else None
        if isinstance(name, str) and name != field.default:
            from transformers.activations import ACT2FN

            if name not in ACT2FN:
                _refuse(where, field.name, name, f"one of transformers' activations ({', '.join(sorted(ACT2FN))})")


def _check_rope(parameters: Mapping[str, Any], where: str, path: str) -> None:
    """Check the parameters that a type of scaling needs, and those that have to fit each other."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = str(parameters.get("rope_type"))
    known = ("default", *ROPE_INIT_FUNCTIONS)
    if "rope_type" in parameters and kind not in known:
        raise Refusal(
            f"{where}: {path}.rope_type is {_REPR.repr(kind)}; it must be one of transformers' ({', '.join(known)})",
            hint=_FOREIGN_ROPE.get(kind, "correct it in config.json"),
        )
    if "rope_type" in parameters and parameters.get("rope_theta", 1) is None:
        _refuse(where, f"{path}.rope_theta", None, ROPE_RULES["rope_theta"].says)
    for key in _REQUIRED.get(kind, ()):
        if parameters.get(key) is None:
            _refuse(where, f"{path}.{key}", None, f"{ROPE_RULES[key].says} where rope_type is {kind}")
    if kind == "yarn" and parameters.get("rope_theta") == 1:
        _refuse(where, f"{path}.rope_theta", 1, "above 1 where rope_type is yarn")
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        rule = f"above low_freq_factor, which is {parameters['low_freq_factor']:g}"
        _refuse(where, f"{path}.high_freq_factor", parameters["high_freq_factor"], rule)


def _check_factor_lists(parameters: Mapping[str, Any], text: Any, where: str, path: str) -> None:
    """LongRoPE has one factor for each pair of rotary dims."""
    heads, width = _read(text, "num_attention_heads"), _read(text, "hidden_size")
    if not isinstance(heads, int) or not isinstance(width, int):
        return
    dims = int((_read(text, "head_dim") or width // heads) * (parameters.get("partial_rotary_factor") or 1.0))
    for key in ("short_factor", "long_factor"):
        if len(parameters[key]) != (dims + 1) // 2:
            rule = f"a list of {(dims + 1) // 2} factors for {dims} rotary dims, and has {len(parameters[key])}"
            _refuse(where, f"{path}.{key}", parameters[key], rule)


def _objects(raw: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every object of a config with the path to its keys. Not recursive, since JSON may nest deeper than Python's stack."""
    waiting: list[tuple[int, str, Any]] = [(1, "", raw)]
    for depth, path, value in waiting:
        if depth > _MAX_DEPTH:
            raise Refusal(f"{where} nests values more than {_MAX_DEPTH} deep", hint="is it the config of a model?")
        if isinstance(value, dict):
            yield path, value
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        waiting += [(depth + 1, f"{path}{key}.", v) for key, v in inner if isinstance(v, dict | list)]


def _refuse(where: str, key: str, value: Any, rule: str) -> None:
    shown = json.dumps(value) if value is None or isinstance(value, bool) else _REPR.repr(value)
    raise Refusal(f"{where}: {key} is {shown}; it must be {rule}", hint="correct it in config.json")
