"""The records that pass between families, methods and hosts: one layer's attention before and after its conversion.

Letters as in `attention`: E model width, H query heads, G KV heads, D head dim, R latent rank, P rotary dims of MLA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attention.formats import Format
from attention.qk_norm import QKNorm
from attention.rope import Pairing, Rotary

if TYPE_CHECKING:
    import torch

_TINY = 1e-30  # an input of zeros has a latent of zeros, and so has its class


@dataclass(frozen=True)
class Scoring:
    """How one layer turns scaled logits into attention, besides that no token sees a later one.

    Attributes:
        slopes: H numbers, or None: a head's slope, times the position of the key, is added to its scaled logits (ALiBi, arXiv
            2108.12409; less the position of the query, which cancels in the softmax).
        window: How many tokens a token sees, itself included; None for all before it.
        softcap: c, or None: logits l become c tanh(l / c) (Gemma 2, arXiv 2408.00118).
    """

    slopes: tuple[float, ...] | None = None
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and self.slopes is not None:
            raise ValueError("no class caps logits with ALiBi: whether slopes come before the cap is not known")

    def of(self, heads: slice) -> Scoring:
        """The same for some of the heads."""
        return self if self.slopes is None else replace(self, slopes=self.slopes[heads])

    def probabilities(
        self, logits: torch.Tensor, tokens: torch.Tensor | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention `[…, t, s]`; rows sum to one, or to less with sinks.

        Args:
            logits: `[…, t, s]`, scaled, with what slopes add, for tokens 0 … s − 1.
            tokens: `[t]`, the positions of the queries; None for the last t.
            sinks: `[…]`, a further logit of each head, of which nothing is read; None without.
        """
        import torch

        queries, keys = logits.shape[-2:]
        slots = torch.arange(keys, device=logits.device)
        position = (slots[keys - queries :] if tokens is None else tokens)[:, None]
        hidden = slots > position
        if self.window is not None:
            hidden |= slots <= position - self.window
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        logits = logits.masked_fill(hidden, -torch.inf)
        if sinks is None:
            return logits.softmax(-1)
        return torch.cat((logits, sinks[..., None, None].expand(*logits.shape[:-1], 1)), -1).softmax(-1)[..., :-1]


PLAIN = Scoring()


@dataclass(frozen=True)
class HeadProjections:
    """The queries, keys and values of a source with QK-norm or a clamp, which the rest of a record reads in place of its input.

    Nothing can be mixed across these. Behind them, keys are linear again, up to RoPE: a latent is made of these keys and the
    values, and each head's queries are mapped by themselves.

    Attributes:
        source: Has their weights, biases, and QK-norm before RoPE; nothing else of it is read.
        clip: All three are clamped to ±clip, queries and keys behind their norms; None without a clamp.
    """

    source: Attention
    clip: float | None = None

    @property
    def width(self) -> int:
        """E."""
        return self.source.k.shape[-1]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of inputs `x [B, T, E]`: queries `[B, H, T, D]`, and keys and values side by side, `[B, T, 2 G D]`."""
        import torch

        a = self.source
        parts = (a.q, a.q_bias, a.q_norm), (a.k, a.k_bias, a.k_norm), (a.v, a.v_bias, None)
        queries, keys, values = (self._behind(_projected(x, weight, bias), norm) for weight, bias, norm in parts)
        return queries, torch.cat(tuple(states.transpose(1, 2).flatten(2) for states in (keys, values)), -1)

    def _behind(self, states: torch.Tensor, norm: QKNorm | None) -> torch.Tensor:
        states = norm(states) if norm else states
        return states if self.clip is None else states.clamp(-self.clip, self.clip)


@dataclass(frozen=True)
class Attention:
    """One layer's attention, independent of its checkpoint's layout. Tensors keep the checkpoint's dtype.

    Attributes:
        q: `[H, D, E]`; query head h reads KV head h // (H / G).
        k: `[G, D, E]`.
        v: `[G, D, E]`.
        o: `[E, H, D]`.
        scale: What logits are multiplied by before the softmax.
        rotary: How queries and keys rotate with position, or None in a layer without positions.
        q_bias: `[H, D]` or None.
        k_bias: `[G, D]` or None.
        v_bias: `[G, D]` or None.
        o_bias: `[E]` or None.
        q_norm: QK-norm of the queries, or None.
        k_norm: QK-norm of the keys, or None.
        projections: What is read in place of the input, or None. E is then D for `q`, each head of which reads its own
            queries, and 2 G D for `k` and `v`, which read keys and values side by side.
        scoring: What becomes of scaled logits: ALiBi, a window, a cap.
        rounding: The format that its keys and values are cached in; None for no rounding.
        sinks: `[H]`, a logit of each head that takes part in every softmax and has no value; None without.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    scale: float
    rotary: Rotary | None = None
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: QKNorm | None = None
    k_norm: QKNorm | None = None
    projections: HeadProjections | None = None
    scoring: Scoring = PLAIN
    rounding: Format | None = None
    sinks: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[0]

    def with_queries_times(self, factor: float) -> Attention:
        """The same with all queries multiplied."""
        bias = None if self.q_bias is None else self.q_bias * factor
        return replace(self, q=self.q * factor, q_bias=bias)

    def paired(self, pairing: Pairing) -> Attention:
        """The same function with its rotary pairs as `pairing` has them; rows of queries and keys change places."""
        if self.rotary is None or self.rotary.pairing == pairing:
            return self
        assert self.q_norm is None, "gains of a norm would change places, too"
        assert self.k_norm is None
        parts = {name: getattr(self, name) for name in ("q", "k", "q_bias", "k_bias")}
        moved: dict[str, Any] = {name: self.rotary.paired(rows, pairing) for name, rows in parts.items() if rows is not None}
        return replace(self, **moved, rotary=replace(self.rotary, pairing=pairing))

    def on_projected_inputs(self, clip: float | None = None) -> Attention:
        """The same function, without norms of its own: it reads `projections` that have them. Without QK-norm, itself.

        Args:
            clip: What the source also clamps queries, keys and values to, or None; these `projections` then do so.
        """
        import torch

        if self.projections is not None or (self.k_norm is None and clip is None):
            return self
        assert self.k_norm is None or not self.k_norm.form.after_rotary, "a norm behind RoPE"
        heads, dim, groups = *self.q.shape[:2], self.num_kv_heads
        device, dtype = self.k.device, torch.promote_types(self.k.dtype, torch.float32)
        one = torch.eye(2 * groups * dim, device=device, dtype=dtype).unflatten(0, (2 * groups, dim))
        source = HeadProjections(self, clip)
        whole = torch.eye(dim, device=device, dtype=dtype).expand(heads, -1, -1)
        done: dict[str, Any] = dict.fromkeys(("q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "rounding"))
        return replace(self, q=whole, k=one[:groups], v=one[groups:], projections=source, **done)


@dataclass(frozen=True)
class FactoredAttention:
    """One layer's multi-head latent attention, which scores and reads a latent of each token (DeepSeek-V2, arXiv 2405.04434).

    Attributes:
        q_nope: `[H, N, E]`, queries for the nope keys.
        q_rope: `[H, P, E]`, queries for the rope key.
        k_rope: `[P, E]`, the rope key of all heads.
        down: `[R, E]`, makes the latent of a token; R does not count channels that the output class adds.
        up_k: `[H, N, R]`.
        up_v: `[H, D, R]`.
        o: `[E, H, D]`.
        scale: What logits are multiplied by before the softmax.
        rotary: How the P dims rotate with position.
        q_nope_bias: `[H, N]` or None.
        q_rope_bias: `[H, P]` or None.
        k_rope_bias: `[P]` or None.
        o_bias: `[E]` or None.
        projections: As in `Attention`: E is then D for queries, and 2 G D for `k_rope` and `down`.
        scoring: As in `Attention`.
        q_down: `[Q, E]`, makes a latent that queries read in place of the input: E is then Q for `q_nope` and `q_rope`. None
            without one.
        normalised: Whether the latent is divided by its norm, which is nearly one.
        rounding: The format of the cached latent and RoPE key, whose pairs are then in halves; None for no rounding.
        gain: `[R]`, what a normalised latent is multiplied by; None for ones.
    """

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    k_rope: torch.Tensor
    down: torch.Tensor
    up_k: torch.Tensor
    up_v: torch.Tensor
    o: torch.Tensor
    scale: float
    rotary: Rotary
    q_nope_bias: torch.Tensor | None = None
    q_rope_bias: torch.Tensor | None = None
    k_rope_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    projections: HeadProjections | None = None
    scoring: Scoring = PLAIN
    q_down: torch.Tensor | None = None
    normalised: bool = False
    rounding: Format | None = None
    gain: torch.Tensor | None = None

    def latent(self, x: torch.Tensor) -> torch.Tensor:
        """The latent `[…, T, R]` of inputs `[…, T, E]`, in their dtype."""
        latent = x @ self.down.to(x.dtype).T
        latent = latent / latent.norm(dim=-1, keepdim=True).clamp_min(_TINY) if self.normalised else latent
        return latent if self.gain is None else latent * self.gain.to(x.dtype)

    def paired(self, pairing: Pairing) -> FactoredAttention:
        """As in `Attention`, of the RoPE key and its queries."""
        rotary = self.rotary
        if rotary.pairing == pairing or not rotary.dims:
            return self
        key = {name: getattr(self, name) for name in ("k_rope", "k_rope_bias")}
        queries = {name: getattr(self, name) for name in ("q_rope", "q_rope_bias")}
        moved: dict[str, Any] = {name: rotary.paired(rows[None], pairing)[0] for name, rows in key.items() if rows is not None}
        moved |= {name: rotary.paired(rows, pairing) for name, rows in queries.items() if rows is not None}
        return replace(self, **moved, rotary=replace(rotary, pairing=pairing))


def _projected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[B, heads, T, D]`, in the dtype of x."""
    states = (x @ weight.to(x.dtype).flatten(0, 1).mT).unflatten(-1, weight.shape[:2]).transpose(1, 2)
    return states if bias is None else states + bias.to(x.dtype)[:, None]


Record = Attention | FactoredAttention
