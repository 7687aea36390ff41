"""The config.json of a result that is calibrated for fewer positions than its source has: engines stop where it says."""

import copy
from collections.abc import Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attention.auto import config_of
from attention.calibrated import OF_SOURCE, POSITIONS, STATED
from convert.families.base import decoder_of

_ORIGINAL = "original_max_position_embeddings"
_OLD = "rope_scaling"  # what older configs call RoPE's parameters, and what classes read first


def limited(config: Mapping[str, Any], calibrated: int, of: int) -> dict[str, Any]:
    """The config.json of a result, which says for how many positions it is calibrated.

    RoPE stays the same bit for bit at every length. Where it depends on the number of positions, what follows from that is
    written out; where that cannot be, the number stays.

    Args:
        config: The config.json as it would be without.
        calibrated: The positions that the result is calibrated for.
        of: Those of its source.
    """
    decoder = decoder_of(config_of(config))
    key = decoder.attribute_map.get(STATED, STATED)
    said = {POSITIONS: calibrated, OF_SOURCE: of}
    originals = [one[_ORIGINAL] for _, one in _sets(decoder.rope_parameters) if one.get(_ORIGINAL)]
    lengths = sorted({length + more for length in (calibrated, of, *originals) for more in (0, 1)})
    rope = _rope(decoder, lengths)
    for changes in (_for_engines(config, calibrated), {}, _derived(decoder)):
        made = _changed(config, {**changes, key: calibrated, **said})
        found = _rope(decoder_of(config_of(made)), lengths)
        if len(found) == len(rope) and all(a.equal(b) and x == y for (a, x), (b, y) in zip(found, rope, strict=True)):
            return made
    return _changed(config, said)


def _part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the decoder."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with changes of its decoder; RoPE's parameters have one name."""
    before, old = _part(config), {_OLD} if "rope_parameters" in changes else set()
    part = {**{key: value for key, value in before.items() if key not in old}, **changes}
    return part if before is config else {**config, "text_config": part}


def _for_engines(config: Mapping[str, Any], calibrated: int) -> dict[str, Any]:
    """YaRN with that many original positions: engines take these, times its factor, for those of the model."""
    parameters = _part(config).get("rope_parameters")
    if not isinstance(parameters, dict) or parameters.get("rope_type") != "yarn":
        return {}
    return {"rope_parameters": parameters | {_ORIGINAL: calibrated}}


def _derived(decoder: Any) -> dict[str, Any]:
    """RoPE's parameters with all that its class computes from the number of positions where they lack it."""
    parameters = copy.deepcopy(decoder.rope_parameters)
    for kind, one in _sets(parameters):
        if one.get("rope_type") in ("yarn", "longrope"):
            _, factor = ROPE_INIT_FUNCTIONS[one["rope_type"]](decoder, None, layer_type=kind)
            one["attention_factor"] = factor
            one["factor"] = one.get("factor") or decoder.max_position_embeddings / one[_ORIGINAL]
    return {"rope_parameters": parameters}


def _sets(parameters: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """The sets of RoPE's parameters: one, or one for each type of layer."""
    nested = [(key, value) for key, value in (parameters or {}).items() if isinstance(value, dict)]
    return nested or [(None, parameters or {})]


def _rope(decoder: Any, lengths: list[int]) -> list[Any]:
    """All that RoPE computes: frequencies, and the factor of cosines and sines, at each of these lengths."""
    found = []
    for kind, one in _sets(decoder.rope_parameters):
        if scaled := ROPE_INIT_FUNCTIONS.get(one.get("rope_type", "default")):  # the default knows no lengths
            found += [scaled(decoder, None, seq_len=length, layer_type=kind) for length in (None, *lengths)]
    return found
