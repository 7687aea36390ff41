"""Families whose heads are stacked in the output rows of `self_attn.{q,k,v,o}_proj`, or of one such as `self_attn.qkv_proj`.

The rows of one for queries, keys and values follow each other in an order of their own (`RowOrder`). A family is a row of
`convert.families.rows`, which says where its class differs from Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from attention import rope
from attention.qk_norm import NormForm, QKNorm
from attention.record import Attention, Record
from attention.rope import Pairing
from attention.spec import AttentionSpec
from convert.families.base import CLIP, Family, Traits
from convert.families.projections import NAMES, PARTS, join_projections, or_zeros, split_projections

if TYPE_CHECKING:
    import torch

Storage = Literal["none", "shared", "flat", "matrix", "list"]


@dataclass(frozen=True)
class NormRow:
    """How a family stores its QK-norm.

    Attributes:
        storage: "none" without gains; "shared" one `[D]` for all heads; "flat" one `[heads * D]`, normalised over all heads;
            "matrix" one `[heads, D]`; "list" one `[D]` per head, under `norms.{head}`.
        switch: The config field that switches it on; always on if None.
        eps: The config field with its epsilon.
        gain_offset: 1 if the checkpoint stores gain − 1, else 0.
    """

    q: str = "q_norm"
    k: str = "k_norm"
    kind: Literal["rms", "layer"] = "rms"
    storage: Storage = "shared"
    switch: str | None = None
    eps: str = "rms_norm_eps"
    bias: bool = False
    gain_offset: float = 0.0
    after_rotary: bool = False

    def form(self, eps: float) -> NormForm:
        scope: Literal["all", "head"] = "all" if self.storage == "flat" else "head"
        per_head, fixed = self.storage not in ("none", "shared"), self.storage == "none"
        return NormForm(self.kind, scope, per_head, self.bias, eps, self.gain_offset, self.after_rotary, fixed)

    def names(self, name: str, heads: int) -> list[str]:
        if self.storage == "none":
            return []
        return [f"{name}.norms.{h}" for h in range(heads)] if self.storage == "list" else [name]

    def shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        return {"flat": (heads * head_dim,), "matrix": (heads, head_dim)}.get(self.storage, (head_dim,))

    def read(self, tensors: Mapping[str, torch.Tensor], name: str, heads: int, head_dim: int, eps: float) -> QKNorm:
        import torch

        if self.storage == "none":
            return QKNorm(self.form(eps), next(iter(tensors.values())).new_ones(1, head_dim))

        def stack(kind: str) -> torch.Tensor:
            return torch.cat([tensors[f"{part}.{kind}"] for part in self.names(name, heads)]).view(-1, head_dim)

        return QKNorm(self.form(eps), stack("weight"), stack("bias") if self.bias else None)  # [1 or heads, D]

    def write(self, norm: QKNorm, name: str, heads: int) -> dict[str, torch.Tensor]:
        names, out = self.names(name, heads), dict[str, "torch.Tensor"]()
        assert names or bool((norm.gain == 1).all()), "the class has no gains, and these would be lost"
        for kind, values in (("weight", norm.gain), ("bias", norm.bias)):
            if names and values is not None:
                parts = values.reshape(len(names), *self.shape(heads, values.shape[-1]))
                out |= {f"{part}.{kind}": gains for part, gains in zip(names, parts, strict=True)}
        return out


def _by_part(rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    return rows


@dataclass(frozen=True)
class RowOrder:
    """How the rows of one projection for queries, keys and values, or its biases, follow each other in files.

    Attributes:
        layout: For display.
        in_file: Makes rows of a file of those of all queries, then of all keys, then of all values.
        blocks: Parts with equally many heads.
    """

    layout: str
    in_file: Callable[[torch.Tensor, AttentionSpec], torch.Tensor] = _by_part
    blocks: int = 1

    def in_order(self, rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """The inverse of `in_file`."""
        import torch

        return rows if self.in_file is _by_part else rows[self.in_file(torch.arange(len(rows)), spec).argsort()]


def _by_kv_head(rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    import torch

    counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    q, k, v = rows.unflatten(0, (-1, spec.head_dim)).split(counts)
    return torch.cat((q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]), 1).flatten(0, 2)


_BLOCKS = 4
BY_PART = RowOrder("stacked projections")
# Of each KV head, the Qs of its query heads, its K and its V: Q, K, V for each head, if there are as many of both.
BY_KV_HEAD = RowOrder("interleaved projections", _by_kv_head)
# Each block has the queries, values and keys of a quarter of the heads. They were the parts of the model on four devices.
IN_BLOCKS = RowOrder(
    "projections in four blocks",
    lambda rows, spec: rows.unflatten(0, (3, _BLOCKS, -1))[[0, 2, 1]].transpose(0, 1).flatten(0, 2),
    _BLOCKS,
)


def nowhere(config: Any, layer: int) -> bool:
    """For `Projections.rotates`: no layer has RoPE."""
    return False


# Why there is no latent (`Family.without_latent`) if `NormRow.after_rotary`.
BEHIND_ROPE = "queries and keys are normalised after RoPE, and a latent holds keys before RoPE"
_BASE = 10_000.0  # of RoPE in classes that have no `rope_parameters`


@dataclass(frozen=True)
class Projections(Family):
    """One row: a model type and where it differs from Llama.

    Records are copies where no view has all queries side by side.

    Attributes:
        qkv_bias: Whether Q, K and V have biases; a string names the config field that says so. Likewise `o_bias`.
        projections: The names of the projections of queries, keys, values and outputs; or of the one for queries, keys and
            values, and of that of outputs.
        order: How the rows of one for queries, keys and values follow each other.
        transposed: Whether weights are stored `[in, out]`, as in GPT-2's Conv1D.
        norm: How the QK-norm is stored; None without one.
        sinks: The name of a tensor `[H]`, the sinks of its heads; None without.
        pairing: Which two dims form a rotary pair (see `Rotary`).
        scaled_by: The softmax scale, or the config field that it is read from, raised to `scale_power`; D^-½ if None.
        partial_rotary: Whether only the share `partial_rotary_factor` of D is rotary.
        rotary_dims: The config field with the number of rotary dims, in classes older than `rope_parameters`; None in others.
        rotates: Which layers have RoPE.
        local: Which layers see `window_size` tokens, by a mask inside their attention.
        adds_output: Whether a layer continues with the plain sum of its input and its attention's output.
        sums_unless: Config fields any of which, when on, make it continue otherwise.
        extra_features: Config fields that, when set, make the class do more than the record describes.
        extra_switch: The config field that switches those on; always on if None.
        required_values: (field, the only value that can be read, the reason for refusing any other), for fields of the config.

    The others are as in `Family`.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    projections: tuple[str, ...] = NAMES
    order: RowOrder = BY_PART
    transposed: bool = False
    norm: NormRow | None = None
    sinks: str | None = None
    pairing: Pairing = "half"
    scaled_by: str | float | None = None
    scale_power: float = 1.0
    partial_rotary: bool = False
    rotary_dims: str | None = None
    rotates: Callable[[Any, int], bool] = lambda config, layer: True
    local: Callable[[Any, int], bool] = nowhere
    adds_output: bool = True
    sums_unless: tuple[str, ...] = ()
    extra_features: tuple[str, ...] = ()
    extra_switch: str | None = None
    required_values: tuple[tuple[str, Any, str], ...] = ()

    @property
    def stacked(self) -> bool:
        """Whether one projection is for queries, keys and values."""
        return len(self.projections) == 2

    @property
    def layout(self) -> str:  # type: ignore[override]
        return self.order.layout if self.stacked else "separate projections"

    @property
    def unreadable(self) -> str | None:
        if (heads := self.decoder.num_attention_heads) % (blocks := self.order.blocks):
            return f"its projections have {blocks} blocks of equally many heads, and num_attention_heads is {heads}"
        if self.rotary_dims is not None:
            dims, most = getattr(self.decoder, self.rotary_dims), self.spec.head_dim
            if dims < 2 or dims % 2 or dims > most:
                return f"RoPE rotates pairs of each head's {most} dims, and {self.rotary_dims} is {dims}"
        windows = [self.inner_window(layer) for layer in range(self.decoder.num_hidden_layers)]
        if none := [window for window in windows if window is not None and window < 1]:
            return f"its local layers see no tokens (window_size is {none[0]})"
        if CLIP in self.extra_features and (clip := getattr(self.decoder, CLIP)) is not None and clip <= 0:
            return f"queries, keys and values are clipped to nothing ({CLIP} is {clip})"
        return next((why for name, value, why in self.required_values if getattr(self.decoder, name) != value), None)

    def rotary(self, layer: int) -> rope.Rotary | None:
        if not self.rotates(self.decoder, layer):
            return None
        if self.rotary_dims is not None:
            return rope.of_base(_BASE, getattr(self.decoder, self.rotary_dims), self.pairing)
        layer_types = getattr(self.decoder, "layer_types", None)
        layer_type = layer_types[layer] if layer_types else None
        return rope.from_config(self.decoder, self.spec.head_dim, self.pairing, layer_type, self.partial_rotary)

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        spec, width, rows = self.spec, self.decoder.hidden_size, self._rows
        sizes = [(count, width) for count in ([sum(rows)] if self.stacked else rows)]
        biased = (*[self._flag(self.qkv_bias)] * len(sizes), self._flag(self.o_bias))
        shapes: dict[str, tuple[int, ...]] = {}
        for name, size, bias in zip(self.projections, [*sizes, (width, rows[0])], biased, strict=True):
            shapes[f"{name}.weight"] = size[::-1] if self.transposed else size
            if bias:
                shapes[f"{name}.bias"] = size[:1]
        if norm := self._norm:
            for name, count in ((norm.q, spec.num_heads), (norm.k, spec.num_kv_heads)):
                for part in norm.names(name, count):
                    for kind in ("weight", "bias") if norm.bias else ("weight",):
                        shapes[f"{part}.{kind}"] = norm.shape(count, spec.head_dim)
        if self.sinks is not None:
            shapes[self.sinks] = (spec.num_heads,)
        return {f"{self.module(layer)}.{name}": shape for name, shape in shapes.items()}

    def split(self, tensors: Mapping[str, torch.Tensor], layer: int) -> Attention:
        spec, prefix = self.spec, f"{self.module(layer)}."
        local = {name.removeprefix(prefix): self._turned(tensor) for name, tensor in tensors.items()}
        for last in ("weight", "bias"):
            if self.stacked and (stacked := local.pop(f"{self.projections[0]}.{last}", None)) is not None:
                parts = self.order.in_order(stacked, spec).split(self._rows)
                local |= {f"{name}.{last}": part for name, part in zip(PARTS, parts, strict=True)}
        record = split_projections(local, spec.head_dim, self.scale, self.rotary(layer), self._separate)
        record = replace(record, scoring=self.scoring(layer), sinks=None if self.sinks is None else local[self.sinks])
        if (norm := self._norm) is None:
            return record
        eps = getattr(self.decoder, norm.eps)
        return replace(
            record,
            q_norm=norm.read(local, norm.q, spec.num_heads, spec.head_dim, eps),
            k_norm=norm.read(local, norm.k, spec.num_kv_heads, spec.head_dim, eps),
        )

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        assert isinstance(record, Attention), "a latent has no projections of keys and values"
        a = self.in_class(record, layer)
        local = join_projections(replace(a, sinks=None), self._separate)
        if self.stacked:
            local = self._in_one(local, spec)
        if self.norm and a.q_norm and a.k_norm:
            local |= self.norm.write(a.q_norm, self.norm.q, a.q.shape[0])
            local |= self.norm.write(a.k_norm, self.norm.k, a.k.shape[0])
        if self.sinks is not None and a.sinks is not None:
            local[self.sinks] = a.sinks
        return {f"{self.module(layer)}.{name}": self._turned(tensor) for name, tensor in local.items()}

    def _in_one(self, local: Mapping[str, torch.Tensor], spec: AttentionSpec) -> dict[str, torch.Tensor]:
        """The same tensors with queries, keys and values in one."""
        import torch

        found: dict[str, list[torch.Tensor]] = {}
        for name, tensor in local.items():
            part, last = name.split(".")
            found.setdefault(f"{self.projections[0]}.{last}" if part in PARTS else name, []).append(tensor)
        return {
            name: parts[0] if len(parts) == 1 else self.order.in_file(torch.cat(parts), spec) for name, parts in found.items()
        }

    def in_class(self, a: Attention, layer: int) -> Attention:
        """A record of another class as this one computes it: its order of pairs, and the biases that it always has."""
        assert (a.sinks is None) == (self.sinks is None), "the class has sinks, or it has none"
        a = a.paired(self.pairing)
        if self.qkv_bias is True:
            of = (a.q, a.q_bias), (a.k, a.k_bias), (a.v, a.v_bias)
            q_bias, k_bias, v_bias = (or_zeros(bias, rows[..., 0]) for rows, bias in of)
            a = replace(a, q_bias=q_bias, k_bias=k_bias, v_bias=v_bias)
        return replace(a, o_bias=or_zeros(a.o_bias, a.o[:, 0, 0])) if self.o_bias is True else a

    def inner_window(self, layer: int) -> int | None:
        return int(self.decoder.window_size) if self.local(self.decoder, layer) else None

    def output(self, layer: int) -> str:
        return f"{self.module(layer)}.{self.projections[-1]}"

    @property
    def traits(self) -> Traits:
        norm, config, layers = self._norm, self.decoder, range(self.spec.num_layers)
        extra = self.extra_features if self.extra_switch is None or getattr(config, self.extra_switch) else ()
        if any(self.local(config, layer) for layer in layers):
            extra = (*extra, "window_size")
        return Traits(
            qkv_bias=self._flag(self.qkv_bias),
            o_bias=self._flag(self.o_bias),
            qk_norm=norm.form(getattr(config, norm.eps)) if norm else None,
            sinks=self.sinks is not None,
            adds_output=self.adds_output and not any(getattr(config, field) for field in self.sums_unless),
            extra_features={field: value for field in extra if (value := getattr(config, field, None)) not in (None, False)},
        )

    @property
    def scale(self) -> float:
        if self.scaled_by is None:
            return super().scale
        given = getattr(self.decoder, self.scaled_by) if isinstance(self.scaled_by, str) else self.scaled_by
        return float(given**self.scale_power)

    @property
    def _separate(self) -> tuple[str, ...]:
        return (*PARTS, self.projections[-1]) if self.stacked else self.projections

    @property
    def _rows(self) -> list[int]:
        """How many rows queries, keys and values have."""
        spec = self.spec
        return [count * spec.head_dim for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]

    def _turned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mT if self.transposed and tensor.ndim == 2 else tensor

    def _flag(self, flag: bool | str) -> bool:
        return bool(getattr(self.decoder, flag)) if isinstance(flag, str) else flag

    @property
    def _norm(self) -> NormRow | None:
        on = self.norm and (self.norm.switch is None or getattr(self.decoder, self.norm.switch))
        return self.norm if on else None
