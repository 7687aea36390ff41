"""The output of a plan, from file headers alone: units of tensors, checked against the config, assigned to shards.

It reads only names, shapes and dtypes, no weights.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from attention.errors import Failure
from convert.checkpoint.loading import class_names, require_loadable
from convert.checkpoint.writer import shard_names
from convert.families import Family
from convert.families.names import Place
from convert.planning.base import Plan
from eval.inputs.misfits import OTHER_MODEL, disagreement, instead_of
from eval.inputs.reader import Reader, TensorInfo

_NO_PLACE = "the output class has no place for it"


@dataclass(frozen=True)
class Unit:
    """Tensors that are made together: one layer's attention, or other tensors that map from some places to others.

    Copying is the special case in which no name, place or shape changes.

    Attributes:
        outputs: The infos of the stored tensors by name.
        sources: The places of the source's tensors; empty for an attention, whose tensors its family knows.
        places: The places of the outputs; empty for an attention.
        layer: The decoder layer, if the unit is its attention; else None.
    """

    outputs: dict[str, TensorInfo]
    sources: tuple[Place, ...] = ()
    places: tuple[Place, ...] = ()
    layer: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.outputs.values())

    @property
    def copies(self) -> bool:
        """Whether the outputs equal the sources, under the same or other names."""
        before, after = ([replace(place, name="") for place in places] for places in (self.sources, self.places))
        return self.layer is None and before == after

    def make(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs of a unit other than an attention; `read` gives its sources."""
        if self.copies:
            return {place.name: read(source.name) for source, place in zip(self.sources, self.places, strict=True)}
        assert {place.offset for place in self.sources} == {place.offset for place in self.places}, "gains would change"
        parts: dict[str, torch.Tensor] = {}
        for source in self.sources:
            parts |= source.split(read(source.name))
        return {place.name: place.join(parts) for place in self.places}


@dataclass(frozen=True)
class Manifest:
    """All tensors that a conversion writes. It makes, by name, those that are not of attentions.

    Attributes:
        reader: Reads the source's tensors.
        units: All units, in the source's order.
        dropped: Tensors of the source that no unit reads, with the reason.
    """

    reader: Reader
    units: tuple[Unit, ...]
    dropped: dict[str, str]

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        """The infos of all tensors that are written, by name."""
        return {name: info for unit in self.units for name, info in unit.outputs.items()}

    @cached_property
    def _unit_of(self) -> dict[str, Unit]:
        return {name: unit for unit in self.units for name in unit.outputs if unit.layer is None}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._unit_of[name].make(self.reader.__getitem__)[name]

    @property
    def nbytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    def shards(self, limit: int) -> dict[str, list[Unit]]:
        """The units of each weight file, in order; a unit larger than `limit` bytes gets its own."""
        shards: list[list[Unit]] = [[]]
        size = 0
        for unit in self.units:
            if shards[-1] and size + unit.nbytes > limit:
                shards.append([])
                size = 0
            shards[-1].append(unit)
            size += unit.nbytes
        return dict(zip(shard_names(len(shards)), shards, strict=True))


def loadable_manifest(plan: Plan) -> Manifest:
    """The tensors to write. Their names and shapes are those of the class: no work starts that could not be loaded.

    Raises:
        Failure: The source's headers do not match its config, or the class.
    """
    source, family, host, spec = plan.source, plan.family, plan.target.host, plan.target.spec
    # Of a decoder inside another model, files and classes name what is around it differently.
    inside = source.decoder is not source.config
    reader = source.reader(partial(class_names, source.config) if inside else family.renamed)
    _check_attention(family, reader)  # first, since its messages are more specific
    sized = host.sized(source.raw, family, spec)
    manifest = manifest_of(plan, reader, sized)
    require_loadable(source.config, without_computed(family, reader), "the source")
    if not plan.target.copies:
        require_loadable(sized, manifest.infos, f"the {spec.kind} of it")
    return manifest


def without_computed(family: Family, reader: Reader) -> dict[str, TensorInfo]:
    """All tensors but those of attentions that old checkpoints hold and the class computes itself."""
    inside = tuple(f"{family.module(layer)}." for layer in range(family.spec.num_layers))
    return {n: info for n, info in reader.infos.items() if not (n.startswith(inside) and n.endswith(family.computed))}


def manifest_of(plan: Plan, reader: Reader, config: Any) -> Manifest:
    """The manifest of a result.

    Args:
        plan: Of the conversion.
        reader: Reads the source's tensors.
        config: The result's config.

    Raises:
        Failure: Tensors are missing that others need.
    """
    family, layout, host, copies = plan.family, plan.layout, plan.target.host, plan.target.copies
    stored, sized = getattr(torch, plan.output.dtype) if plan.output.dtype else None, layout.of(config)
    layer_of = {name: layer for layer in range(0 if copies else family.spec.num_layers) for name in family.shapes(layer)}
    tied_head = _repeated_head(family, reader) if _ties(family) else {}
    made: dict[int | tuple[str, ...], Unit] = {}  # by the layer, or by the names of the outputs
    dropped: dict[str, str] = {}
    for name in reader.infos:
        layer = layer_of.get(name)
        if layer is not None:
            if layer not in made:
                made[layer] = _attention_unit(family, sized, layer, reader, stored)
        elif name in tied_head:
            dropped[name] = f"is {tied_head[name]}, to which the model ties it"
        elif copies or (place := family.names.place(name)) is None:  # it stays as it is, if there is a place for it
            kept = name if copies or family is layout else layout.beside(name)
            if kept is not None:
                outputs = {kept: reader.infos[name].stored_as(stored)}
                made[kept,] = Unit(outputs, (Place(name, (name,)),), (Place(kept, (name,)),))
            else:
                dropped[name] = "the model computes it itself" if name.endswith(family.computed) else _NO_PLACE
        elif all(layout.names.holding(role) is None for role in place.roles):
            dropped[name] = _NO_PLACE
        else:
            unit = _other_unit(family, layout, place, reader, stored)
            made.setdefault(tuple(sorted(unit.outputs)), unit)
    units = [*made.values()]
    if host.portable and _ties(family) and (head := _own_head(layout, units)):
        units.append(head)
    written = {name for unit in units for name in unit.outputs}
    dropped |= {name: host.replaces for name in layer_of if name not in written}
    return Manifest(reader, tuple(units), {name: why for name, why in sorted(dropped.items()) if name not in written})


def _ties(family: Family) -> bool:
    return bool(getattr(family.decoder, "tie_word_embeddings", False))


def _check_attention(family: Family, reader: Reader) -> None:
    """Compare the attention of every layer with the config.

    Raises:
        Failure: A tensor is missing or unknown, or has another shape; or there are layers beyond the config's last, which would
            be copied unconverted.
    """
    layers, computed = family.spec.num_layers, family.computed
    for layer in range(layers):
        expected = family.shapes(layer)
        for name, shape in expected.items():
            if name not in reader.infos:
                said, step = instead_of(name, reader.infos.keys() - expected.keys(), _ties(family))
                raise Failure(f"layer {layer} of the source lacks tensor {name}{said}", hint=step)
            found = reader.infos[name].shape
            if found != shape:
                step = "compare num_attention_heads, num_key_value_heads, head_dim and hidden_size with the weights"
                raise disagreement(f"{name} is {list(found)}", found, shape, step)
        module = family.module(layer) + "."
        # Old checkpoints store what classes now compute; where the class stays the same, it is copied like any other tensor.
        extra = [n for n in reader.infos if n.startswith(module) and n not in expected and not n.endswith(computed)]
        if extra:
            raise Failure(
                f"layer {layer} of the source has tensor {extra[0]}, which {family.model_type} with this config does not",
                hint="converting would drop it; check the biases and norms that config.json switches on",
            )
    beyond = [re.sub(r"\.0\.", f".{layers}.", name, count=1) for name in family.shapes(0)]
    if there := [name for name in beyond if name in reader.infos]:
        raise Failure(
            f"config.json gives {layers} layers, and the weights hold {there[0]}",
            hint="set num_hidden_layers to what the weights have",
        )


def _attention_unit(family: Family, layout: Family, layer: int, reader: Reader, stored: torch.dtype | None) -> Unit:
    """The unit of a converted layer. A tensor gets the dtype of its counterpart in the source, else of the first projection."""
    names, shapes = tuple(family.shapes(layer)), layout.shapes(layer).items()
    source = {name: torch.empty(reader.infos[name].shape, dtype=reader.infos[name].dtype, device="meta") for name in names}
    dtypes, first = layout.dtypes(source, family, layer), source[names[0]].dtype
    outputs = {name: TensorInfo(shape, dtypes.get(name, first)).stored_as(stored) for name, shape in shapes}
    return Unit(outputs, layer=layer)


def _repeated_head(family: Family, reader: Reader) -> dict[str, str]:
    """The head that a `.bin` stores as the embedding once more, mapped to the embedding; empty if there is none."""
    for pair in reader.aliases.items():
        holds = {place.roles[0]: name for name in pair if (place := family.names.place(name))}
        if holds.keys() == {"head.weight", "embedding.weight"}:
            return {holds["head.weight"]: holds["embedding.weight"]}
    return {}


def _own_head(layout: Family, units: Sequence[Unit]) -> Unit | None:
    """The head of a model that ties it to the embedding, as a copy of that; None if it is written already."""
    head, embedding = (layout.names.holding(f"{role}.weight") for role in ("head", "embedding"))
    assert head is not None, "a language model has a head"
    assert embedding is not None, "and an embedding"
    written = {place.name: (unit, place) for unit in units for place in unit.places}
    if head.name in written:
        return None
    unit, place = written[embedding.name]
    return replace(unit, outputs={head.name: unit.outputs[embedding.name]}, places=(replace(place, name=head.name),))


def _other_unit(family: Family, layout: Family, first: Place, reader: Reader, stored: torch.dtype | None) -> Unit:
    """The unit of all tensors that share roles with one, in the source or in the result, directly or through others."""
    sources, places, roles = [first], list[Place](), set[str]()
    while roles != (known := {role for place in (*sources, *places) for role in place.roles}):
        roles = known
        for there, names in ((sources, family.names), (places, layout.names)):
            for place in map(names.holding, sorted(roles)):
                if place is not None and place not in there:
                    there.append(place)
    if missing := [place.name for place in sources if place.name not in reader.infos]:
        raise Failure(f"the checkpoint lacks tensor {missing[0]}, which {first.name} needs", hint=OTHER_MODEL)
    parts: dict[str, torch.Tensor] = {}
    for source in sources:
        parts |= source.split(torch.empty(reader.infos[source.name].shape, device="meta"))
    dtype = reader.infos[sources[0].name].dtype
    outputs = {place.name: TensorInfo(tuple(place.join(parts).shape), dtype).stored_as(stored) for place in places}
    return Unit(outputs, tuple(sources), tuple(places))
