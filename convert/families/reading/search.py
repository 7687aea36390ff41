"""The search for what a class computes that nobody has described: where its projections are, and which record explains them.

It looks at a small twin (`twin.py`). Candidates are few: which modules, RoPE or none, which dims form a pair, a window, a cap,
the scale, sinks, the direction in which pairs turn, a norm of queries and keys before or after RoPE.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from attention.qk_norm import QKNorm
from attention.record import Attention
from attention.rope import Pairing
from attention.spec import AttentionSpec
from convert.families.base import SOFTCAP
from convert.families.heads import BEHIND_ROPE, BY_KV_HEAD, BY_PART, NormRow, RowOrder, Storage
from convert.families.names import NameTable, Row, in_layers
from convert.families.reading.found import Found, Reading
from convert.families.reading.twin import Call, Twin, computed, kinds, near


class Unread(Exception):
    """No record computes what the twin does; the message says what is in the way."""


class Unexplained(Unread):
    """The same, of an attention whose parameters a record has: what it computes is in the way."""


def _projections(twin: Twin, calls: Mapping[str, Call], spec: AttentionSpec) -> tuple[str, str, tuple[str, ...]]:
    """The path of the list of layers, that of the attention in a layer, and the names of its projections there.

    They are those of queries, keys, values and outputs; or one for queries, keys and values together, and that of outputs.
    """
    modules, count = dict(twin.model.named_modules()), len(twin.layers)
    lists = [path for path, module in modules.items() if isinstance(module, nn.ModuleList) and len(module) == count]
    found = [(path, *attention) for path in lists for attention in _attentions(modules, calls, f"{path}.0", spec)]
    found = [one for one in found if len(one[2]) > 1] or found  # with projections apart, if there are such
    if not found:
        raise Unread("its first layer has no attention with projections of queries, keys, values and outputs")
    (layers, module, read, output), *others = found
    if others:
        raise Unread("its layers have several attentions, or there are several stacks of layers")
    path = f"{layers}.0.{module}"
    unused = [name for name, other in modules.items() if type(other) is type(modules[path]) and name not in calls]
    if any(name.startswith(f"{layers}.0.") for name in unused):
        raise Unread("its layers also attend to the states of an encoder")
    if len(read) == 1:
        return layers, module, (read[0], output)
    gave = {name: _without(twin, path, name) for name in read}
    # Without values, all tokens get the same.
    values = [name for name in read if torch.equal(gave[name], gave[name][:, :1].expand_as(gave[name]))]
    if len(read) > 3:  # the first token sees itself alone, or a sink: queries and keys change little there
        beside = [name for name in read if name not in values and not near(gave[name][:, 0], calls[path].gave[:, 0])]
        raise Unread(f"its attention has {', '.join(beside or read)} besides projections of queries, keys, values and outputs")
    if len(values) != 1:
        raise Unread(f"it is not clear which of its projections {', '.join(read)} makes values")

    def is_seen_later(name: str) -> bool:
        """Whether later tokens read what it gives for the first one; that token's query serves the token alone."""
        return not torch.equal(_without(twin, path, name, slice(1))[:, 1:], calls[path].gave[:, 1:])

    queries, keys = sorted((name for name in read if name not in values), key=is_seen_later)
    return layers, module, (queries, keys, values[0], output)


def _attentions(
    modules: Mapping[str, Any], calls: Mapping[str, Call], layer: str, spec: AttentionSpec
) -> Iterator[tuple[str, list[str], str]]:
    """The modules of a layer three or more of whose projections read its input, and one of which gives its output.

    One alone may read it, too, of the size of queries, keys and values together.
    """
    heads, groups = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for path, module in modules.items():
        if not path.startswith(f"{layer}.") or path not in calls:
            continue
        own = {name: calls[f"{path}.{name}"] for name, child in module.named_children()
               if isinstance(child, nn.Linear) and f"{path}.{name}" in calls}  # fmt: skip
        read = [name for name, call in own.items() if torch.equal(call.read, calls[path].read)]
        gave = [name for name, call in own.items() if torch.equal(call.gave, calls[path].gave)]
        sizes = [getattr(module, name).out_features for name in read]
        separate = sizes.count(groups) >= 2 and sizes.count(heads) >= (3 if heads == groups else 1)
        if len(gave) == 1 and (separate or sizes == [heads + 2 * groups]):
            yield path.removeprefix(f"{layer}."), read, gave[0]


def _without(twin: Twin, path: str, name: str, tokens: slice = slice(None)) -> torch.Tensor:
    """What an attention gives if one of its projections gives zero, for all tokens or for some."""

    def zeroed(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        changed[:, tokens] = 0
        return changed

    with twin.model.get_submodule(f"{path}.{name}").register_forward_hook(zeroed):
        return twin.calls()[path].gave


class Search:
    """Tries readings of each layer until one computes what the twin does.

    Raises:
        Unread: Its projections are not found.
    """

    def __init__(self, twin: Twin, spec: AttentionSpec, calls: Mapping[str, Call]) -> None:
        self.twin, self.spec, self.calls = twin, spec, calls
        self.layers, module, self.names = _projections(twin, calls, spec)
        self.path = f"{self.layers}.{{layer}}.{module}"
        self.first = self.path.format(layer=0)
        self.module, self.call = twin.model.get_submodule(self.first), calls[self.first]

    def family(self, config: Any) -> Found:
        """The family that explains the class; if its projections are stacked, rows by part are tried before rows by KV head.

        Raises:
            Unread: None does.
        """
        reasons = []
        for order in (BY_PART, BY_KV_HEAD) if len(self.names) == 2 else (BY_PART,):
            try:
                return self._family(config, order)
            except Unread as why:
                reasons.append(why)
        # The order that accounts for all parameters counts.
        raise next((why for why in reversed(reasons) if isinstance(why, Unexplained)), reasons[0])

    def _family(self, config: Any, order: RowOrder) -> Found:
        biases = [self.module.get_submodule(name).bias is not None for name in self.names]
        norms = [self._norm(states) for states in self._states(order)]
        if len(set(biases[:-1])) > 1 or (norms[0] is None) != (norms[1] is None):
            raise Unread("its queries, keys and values do not have biases and norms alike")
        (q_norm, row), (k_norm, _) = (norm or ("", None) for norm in norms)
        whole, cosines = self.calls.get(f"{self.layers}.0"), self.call.cosines
        inside = [call for path, call in self.calls.items() if path.startswith(f"{self.layers}.0.")]
        doubled = cosines is not None and cosines.shape[-1] > 2 and torch.equal(cosines[..., ::2], cosines[..., 1::2])
        family = Found(
            config.model_type,
            config=self.twin.config,
            qkv_bias=biases[0],
            o_bias=biases[-1],
            norm=row and replace(row, q=q_norm, k=k_norm),
            names=NameTable(self._input_norm()),
            without_latent=BEHIND_ROPE if row and row.after_rotary else None,
            shares_heads=self.spec.num_kv_heads < self.spec.num_heads,
            attention_path=self.path,
            projections=self.names,
            order=order,
            lists=self.twin.lists,
            rope_stride=2 if doubled else 1,
            # Something in the layer reads the sum of the layer's input and its attention's output.
            adds_output=whole is not None and any(near(call.read, whole.read + self.call.gave) for call in inside),
        )
        family = replace(family, sinks=self._sinks(family))
        self._require_no_more(family)
        readings: dict[tuple[Any, ...], Reading] = {}
        for layer, kind in enumerate(kinds(self.twin.config, self.twin.lists)):
            scales = [reading.scale for reading in readings.values()]  # one that was fitted is found again, exactly
            found = self._reading(replace(family, readings=((kind, Reading()),)), kind, layer, scales)
            if readings.setdefault(kind, found) != found:
                raise Unexplained(f"layer {self.twin.layers[layer]} differs from others, and config.json does not say how")
        of_kinds = readings.values()
        scales = list({reading.scale for reading in of_kinds})
        if scales[1:]:
            raise Unread("its layers scale their logits by different factors")
        pairings = {reading.pairing for reading in of_kinds if reading.pairing}
        if len(pairings) > 1:
            raise Unread("its layers rotate different pairs of dims")
        windows = dict.fromkeys(reading.window for reading in of_kinds if reading.window)
        caps = [SOFTCAP] if any(reading.cap for reading in of_kinds) else []
        return replace(
            family,
            pairing=next(iter(pairings), "half"),
            readings=tuple(readings.items()),
            scaled_by=scales[0],
            extra_features=(*caps, *windows),
        )

    def _sinks(self, family: Found) -> str | None:
        """The one further parameter of the attention that has a number for each head, if there is one: perhaps its sinks."""
        wanted, prefix = family.shapes(0), f"{family.module(0)}."
        more = {name: tensor.shape for name, tensor in self.twin.parameters.items() if name.startswith(prefix)}
        found = [name for name, shape in more.items() if name not in wanted and shape == (self.spec.num_heads,)]
        return found[0].removeprefix(prefix) if len(found) == 1 else None

    def _require_no_more(self, family: Found) -> None:
        """Refuse parameters of an attention that no record has."""
        state, parameters = self.twin.state, self.twin.parameters
        for layer, stands_for in enumerate(self.twin.layers):
            prefix = f"{family.module(layer)}."
            there = {name for name in parameters if name.startswith(prefix)}
            wanted = family.shapes(layer)
            if more := sorted(name.removeprefix(prefix) for name in there - wanted.keys()):
                raise Unread(f"its attention has {', '.join(more)} besides projections of queries, keys, values and outputs")
            if any(name not in state or state[name].shape != shape for name, shape in wanted.items()):
                raise Unread(f"layer {stands_for} has no attention like the first layer's")

    def _states(self, order: RowOrder) -> Sequence[torch.Tensor]:
        """What its projections give as queries and as keys, each `[1, heads, T, D]`."""
        spec = self.spec
        given = torch.cat([self.calls[f"{self.first}.{name}"].gave[0] for name in self.names[:-1]], -1)
        heads = order.in_order(given.mT, spec).unflatten(0, (-1, spec.head_dim)).transpose(1, 2)
        return heads[None].split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)[:2]

    def _norm(self, states: torch.Tensor) -> tuple[str, NormRow] | None:
        """The norm of queries or keys `[1, heads, T, D]`, before or after RoPE: its name, and how it normalises."""
        for name, module in self.module.named_modules():
            call, gain = self.calls.get(f"{self.first}.{name}"), getattr(module, "weight", None)
            if call is None or isinstance(module, nn.Linear) or not isinstance(gain, torch.Tensor | None):
                continue
            read, gave = _by_heads(call.read, states.shape), _by_heads(call.gave, states.shape)
            if read is None or gave is None:
                continue
            if call.times:
                raise Unexplained(f"{name} of its attention runs several times")
            first, ours = read[:, :, 0], states[:, :, 0]
            if not near(first * (ours.norm() / first.norm()), ours):  # RoPE leaves it as it is, up to a factor of cosines
                continue
            if gain is not None and gain.numel() not in (states.shape[-1], ours.numel()):
                continue
            row = self._form(module, read, gave, after_rotary=not torch.equal(read, states))
            if row is not None and row.eps:
                return name, row
        return None

    def _form(self, module: Any, read: torch.Tensor, gave: torch.Tensor, after_rotary: bool = False) -> NormRow | None:
        """How a norm of heads `[1, H, T, D]` normalises, by what it gives; its `eps` is "" if the config does not say it."""
        gain, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        stated = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
        eps, dim = next(filter(None, stated), 1e-6), read.shape[-1]
        field = next(
            (name for name, value in vars(self.twin.decoder).items() if name.endswith(("eps", "epsilon")) and value == eps), ""
        )
        storage: Storage = (
            "none" if gain is None else "shared" if gain.numel() == dim else "flat" if gain.ndim == 1 else "matrix"
        )
        gain, bias = (None if vector is None else vector.view(-1, dim) for vector in (gain, bias))
        forms: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
        for kind, offset in itertools.product(forms, (0.0, 1.0)):
            row = NormRow("", "", kind, storage, None, field, bias is not None, offset, after_rotary)
            if near(QKNorm(row.form(eps), read.new_ones(1, dim) if gain is None else gain, bias)(read), gave):
                return row
        return None

    def _reading(self, family: Found, kind: tuple[Any, ...], layer: int, scales: Sequence[float]) -> Reading:
        """What the attention of a layer of that kind computes."""
        config, path = self.twin.decoder, family.module(layer)
        state, call = self.twin.state, self.calls[path]
        record = family.split({name: state[name].double() for name in family.shapes(layer)}, layer)
        windows = [name for name, value in vars(config).items() if "window" in name and type(value) is int and value > 1]
        module = self.twin.model.get_submodule(path)
        kept = [value for value in vars(module).values() if type(value) is float and 0 < value < 100]
        caps = [False, *([True] if getattr(config, SOFTCAP, None) else [])]

        def tries() -> Iterator[tuple[Reading, Attention]]:
            for rotation, window, cap in itertools.product(self._rotations(), [None, *windows], caps):
                reading = replace(rotation, window=window, cap=cap)
                tried = replace(family, readings=((kind, reading),))
                yield reading, replace(record, rotary=tried.rotary(layer), scoring=tried.scoring(layer))

        for reading, ours in tries():
            for scale in dict.fromkeys([self.spec.head_dim**-0.5, *scales, *kept]):
                if near(computed(replace(ours, scale=scale), call.read.double()), call.gave.double()):
                    return replace(reading, scale=scale)
        for reading, ours in tries():
            if not reading.cap and (fitted := _scale(ours, call)) is not None:
                return replace(reading, scale=fitted)
        also = f", with {family.sinks} as sinks," if family.sinks else ""
        raise Unexplained(f"RoPE, windows and scales{also} do not explain what layer {self.twin.layers[layer]} computes")

    def _rotations(self) -> Iterator[Reading]:
        pairings: tuple[Pairing, ...] = ("half", "interleaved")
        if getattr(self.twin.decoder, "rope_parameters", None):
            for backwards, pairing, share in itertools.product((False, True), pairings, (False, True)):
                yield Reading(pairing, share, backwards)
        yield Reading()

    def _input_norm(self) -> list[Row]:
        """The norm whose output the attention reads, if that has gains."""
        x, layer = self.call.read, f"{self.layers}.0."
        for path, call in self.calls.items():
            module: Any = self.twin.model.get_submodule(path)
            gain: Any = getattr(module, "weight", None)
            if not path.startswith(layer) or getattr(gain, "ndim", 0) != 1 or not torch.equal(call.gave, x):
                continue
            if (form := self._form(module, call.read[:, None], call.gave[:, None])) is not None:
                found = in_layers(self.layers, path.removeprefix(layer), "attention_norm")
                return [replace(found, offset=form.gain_offset)]
        return []


def _scale(record: Attention, call: Call) -> float | None:
    """The scale of logits with which a record computes what a class does, if there is one: by a grid, and finer ones."""
    x, gave = call.read.double(), call.gave.double()
    low, high = math.log(1e-3), math.log(10.0)
    for steps in (64, 16, 16, 16, 16, 16):
        width = (high - low) / steps
        found = [low + step * width for step in range(steps + 1)]
        errors = [float((computed(replace(record, scale=math.exp(log)), x) - gave).abs().max()) for log in found]
        best = found[errors.index(min(errors))]
        if min(errors) > 0.3 * float(gave.abs().max()):
            return None
        low, high = best - width, best + width
    return math.exp(best) if near(computed(replace(record, scale=math.exp(best)), x), gave) else None


def _by_heads(states: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """Heads `[1, H, T, D]` of this shape as a class gives them to a norm: so, by tokens, or flat; None if it is neither."""
    heads, dim = shape[1], shape[3]
    flat = states.unflatten(-1, (heads, dim)) if states.ndim == 3 and states.shape[-1] == heads * dim else states
    return next((view for view in (flat, flat.transpose(1, 2)) if view.shape == shape), None) if flat.ndim == 4 else None
