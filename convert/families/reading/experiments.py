"""Reads a model type that has no row by experiments on small twins of its class (`twin.py`).

A record that the search finds (`search.py`) has to compute what two twins do, and the layers of the class itself must not
differ otherwise. If none does, the type is refused, and the refusal says what is in the way.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attention.auto import classes_of
from attention.errors import Refusal, one_line
from attention.spec import AttentionSpec
from convert.families import FAMILIES
from convert.families.base import Family, decoder_of
from convert.families.heads import Projections
from convert.families.reading.found import Found
from convert.families.reading.search import Search, Unexplained, Unread
from convert.families.reading.twin import OTHER, Twin, disproof, kinds, mixes_otherwise
from eval.machine.capacity import without_weights


def find(config: Any) -> Family:
    """The family of a config whose type has no row.

    Raises:
        Refusal: No record computes what its class does.
    """
    stated = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if stated not in _FOUND:
        try:
            _FOUND[stated] = _found(config)
        except Unread as why:
            runs = "`convert eval` measures it all the same; " if isinstance(why, Unexplained) else ""
            hint = f"{runs}`convert families` lists the types that can be read"
            _FOUND[stated] = Refusal(f"model type {config.model_type!r} cannot be read: {why}", hint=hint)
    if isinstance(found := _FOUND[stated], Refusal):
        raise found
    return replace(found, config=config)


_FOUND: dict[str, Family | Refusal] = {}  # by the config: the experiments take about a second


def _found(config: Any) -> Family:
    if not classes_of(config):
        raise Unread("transformers has no language model of it")
    with _running():
        AttentionSpec.from_config(config)  # whose reason says more than that of a twin without it
        twin = Twin(config)
        spec, calls = AttentionSpec.from_config(twin.config), twin.calls()
    family = _inside(config, twin)
    if family is not None and not family.has_heads:
        return family
    if spec.kv_lora_rank is not None:
        raise Unread(f"it is a published model with latent attention ({spec.kind}), which is not converted again")
    if (family := family or _like_a_row(config, twin)) is None:
        family = Search(twin, spec, calls).family(config)
        if wrong := disproof(family, twin):
            if not (factor := _factor_of_queries(family, twin)):
                raise Unexplained(wrong)
            family = replace(family, far_queries=factor)
    if calls[family.module(0)].times:
        raise Unread("its layers run several times")
    with _running():
        wrong = disproof(family, Twin(config, OTHER), [0])
    if wrong := wrong or _uneven(family, config, twin):
        raise Unexplained(wrong)
    if mixes_otherwise(twin, [family.output(layer) for layer in range(len(twin.layers))]):
        raise Unread("something besides its attention mixes tokens")
    return family


@contextlib.contextmanager
def _running() -> Iterator[None]:
    """Whatever a class that nobody knows may raise, as a reason not to read it."""
    try:
        yield
    except Unread:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(error, 300)}"
        raise Unread(f"a small model of its class does not run ({said})") from None


def _uneven(family: Family, config: Any, twin: Twin) -> str | None:
    """A layer of the class itself whose attention is set otherwise than the first of its kind, which the twin has; or None."""
    model = without_weights(config)
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    modules = [model.get_submodule(family.module(layer)) for layer in range(decoder_of(config).num_hidden_layers)]
    plain = (bool, int, float, str)
    found = [{name: value for name, value in vars(module).items() if isinstance(value, plain)} for module in modules]
    numbers = {name for name in found[0] if len({settings.get(name) for settings in found}) == len(found) > 1}
    for layer, kind in enumerate(kinds(config, twin.lists)):
        settings = {name: value for name, value in found[layer].items() if name not in numbers}
        if first.setdefault(kind, settings) != settings:
            names = ", ".join(sorted(name for name, value in settings.items() if first[kind].get(name) != value))
            return f"layer {layer} has another {names} than layers like it, and config.json does not say so"
    return None


def _inside(config: Any, twin: Twin) -> Family | None:
    """The family of a decoder inside another model, if it has a row that is right."""
    decoder = decoder_of(config)
    if decoder is config or decoder.model_type not in FAMILIES:
        return None
    path = next(path for path, module in twin.model.named_modules() if module is twin.model.get_decoder())
    family = FAMILIES[decoder.model_type].of(decoder).inside(path, config)
    if not family.has_heads:  # nothing of it is read
        return family
    with contextlib.suppress(Exception):  # a stray field, which another family knows better
        return family if disproof(family, twin) is None else None
    return None


def _factor_of_queries(family: Found, twin: Twin) -> float | None:
    """What far queries are multiplied by, if nothing else tells them from near ones; None if something does."""
    if disproof(family, twin, [0]) or family.scaled_by is None:
        return None
    assert isinstance(family.scaled_by, float)
    for factor in (1 + step / 200 for step in range(-100, 400)):
        if not disproof(replace(family, scaled_by=factor * family.scaled_by), twin, [twin.farthest]):
            return factor
    return None


def _like_a_row(config: Any, twin: Twin) -> Family | None:
    """The family of another type that has its projections stacked, and that the class computes the same as."""
    shapes = {name: tuple(parameter.shape) for name, parameter in twin.model.named_parameters()}
    for row in FAMILIES.values():
        if isinstance(row, Projections) and not row.stacked:
            continue
        with contextlib.suppress(Exception):  # fields that this config lacks, and whatever else its like has
            family = replace(row.of(twin.config), model_type=config.model_type, is_row=False)
            prefixes = tuple(f"{family.module(layer)}." for layer in range(len(twin.layers)))
            wanted = {name: shape for layer in range(len(twin.layers)) for name, shape in family.shapes(layer).items()}
            there = {name: shape for name, shape in shapes.items() if name.startswith(prefixes)}
            if wanted == there and family.unreadable is None and disproof(family, twin) is None:
                return family
    return None
