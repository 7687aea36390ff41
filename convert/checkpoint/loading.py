"""Converts a checkpoint's tensors to a transformers class's parameters, one at a time and without loading the others.

Names and shapes in a checkpoint may differ from the class's: transformers renames tensors, stacks experts, adds or drops
a prefix, and ties weights. This module applies its own conversion mapping, in the order of `from_pretrained`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from attention.auto import from_config
from attention.errors import Failure
from attention.versions import keep_caps
from eval.inputs.misfits import OTHER_MODEL, disagreement, instead_of, of_a_kind
from eval.inputs.reader import TensorInfo

Read = Callable[[str], torch.Tensor]


def empty_model(config: Any) -> Any:
    """The causal LM of a config in fp32: parameters on the meta device, tied as in the class, and buffers as it computes them.

    Raises:
        Failure: transformers cannot build a causal LM from this config.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with init_empty_weights(), no_init_weights():  # random numbers on the meta device take most of the time
        try:
            model = from_config(config, dtype=torch.float32)
        except Exception as error:  # transformers and a checkpoint's own code raise any kind
            reason = " ".join(str(error).split())[:300]
            raise Failure(
                f"transformers makes no causal LM of this {config.model_type} config: {type(error).__name__}: {reason}",
                hint="its class must be one of AutoModelForCausalLM (auto_map names one in the checkpoint's own code)",
            ) from error
    model.tie_weights()  # `init_empty_weights` makes two parameters of a tied one
    return keep_caps(model).eval().requires_grad_(False)


def class_names(config: Any, stored: Collection[str]) -> dict[str, str]:
    """The names in the class of tensors that a checkpoint has under other names, and that loading changes nothing else of.

    Raises:
        Failure: transformers cannot build a causal LM from this config.
    """
    model = empty_model(config)
    made, _ = _gathered(model, model.state_dict(), stored)
    return {one.names[0]: one.first for one in made if one.conversion is None and one.names[0] != one.first}


def require_loadable(config: Any, infos: Mapping[str, TensorInfo], what: str) -> None:
    """Compare every tensor name, shape and dtype of a checkpoint with its class, by transformers' own rules.

    Args:
        config: The checkpoint's config.
        infos: The infos of its tensors by name.
        what: The name of the checkpoint in messages.

    Raises:
        Failure: A tensor is missing or unknown, has another shape, or holds integers where the class needs floats.
    """
    model = empty_model(config)
    tensors, kind = ClassTensors(model, infos), type(model).__name__
    if tensors.missing:
        others = f" and {len(tensors.missing) - 1} others" if tensors.missing[1:] else ""
        tied = bool(getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False))
        said, step = instead_of(tensors.missing[0], tensors.unexpected, tied)
        raise Failure(f"{what} lacks {tensors.missing[0]}{others}, which {kind} with this config has{said}", hint=step)
    if tensors.unexpected:
        others = f" and {len(tensors.unexpected) - 1} others" if tensors.unexpected[1:] else ""
        name, whose, step = of_a_kind(tensors.unexpected) or (tensors.unexpected[0], "", OTHER_MODEL)
        known = f"which {kind} with this config has not"
        raise Failure(f"{what} has tensor {name}{others}, {f'{whose}, ' if whose else ''}{known}", hint=step)
    for name in tensors.mismatched:
        raise tensors.mismatch(name)
    floating = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for name in tensors.names:
        for source in tensors.sources(name) if name in floating else ():
            if not infos[source].is_float:
                kept = str(infos[source].dtype).removeprefix("torch.")
                raise Failure(
                    f"{source} holds {kept}, which means nothing without its scales",
                    hint="convert the original checkpoint, in float32, bfloat16 or float16, then quantise",
                )


class ClassTensors:
    """Maps each parameter and persistent buffer of a model to checkpoint tensors. Reads only names, shapes and dtypes.

    Args:
        model: On any device, meta included; its weights are not touched.
        infos: The infos of all tensors of the checkpoint.

    Attributes:
        names: Parameters and persistent buffers, in the order of the class.
        missing: Those without a tensor; a tied weight counts as given if one of the weights tied to it is.
        unexpected: Tensors of the checkpoint that the class does not know.
        ignored: Unknown tensors that the class ignores on purpose, such as rotary frequencies.
        mismatched: Of each parameter whose tensors have a wrong shape: that shape, None if they cannot be combined, and the
            class's.
    """

    def __init__(self, model: Any, infos: Mapping[str, TensorInfo]) -> None:
        self._model, self._infos = model, infos
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.names = tuple(wanted)
        gathered, strays = _gathered(model, wanted, infos)
        self._from: dict[str, tuple[_Made, str]] = {}  # what a parameter is made of, and its name there
        found: dict[str, tuple[int, ...] | None] = {}
        for made in gathered:
            shapes = self._shapes(made)
            self._from |= {name: (made, name) for name in shapes}
            found |= shapes
        missing = {name for name in wanted if name not in self._from}
        for taker, giver in _tied(model, missing).items():
            self._from[taker] = self._from[giver]
        keys = SimpleNamespace(missing_keys=missing, unexpected_keys={renamed for renamed, _ in strays})
        model._adjust_missing_and_unexpected_keys(keys)  # those that the class ignores on purpose go
        self.missing = tuple(name for name in wanted if name in keys.missing_keys)
        self.unexpected = tuple(name for renamed, name in strays if renamed in keys.unexpected_keys)
        self.ignored = tuple(name for renamed, name in strays if renamed not in keys.unexpected_keys)
        self.mismatched = {
            name: (shape, wanted[name]) for name, shape in found.items() if name in wanted and shape != wanted[name]
        }

    def sources(self, name: str) -> tuple[str, ...]:
        """The checkpoint tensors that a parameter is made of; empty if it is missing."""
        return self._from[name][0].names if name in self._from else ()

    def tensor(self, name: str, read: Read) -> torch.Tensor:
        """A parameter, made from the checkpoint tensors that `read` gives, in their dtype.

        Raises:
            Failure: It is missing or has a wrong shape.
        """
        if name not in self._from:
            raise Failure(f"the checkpoint lacks tensor {name}", hint=OTHER_MODEL)
        made, giver = self._from[name]
        if giver in self.mismatched:
            raise self.mismatch(giver)
        return made.convert(self._model, read)[giver]

    def mismatch(self, name: str) -> Failure:
        """The error that says so of a parameter in `mismatched`."""
        (shape, wanted), names = self.mismatched[name], self.sources(name)
        several = f"{len(names)} tensors, {names[0]} to {names[-1]}"
        if shape is None:
            what = f"{name} cannot be made of its {several}, whose shapes do not fit together"
        elif names[1:]:
            what = f"{name} is {list(shape)} (made of {several})"
        else:
            what = f"{names[0]} is {list(shape)}"
        return disagreement(what, shape, wanted)

    def is_converted(self, name: str) -> bool:
        """Whether a parameter is more than a renamed tensor."""
        return name in self._from and self._from[name][0].conversion is not None

    def _shapes(self, made: _Made) -> dict[str, tuple[int, ...] | None]:
        """The shapes that some tensors give, by parameter; None if they cannot be combined."""

        def meta(name: str) -> torch.Tensor:
            return torch.empty(self._infos[name].shape, dtype=self._infos[name].dtype, device="meta")

        try:
            return {name: tuple(tensor.shape) for name, tensor in made.convert(self._model, meta).items()}
        except Exception:  # any kind: operations of transformers may not expect these shapes
            return {made.first: None}


@dataclass(frozen=True)
class _Made:
    """Tensors of a checkpoint that become one parameter or several.

    Attributes:
        first: The parameter, or the first of them.
        parts: The tensors in transformers' order, each with the pattern that it matched.
        conversion: The operation that makes the parameters; None if a tensor is only renamed.
    """

    first: str
    parts: list[tuple[str, str]]
    conversion: Any | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.parts)

    def convert(self, model: Any, read: Read) -> dict[str, torch.Tensor]:
        """The parameters by name."""
        if self.conversion is None:
            return {self.first: read(self.names[0])}
        conversion = copy.deepcopy(self.conversion)  # it stores the tensors that it converts
        for pattern, name in self.parts:
            conversion.add_tensor(self.first, name, pattern, partial(read, name))
        made = conversion.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _gathered(model: Any, wanted: Mapping[str, Any], names: Iterable[str]) -> tuple[list[_Made], list[tuple[str, str]]]:
    """The tensors that belong together, and those that match nothing, as pairs (name in the class, name in the checkpoint).

    It follows `convert_and_load_state_dict_in_model`, by names only.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    made: dict[str, _Made] = {}
    strays = []
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if renamed not in wanted and name in wanted:
            renamed, pattern = rename_source_key(name, [], [], model.base_model_prefix, wanted)
        if renamed not in wanted:
            strays.append((renamed, name))
            continue
        one = made.setdefault(renamed, _Made(renamed, [], by_pattern.get(pattern)))
        if one.conversion is not None or not one.parts:  # if several are renamed to one parameter, the first counts
            one.parts.append((name if pattern is None else pattern, name))
    return list(made.values()), strays


def _tied(model: Any, missing: set[str]) -> dict[str, str]:
    """Missing parameters that are tied to given ones, mapped to these; they are removed from `missing`.

    It follows `PreTrainedModel.tie_weights`: whichever one the checkpoint holds gives the others.
    """
    groups: dict[str, list[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, [source]).append(target)
    found: dict[str, str] = {}
    for group in groups.values():
        if (giver := next((name for name in group if name not in missing), None)) is not None:
            found |= dict.fromkeys(missing.intersection(group), giver)
            missing.difference_update(group)
    return found
