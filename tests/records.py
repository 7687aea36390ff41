"""Random records of one layer, inputs for them, and what they compute by the naive reference."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from attention.forward import Block
from attention.qk_norm import NormForm, QKNorm
from attention.record import Attention, FactoredAttention, HeadProjections, Record, Scoring
from attention.reference import grouped_attention, latent_attention
from attention.rope import Pairing, Rotary
from convert.methods import load_latent
from convert.methods.blocks import Blocks
from convert.methods.latent import Allocation
from convert.methods.statistics import Attended, Statistics
from convert.methods.svd import losses

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def record(
    groups: int = 2,
    share: int = 2,
    pairs: int = 3,
    nope: int = 0,
    width: int = 20,
    pairing: Pairing = "half",
    biased: bool = True,
    factor: float = 1.0,
    seed: int = 0,
    norm: str | None = None,
    alibi: bool = False,
    sinks: bool = False,
) -> Attention:
    """Grouped attention; without pairs nothing has RoPE. With `alibi`, its heads have different slopes, with `sinks`, sinks.

    `norm` is of queries and keys: "shared", "head", "all", "after", or "layer", which has a bias.
    """
    heads, dim = groups * share, 2 * pairs + nope
    shapes = {"q": (heads, dim, width), "k": (groups, dim, width), "v": (groups, dim, width), "o": (width, heads, dim)}
    biases = {"q_bias": (heads, dim), "k_bias": (groups, dim), "v_bias": (groups, dim), "o_bias": (width,)}
    drawn: dict[str, Any] = {
        name: random(*shape, seed=seed * 10 + i) * width**-0.5 for i, (name, shape) in enumerate(shapes.items())
    }
    if biased:
        drawn |= {name: random(*shape, seed=seed * 10 + 5 + i) for i, (name, shape) in enumerate(biases.items())}
    frequencies = 1.3 * 0.4 ** torch.arange(pairs, dtype=torch.float64)
    if norm:
        for name, count in (("q_norm", heads), ("k_norm", groups)):
            rows, layer = 1 if norm in ("shared", "after") else count, norm == "layer"
            scope, gain = "all" if norm == "all" else "head", random(rows, dim, seed=seed + 90)
            bias = random(rows, dim, seed=seed + 91) if layer else None
            kind: Any = "layer" if layer else "rms"
            form = NormForm(kind, scope, rows > 1, layer, 1e-6, after_rotary=norm == "after")  # type: ignore[arg-type]
            drawn[name] = QKNorm(form, gain, bias)
    scoring = Scoring(tuple(0.6**head for head in range(heads)) if alibi else None)
    drawn |= {"sinks": 1 + random(heads, seed=seed + 95)} if sinks else {}
    return Attention(**drawn, scale=0.4, rotary=Rotary(frequencies, pairing, factor) if pairs else None, scoring=scoring)


def factored(
    heads: int = 4,
    dim: int = 6,
    pairs: int = 2,
    rank: int = 9,
    width: int = 20,
    biased: bool = True,
    seed: int = 0,
    pairing: Pairing = "interleaved",
    value: int | None = None,
) -> FactoredAttention:
    """Latent attention; values have `value` dims, or as many as nope keys."""
    rope, value = 2 * pairs, dim if value is None else value
    shapes = {
        "q_nope": (heads, dim, width), "q_rope": (heads, rope, width), "k_rope": (rope, width), "down": (rank, width),
        "up_k": (heads, dim, rank), "up_v": (heads, value, rank), "o": (width, heads, value),
    }  # fmt: skip
    biases = {"q_nope_bias": (heads, dim), "q_rope_bias": (heads, rope), "k_rope_bias": (rope,), "o_bias": (width,)}
    drawn = {name: random(*shape, seed=seed * 20 + i) * shape[-1] ** -0.5 for i, (name, shape) in enumerate(shapes.items())}
    if biased:
        drawn |= {name: random(*shape, seed=seed * 20 + 9 + i) for i, (name, shape) in enumerate(biases.items())}
    return FactoredAttention(**drawn, scale=0.4, rotary=Rotary(1.3 * 0.4 ** torch.arange(pairs, dtype=torch.float64), pairing))


def factored_behind_norms() -> FactoredAttention:
    """Latent attention that reads the normalised heads of `record(nope=2, norm="head")`."""
    a = record(nope=2, norm="head")
    (heads, dim, _), (groups, *_) = a.q.shape, a.k.shape
    queries, kept = (factored(heads, width=width, biased=False, value=dim) for width in (dim, 2 * groups * dim))
    projections = a.on_projected_inputs().projections
    return dataclasses.replace(kept, q_nope=queries.q_nope, q_rope=queries.q_rope, o=a.o, projections=projections)


def inputs(width: int, tokens: int = 24, seed: int = 7, blocks: int = 2) -> torch.Tensor:
    """`[blocks, T, E]`, anisotropic and off centre, as the inputs of real layers are."""
    mixing = torch.diag(torch.linspace(0.5, 2, width)) @ (torch.eye(width) + 0.2 * random(width, width, seed=seed))
    return random(blocks, tokens, width, seed=seed + 1) @ mixing + 0.5 * random(width, seed=seed + 2)


def block_of(x: torch.Tensor) -> Block:
    """A block `[T, E]` from position 0 on."""
    return Block(x, range(len(x)))


def blocks_of(x: Iterable[torch.Tensor]) -> list[Block]:
    return [block_of(one) for one in x]


def measured(x: torch.Tensor) -> Statistics:
    """What a survey would find of `x [n, T, E]`, but for where attention looks: everywhere."""
    rows = x.double().flatten(0, 1)
    second, mean = rows.T @ rows / len(rows), rows.mean(0)
    return Statistics(second, mean, len(rows), Attended.assumed(second, mean), Blocks.whole(x))


def measured_behind(projections: HeadProjections, x: torch.Tensor) -> Statistics:
    """The same of the keys and values that projections make of `x [n, T, E]`, and of their queries."""
    queries, both = projections(x)
    rows = torch.nn.functional.pad(queries.double(), (0, 1), value=1).transpose(0, 1).flatten(1, 2)
    return dataclasses.replace(measured(both), sample=Blocks.whole(x), queries=rows.mT @ rows / rows.shape[1])


def run(a: Record, x: torch.Tensor) -> torch.Tensor:
    """Its output by the naive reference, in fp64."""

    def doubled(part: Any) -> Any:
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        return dataclasses.replace(part, **{name: v.double() for name, v in fields.items() if isinstance(v, torch.Tensor)})

    if a.projections is not None:
        source = doubled(a.projections.source)
        a = dataclasses.replace(a, projections=dataclasses.replace(a.projections, source=source))
    a = doubled(a)
    return latent_attention(x.double(), a) if isinstance(a, FactoredAttention) else grouped_attention(x.double(), a)


def loss(a: Record, b: Record, x: torch.Tensor | None = None) -> float:
    """Distance of the outputs, relative to the first's."""
    x = inputs(a.o.shape[0]) if x is None else x
    before = run(a, x)
    return float((run(b, x) - before).norm() / before.norm())


def every_pair(a: Attention) -> tuple[int, ...]:
    return tuple(pair for pair in range(a.rotary.dims // 2) for _ in range(a.num_kv_heads))


def full_rank(a: Attention, pairs: tuple[int, ...]) -> int:
    return min(a.q.shape[2], 2 * a.k.shape[0] * a.k.shape[1] - 2 * len(pairs))


def factor(name: str, a: Attention, size: Allocation, x: torch.Tensor | None = None) -> FactoredAttention:
    """By a method, with the statistics of `x`."""
    return load_latent(name).factor(a, size, measured(inputs(a.q.shape[2]) if x is None else x))


def energies(a: Attention) -> torch.Tensor:
    """What `svd` allocates by."""
    return losses(a, Statistics.assumed(a.q.shape[2]))


def turned_copies(a: Attention) -> Attention:
    """Every KV head's key is the first one's, each frequency rotated by an angle and scaled by a factor of its own."""
    numbers, bias = a.rotary.to_complex(a.k)[0], a.rotary.to_complex(a.k_bias)[0]
    rotation = torch.complex(*random(2, a.num_kv_heads, numbers.shape[1], seed=3))
    k = a.rotary.from_complex(rotation[..., None] * numbers[:1])
    return dataclasses.replace(a, k=k, k_bias=a.rotary.from_complex(rotation * bias[:1]))


def unturning(a: FactoredAttention, share: int) -> torch.Tensor:
    """Unrotated keys and values as the latent gives them, one row per dim of each KV head."""
    return torch.cat((a.up_k[::share] @ a.down, a.up_v[::share] @ a.down)).flatten(0, 1).double()
