"""A record's outputs on a sample of inputs. Methods choose between results by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.linalg import multi_dot

from attention.encoding import rounded
from attention.qk_norm import LinearisedNorm, QKNorm
from attention.record import PLAIN, Attention, FactoredAttention, Record, Scoring
from attention.rope import Rotation, no_rotary

_SPAN = 256  # tokens


@dataclass(frozen=True)
class Block:
    """A text, as a layer reads it.

    Attributes:
        x: `[T, E]`, the layer's inputs.
        positions: Of its tokens, ascending; they may skip (PoSE, arXiv 2309.10400). Windows and ALiBi count tokens instead.
    """

    x: torch.Tensor
    positions: Sequence[int]

    def __len__(self) -> int:
        return len(self.x)

    def float(self) -> Block:
        """The same inputs in fp32."""
        return replace(self, x=self.x.float())


def attention_output(record: Record, blocks: Iterable[Block]) -> torch.Tensor:
    """Causal attention of blocks of any lengths, one after another: `[tokens, E]`, fp32."""
    return torch.cat([output_of(record, block.float()) for block in blocks])


def output_error(before: Record, after: Record, blocks: Sequence[Block]) -> float:
    """Squared error of what `after` computes on blocks, relative to what `before` does."""
    expected = attention_output(before, blocks)
    error, energy = (part.double().square().sum() for part in (attention_output(after, blocks) - expected, expected))
    return float(error / energy.clamp_min(torch.finfo(torch.float64).tiny))  # a layer may add nothing


def attention_received(attention: Attention, block: Block) -> torch.Tensor:
    """The attention that each token of a block gets from all queries of all heads, `[T]`.

    Its mean is one, or less with sinks.
    """
    heads = heads_of(attention, block.float())
    total = torch.zeros(len(block), dtype=torch.float64, device=block.x.device)
    for head in range(len(heads.plain)):
        for tokens in spans(len(block)):
            total[: tokens.stop] += heads.attention(head, tokens).sum(0)
    return total / len(heads.plain)


def spans(count: int, size: int | None = None) -> list[slice]:
    """Consecutive tokens, few at a time: a head's logits of one span fit into memory, and little of them is masked."""
    size = size or _SPAN
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of a record's heads in one block, in the dtype of its inputs.

    Attributes:
        inputs: `[T, E]`, what keys and values are made of.
        plain: `[H, T, D]`, queries as they are projected.
        nope: `[H, T, N]`, the nope part of queries.
        rope: `[H, T, P]`, their rope part, rotated.
        kept_nope: `[G, T, N]`, keys, or what a latent keeps in their place (see `lift`).
        kept_rope: `[G, T, P]`, rotated.
        lift: `[H, N', N]` from a head's nope queries to what is kept (MLA), or None.
        rotation: Rotates rows `[…, T, P]` by their positions.
        scale: Of the logits.
        scoring: What becomes of logits.
        sinks: `[H]`, as of `Attention`, or None.
    """

    inputs: torch.Tensor
    plain: torch.Tensor
    nope: torch.Tensor
    rope: torch.Tensor
    kept_nope: torch.Tensor
    kept_rope: torch.Tensor
    lift: torch.Tensor | None
    rotation: Rotation
    scale: float
    scoring: Scoring = PLAIN
    sinks: torch.Tensor | None = None

    @property
    def slopes(self) -> torch.Tensor | None:
        """`[H]`, ALiBi's, or None."""
        return None if self.scoring.slopes is None else self.inputs.new_tensor(self.scoring.slopes)

    @property
    def queries(self) -> torch.Tensor:
        """`[H, T, N' + P]`, what meets `keys`; with ALiBi, one more dim that holds the slope."""
        queries = joined(self.nope, self.rope)
        if self.slopes is None:
            return queries
        return torch.cat((queries, (self.slopes / self.scale)[:, None, None].expand(*queries.shape[:2], 1)), -1)

    @property
    def keys(self) -> torch.Tensor:
        """`[G, T, N' + P]`, or one for each head where queries are lifted; with ALiBi, one more dim that holds the position."""
        nope = self.kept_nope if self.lift is None else self.kept_nope @ self.lift.mT
        keys = joined(nope, self.kept_rope)
        return keys if self.slopes is None else torch.cat((keys, self._positions[:, None].expand(len(keys), -1, 1)), -1)

    @property
    def _positions(self) -> torch.Tensor:
        return torch.arange(len(self.inputs), device=self.inputs.device, dtype=self.inputs.dtype)

    def part(self, heads: slice) -> Heads:
        """Some of the heads, with a G of their number, or of one where all heads share what is kept."""
        count = len(self.plain)
        return replace(
            self,
            plain=self.plain[heads],
            nope=self.nope[heads],
            rope=self.rope[heads],
            kept_nope=shared(self.kept_nope, heads, count),
            kept_rope=shared(self.kept_rope, heads, count),
            lift=None if self.lift is None else self.lift[heads],
            scoring=self.scoring.of(heads),
            sinks=None if self.sinks is None else self.sinks[heads],
        )

    def kept(self, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys that a head's queries meet: `[T, N]` nope and `[T, P]` rope."""
        group = head * len(self.kept_nope) // len(self.plain)
        return self.kept_nope[group], self.kept_rope[group]

    def logits(self, head: int, tokens: slice = slice(None)) -> torch.Tensor:
        """`[t, s]`, of t consecutive tokens for all s up to the last of them; those of the future among these included."""
        nope, rope = (rows[: tokens.stop] for rows in self.kept(head))
        to_kept = [] if self.lift is None else [self.lift[head]]
        of_nope = multi_dot([self.nope[head, tokens], *to_kept, nope.mT])
        logits = self.scale * (of_nope + self.rope[head, tokens] @ rope.mT)
        return logits if self.slopes is None else logits + self.slopes[head] * self._positions[: tokens.stop]

    def probabilities(self, logits: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Attention `[H, t, s]` of such logits of all heads, for the last t among s tokens, or for `tokens [t]`."""
        return self.scoring.probabilities(logits, tokens, self.sinks)

    def attention_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[H, t, T]`, the attention of some tokens `[t]`."""
        queries, keys = self.scale * self.queries[:, tokens], self.keys
        return self.probabilities(queries @ keys.repeat_interleave(len(queries) // len(keys), 0).mT, tokens)

    def attention(self, head: int, tokens: slice = slice(None)) -> torch.Tensor:
        """`[t, s]`, the attention of one head that its `logits` make."""
        return self.scoring.probabilities(self.logits(head, tokens), None, None if self.sinks is None else self.sinks[head])


@dataclass(frozen=True)
class Jacobian:
    """The derivative of what is between projected heads and their logits: RoPE, and a QK-norm or none. It is linear.

    Attributes:
        rotation: Rotates rows by their positions.
        norm: The derivative of the norm, or None.
        after_rotary: Whether the norm follows RoPE.
    """

    rotation: Rotation
    norm: LinearisedNorm | None = None
    after_rotary: bool = False

    @classmethod
    def at(cls, states: torch.Tensor, norm: QKNorm | None, rotation: Rotation) -> Jacobian:
        """At projected `states [heads, T, D]`."""
        if norm is None:
            return cls(rotation)
        return cls(rotation, norm.linearised(rotation(states) if norm.form.after_rotary else states), norm.form.after_rotary)

    @classmethod
    def of_queries(cls, record: Record, heads: Heads) -> Jacobian:
        """Of the queries that a record's heads have in a block, by `heads.plain`."""
        return cls.at(heads.plain, record.q_norm if isinstance(record, Attention) else None, heads.rotation)

    @classmethod
    def of_keys(cls, record: Record, heads: Heads) -> Jacobian:
        """Of the keys that a record's KV heads have in a block, by what is projected; of a latent, of its RoPE key."""
        if isinstance(record, FactoredAttention) or record.k_norm is None:
            return cls(heads.rotation)
        return cls.at(_project(heads.inputs, record.k, record.k_bias), record.k_norm, heads.rotation)

    def __call__(self, change: torch.Tensor) -> torch.Tensor:
        """Of changes `[heads, T, D]` of projected heads."""
        if self.norm is None:
            return self.rotation(change)
        return self.norm(self.rotation(change)) if self.after_rotary else self.rotation(self.norm(change))

    def adjoint(self, pull: torch.Tensor) -> torch.Tensor:
        """The adjoint of that."""
        back = self.rotation.adjoint
        if self.norm is None:
            return back(pull)
        return back(self.norm.adjoint(pull)) if self.after_rotary else self.norm.adjoint(back(pull))

    def of(self, tokens: slice | torch.Tensor) -> Jacobian:
        """At some of the tokens."""
        return replace(self, rotation=self.rotation.of(tokens), norm=None if self.norm is None else self.norm.of(tokens))

    def part(self, heads: slice) -> Jacobian:
        """For some of the heads."""
        return self if self.norm is None else replace(self, norm=self.norm.part(heads))


def joined(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """`[h, T, N + P]` of `[h, T, N]` and `[h or 1, T, P]`; where there is but one part, that part and no copy."""
    if not nope.shape[-1]:
        return rope
    return torch.cat((nope, rope.expand(len(nope), -1, -1)), -1) if rope.shape[-1] else nope


def shared(rows: torch.Tensor, heads: slice, count: int) -> torch.Tensor:
    """`[h, …]`: of groups' `rows [G, …]` those of some of `count` heads; `[1, …]` where there is but one group."""
    if len(rows) in (1, count):
        return rows if len(rows) == 1 else rows[heads]
    return rows[[head * len(rows) // count for head in range(count)[heads]]]


def heads_of(record: Record, block: Block) -> Heads:
    """Make the queries and keys of a record's heads in one block."""
    rotation = (record.rotary or no_rotary()).rotation(torch.tensor(block.positions, device=block.x.device), block.x.dtype)
    of_queries = x = block.x
    if record.projections is not None:
        of_queries, x = (part[0] for part in record.projections(x[None]))
    if isinstance(record, FactoredAttention):
        if record.q_down is not None:
            of_queries = of_queries @ record.q_down.to(x.dtype).T
        plain = nope = _project(of_queries, record.q_nope, record.q_nope_bias)
        rope = rotation(_project(of_queries, record.q_rope, record.q_rope_bias))
        key_bias = None if record.k_rope_bias is None else record.k_rope_bias[None]
        kept_nope, kept_rope = record.latent(x)[None], rotation(_project(x, record.k_rope[None], key_bias))
        if (form := record.rounding) is not None:
            kept_nope, kept_rope = rounded(kept_nope, form, "latent"), rounded(kept_rope, form, "rope")
        lift = record.up_k.to(x.dtype)
    else:
        plain, keys = _project(of_queries, record.q, record.q_bias), _project(x, record.k, record.k_bias)
        queries, keys = _encoded(plain, record.q_norm, rotation), _encoded(keys, record.k_norm, rotation)
        if record.rounding is not None:
            keys = rounded(keys, record.rounding, "keys")
        split = record.rotary.dims if record.rotary else 0
        rope, nope = queries[..., :split], queries[..., split:]
        kept_rope, kept_nope = keys[..., :split], keys[..., split:]
        lift = None
    sinks = record.sinks.to(x.dtype) if isinstance(record, Attention) and record.sinks is not None else None
    return Heads(x, plain, nope, rope, kept_nope, kept_rope, lift, rotation, record.scale, record.scoring, sinks)


def values_of(record: Record, heads: Heads) -> torch.Tensor:
    """`[G, T, D]` of one block, or one for each head of a latent."""
    if isinstance(record, FactoredAttention):
        return _project(heads.kept_nope[0], record.up_v, None)
    values = _project(heads.inputs, record.v, record.v_bias)
    return values if record.rounding is None else rounded(values, record.rounding, "values")


def widened(values: torch.Tensor, width: int) -> torch.Tensor:
    """`values [..., Dv]` with zeros appended up to `width`; wider values stay as they are.

    With values as wide as keys, torch's SDPA on a CPU does without the `[H, T, S]` probabilities.
    """
    return torch.nn.functional.pad(values, (0, max(0, width - values.shape[-1])))


def output_of(record: Record, block: Block) -> torch.Tensor:
    """Causal attention of one block, `[T, E]`, in the dtype of its inputs."""
    heads = heads_of(record, block)
    out = _read(heads, values_of(record, heads)).transpose(0, 1).flatten(1)
    out = out @ record.o.to(out.dtype).flatten(1).T
    return out if record.o_bias is None else out + record.o_bias.to(out.dtype)


def output_at(record: Record, block: Block, tokens: torch.Tensor) -> torch.Tensor:
    """`[t, E]`, the output of some tokens `[t]` of a block, fp32."""
    heads = heads_of(record, block.float())
    values, attention = values_of(record, heads), heads.attention_of(tokens)
    read = attention @ values.repeat_interleave(len(attention) // len(values), 0)
    out = torch.einsum("htd,ehd->te", read, record.o.float())
    return out if record.o_bias is None else out + record.o_bias.float()


def _read(heads: Heads, values: torch.Tensor) -> torch.Tensor:
    """The values that heads read, `[H, T, D]`, of `values [G, T, D]`, or of one for each head."""
    repeats, tokens = len(heads.plain) // len(values), len(heads.inputs)
    values = values.repeat_interleave(repeats, 0)
    if heads.scoring.softcap is not None or heads.sinks is not None:
        read = ([heads.attention(h, span) @ rows[: span.stop] for span in spans(tokens)] for h, rows in enumerate(values))
        return torch.stack([torch.cat(parts_of_head) for parts_of_head in read])  # torch has no function for that
    queries, keys, dims, window = heads.queries, heads.keys, values.shape[-1], heads.scoring.window
    keys, values = keys.repeat_interleave(len(queries) // len(keys), 0), widened(values, keys.shape[-1])
    if window is None or window >= tokens:
        return _attend(queries, keys, values, None, heads.scale)[..., :dims]
    parts = []
    for span in spans(tokens):
        first = max(0, span.start + 1 - window)
        distance = torch.arange(span.start, span.stop)[:, None] - torch.arange(first, span.stop)
        seen = ((distance >= 0) & (distance < window)).to(values.device)
        parts.append(_attend(queries[:, span], keys[:, first : span.stop], values[:, first : span.stop], seen, heads.scale))
    return torch.cat(parts, 1)[..., :dims]


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """`[H, t, D]`, of the tokens that a mask `[t, s]` shows, or of those up to each query's own."""
    return torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=seen, is_causal=seen is None, scale=scale
    )[0]


def _project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[heads, T, D]` of inputs `[T, E]`, or of those of each head, `[heads, T, E]`."""
    if x.ndim == 3:
        states = x @ weight.to(x.dtype).mT
    else:
        states = (x @ weight.to(x.dtype).flatten(0, 1).T).unflatten(-1, weight.shape[:2]).transpose(0, 1)
    return states if bias is None else states + bias.to(x.dtype)[:, None]


def _encoded(states: torch.Tensor, norm: QKNorm | None, rotation: Rotation) -> torch.Tensor:
    """Projected `states [heads, T, D]` as logits read them: normalised, if they are, and rotated."""
    if norm is None:
        return rotation(states)
    return norm(rotation(states)[None])[0] if norm.form.after_rotary else rotation(norm(states[None])[0])
