"""Maps the names of a checkpoint's tensors to canonical roles, with one table per layout.

A role says what a tensor does, whatever the checkpoint calls it, so that an output class with other names only needs a table.
A checkpoint has two kinds of tensors: those of the attentions, which the family's `shapes`, `split` and
`join` know, and all others, which are in the table. Tables that several families share come last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from attention.errors import Failure

if TYPE_CHECKING:
    import torch

# The roles, without the last part of a tensor's name: embedding, positions (padding_positions: rows of that table before those,
# which only padding reads), embedding_norm, embedding_projection and head_projection (where embeddings are not as wide as the
# model), final_norm, head. Those of a layer begin with "layers.{layer}.": attention_norm and mlp_norm (of inputs; of parallel
# blocks, the first is the MLP's, too), attention_output_norm, mlp_output_norm, mlp.gate (what the activation function is
# applied to), mlp.up, mlp.down, mlp.activation, mlp.router; of an expert mlp.experts.{expert}.gate and so on, without the
# number if they are stacked in the first dimension; of the expert that sees every token mlp.shared.gate and so on, and
# mlp.shared_router.


@dataclass(frozen=True)
class Row:
    """One line of a table: the path of a kind of module in a checkpoint, and its roles.

    Attributes:
        name: The path, with `{layer}` and `{expert}` for numbers: "model.layers.{layer}.mlp.gate_up_proj". A tensor's name is
            the path plus a last part ("weight", "bias" or another one of the class), which its roles keep.
        roles: What it holds: `("layers.{layer}.mlp.up",)`. Several are stacked along their output rows in equal
            parts: `("layers.{layer}.mlp.gate", "layers.{layer}.mlp.up")`.
        transposed: Whether weights are stored `[in, out]`, as in GPT-2's Conv1D. Biases are the same either way.
        leading: How many rows the first of two roles has, if not half of them.
        offset: What is added to the stored weight to make a gain: 1 where a norm stores gain − 1.
    """

    name: str
    roles: tuple[str, ...]
    transposed: bool = False
    leading: int | None = None
    offset: float = 0.0

    def place(self, numbers: Mapping[str, str], last: str) -> Place | None:
        """The tensor with these numbers and that last part; None if it is unknown how such parts are stacked."""
        if len(self.roles) > 1 and last not in (_WEIGHT, _BIAS):
            return None
        roles = tuple(f"{role.format(**numbers)}.{last}" for role in self.roles)
        name, weight = f"{self.name.format(**numbers)}.{last}", last == _WEIGHT
        return Place(name, roles, self.transposed and weight, self.leading, self.offset if weight else 0.0)


class Place(Row):
    """One tensor of a checkpoint: its name and what it holds, as a row says, each with the last part of the name.

    Its roles are `("layers.3.mlp.gate.weight", "layers.3.mlp.up.weight")`.
    """

    def split(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of the tensor by role, as views.

        Raises:
            Failure: The rows do not divide into such parts.
        """
        rows_first = self._turned(tensor, f"{self.name} is {list(tensor.shape)}")
        if len(self.roles) == 1:
            return {self.roles[0]: rows_first}
        if (sizes := self._sizes([rows_first])) is None:
            raise Failure(f"{self.name} is {list(tensor.shape)} and should hold {self._held}", hint=_CHECK)
        return dict(zip(self.roles, rows_first.split(sizes, self._rows), strict=True))

    def join(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The stored tensor, from its parts by role.

        Raises:
            Failure: The parts cannot be stacked.
        """
        import torch

        found = [parts[role] for role in self.roles]
        if len(found) == 1:
            rows_first = found[0]
        else:
            sizes, columns = self._sizes(found), {(*part.shape[: self._rows], *part.shape[self._rows :][1:]) for part in found}
            if sizes is None or len(columns) > 1 or sizes != [part.shape[self._rows] for part in found]:
                what = " and ".join(f"{role} {list(part.shape)}" for role, part in zip(self.roles, found, strict=True))
                raise Failure(f"{self.name} holds {self._held}, and there are {what}", hint=_CHECK)
            rows_first = torch.cat(found, self._rows)
        return self._turned(rows_first, f"{self.roles[0]} is {list(rows_first.shape)}")

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """How many rows each role has of those that tensors have together; None if they do not divide so."""
        if any(tensor.ndim < -self._rows for tensor in tensors):
            return None
        rows, count = sum(tensor.shape[self._rows] for tensor in tensors), len(self.roles)
        if self.leading is not None:
            return [self.leading, rows - self.leading] if rows > self.leading else None
        return None if rows % count else [rows // count] * count

    @property
    def _held(self) -> str:
        if self.leading is None:
            return f"{len(self.roles)} projections of equal size"
        return f"{self.leading} rows of {self.roles[0]} and then {self.roles[1]}"

    @property
    def _rows(self) -> int:
        """The dimension of the outputs in a weight `[…, out, in]` or a bias `[…, out]`."""
        return -1 if self.name.endswith(f".{_BIAS}") else -2

    def _turned(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        if self.transposed and tensor.ndim < 2:
            raise Failure(f"{what} and should be a matrix", hint=_CHECK)
        return tensor.mT if self.transposed else tensor


def in_layers(layers: str, path: str, *roles: str, transposed: bool = False) -> Row:
    """The row of a module that every decoder layer has: of `{layers}.{layer}.{path}`, with the roles of a layer."""
    return Row(f"{layers}.{{layer}}.{path}", tuple(f"layers.{{layer}}.{role}" for role in roles), transposed)


class NameTable:
    """The names and roles of one layout, looked up in both directions.

    Args:
        rows: In any order. No path and no role occurs twice, and roles have the numbers of their paths.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = tuple(rows)
        self._paths = [(_pattern(row.name), row) for row in self.rows]
        self._roles = [(_pattern(role), row) for row in self.rows for role in row.roles]

    def place(self, name: str) -> Place | None:
        """The tensor of that name, or None if the table has none."""
        return _find(self._paths, name)

    def holding(self, role: str) -> Place | None:
        """The tensor that holds a role ("layers.3.mlp.gate.weight"), or None if the table has none."""
        return _find(self._roles, role)

    def replacing(self, *rows: Row, without: Sequence[str] = ()) -> NameTable:
        """This table with `rows` in place of rows that share a path or a role with them, and without the roles `without`."""
        paths, roles = {row.name for row in rows}, {role for row in rows for role in row.roles} | set(without)
        return NameTable([*(row for row in self.rows if row.name not in paths and not roles & set(row.roles)), *rows])

    def storing_gains_less_one(self) -> NameTable:
        """This table for a class whose norms store gain − 1."""
        return NameTable([replace(row, offset=1.0) if row.roles[0].endswith("norm") else row for row in self.rows])


_WEIGHT, _BIAS = "weight", "bias"
_CHECK = "config.json and the weights are not of the same model"


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>0|[1-9][0-9]*)", re.escape(template)))


def _find(patterns: Iterable[tuple[re.Pattern[str], Row]], name: str) -> Place | None:
    stem, _, last = name.rpartition(".")
    for pattern, row in patterns:
        if found := pattern.fullmatch(stem):
            return row.place(found.groupdict(), last)
    return None


def decoder_table(layers: str, around: Mapping[str, str], within: Mapping[str, str]) -> NameTable:
    """The table of roles by paths: of modules around the layers, and of those in each of `layers`."""
    outer = (Row(path, (role,)) for path, role in around.items())
    return NameTable([*outer, *(in_layers(layers, path, role) for path, role in within.items())])


def megatron(layers: str, embedding: str, final_norm: str, head: str) -> NameTable:
    """The table of classes that keep Megatron's names, with the modules around `layers` named as given."""
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}  # one where both run in parallel
    mlp = {"mlp.dense_h_to_4h": "mlp.up", "mlp.dense_4h_to_h": "mlp.down"}
    return decoder_table(layers, {embedding: "embedding", final_norm: "final_norm", head: "head"}, norms | mlp)


def like_opt(decoder: str, final_norm: str, head: str = "lm_head", learned: bool = True) -> NameTable:
    """The table of OPT and its like, with or without learned positions, of which the first two are for padding."""
    around = {f"{decoder}.embed_tokens": "embedding", f"{decoder}.{final_norm}": "final_norm", head: "head"}
    norms = {"self_attn_layer_norm": "attention_norm", "final_layer_norm": "mlp_norm"}
    table = decoder_table(f"{decoder}.layers", around, norms | {"fc1": "mlp.up", "fc2": "mlp.down"})
    positions = Row(f"{decoder}.embed_positions", ("padding_positions", "positions"), leading=2)
    return table.replacing(positions) if learned else table


in_llama = partial(in_layers, "model.layers")
MLP = ("gate", "up", "down")
LLAMA = decoder_table(
    "model.layers",
    {"model.embed_tokens": "embedding", "model.norm": "final_norm", "lm_head": "head"},
    {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    | {f"mlp.{part}_proj": f"mlp.{part}" for part in MLP},
)
NORMS_BEHIND = LLAMA.replacing(
    in_llama("post_attention_layernorm", "attention_output_norm"),
    in_llama("post_feedforward_layernorm", "mlp_output_norm"),
    without=("layers.{layer}.attention_norm",),
)
NORMS_AROUND = NORMS_BEHIND.replacing(
    in_llama("input_layernorm", "attention_norm"),
    in_llama("pre_feedforward_layernorm", "mlp_norm"),
)
WITHOUT_GAINS = LLAMA.replacing(without=("layers.{layer}.attention_norm", "layers.{layer}.mlp_norm", "final_norm"))
GPT2 = decoder_table(
    "transformer.h",
    {"transformer.wte": "embedding", "transformer.wpe": "positions", "transformer.ln_f": "final_norm", "lm_head": "head"},
    {"ln_1": "attention_norm", "ln_2": "mlp_norm", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"},
)
GPTJ = GPT2.replacing(
    in_layers("transformer.h", "mlp.fc_in", "mlp.up"),
    in_layers("transformer.h", "mlp.fc_out", "mlp.down"),
    without=("positions", "layers.{layer}.mlp_norm"),
)
FUSED_MLP = LLAMA.replacing(in_llama("mlp.gate_up_proj", "mlp.gate", "mlp.up"))
EXPERTS = LLAMA.replacing(
    in_llama("mlp.gate", "mlp.router"),
    *(in_llama(f"mlp.experts.{{expert}}.{part}_proj", f"mlp.experts.{{expert}}.{part}") for part in MLP),
)
NUMBERED_EXPERTS = LLAMA.replacing(
    in_llama("block_sparse_moe.gate", "mlp.router"),
    *(
        in_llama(f"block_sparse_moe.experts.{{expert}}.{name}", f"mlp.experts.{{expert}}.{part}")
        for name, part in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ),
)
