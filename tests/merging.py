"""What tests of methods that merge KV heads share: records without positions or with, and copies of heads."""

import dataclasses

import torch

from attention.qk_norm import NormForm, QKNorm
from attention.record import Attention
from attention.rope import Rotary
from convert.methods import load_grouped
from convert.methods.statistics import Statistics


def record(
    heads: int = 8, groups: int = 4, norm: str | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Attention:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def key_norm(count: int) -> QKNorm:
        rows = 1 if norm == "shared" else count
        return QKNorm(NormForm("rms", "all" if norm == "all" else "head", rows > 1, True, 1e-6), draw(rows, 6), draw(rows, 6))

    return Attention(
        q=draw(heads, 6, 10), k=draw(groups, 6, 10), v=draw(groups, 6, 10), o=draw(10, heads, 6), scale=0.4,
        q_bias=draw(heads, 6), k_bias=draw(groups, 6), v_bias=draw(groups, 6), o_bias=draw(10),
        q_norm=key_norm(heads) if norm else None, k_norm=key_norm(groups) if norm else None,
    )  # fmt: skip


def repeated(a: Attention, times: int) -> Attention:
    """The same function with every KV head `times` times over."""
    rows = {name: getattr(a, name).repeat_interleave(times, 0) for name in ("k", "v", "k_bias", "v_bias")}
    norm = a.k_norm
    if norm and norm.per_head_gains:
        norm = dataclasses.replace(norm, gain=norm.gain.repeat_interleave(times, 0), bias=norm.bias.repeat_interleave(times, 0))
    return dataclasses.replace(a, **rows, k_norm=norm)


def merge(method: str, a: Attention, groups: int, statistics: Statistics | None = None) -> Attention:
    return load_grouped(method).merge(a, groups, statistics or Statistics.assumed(a.q.shape[2]))


def with_rope(a: Attention, pairs: int = 2, pairing: str = "half", factor: float = 1.0) -> Attention:
    frequencies = 10.0 ** -torch.arange(pairs, dtype=torch.float64)
    return dataclasses.replace(a, rotary=Rotary(frequencies, pairing, factor))  # type: ignore[arg-type]


def disguised(a: Attention, times: int, seed: int = 0) -> Attention:
    """The function of `a` with every KV head `times` times over, each copy in a basis of its own.

    Keys of a copy are multiplied by a complex number per frequency and by an invertible matrix where they do not turn,
    queries by what undoes that; values and outputs by a matrix and its inverse.
    """
    generator = torch.Generator().manual_seed(seed)
    many = repeated(a, times)
    wide = {field.name: getattr(many, field.name) for field in dataclasses.fields(many)}
    many = dataclasses.replace(many, **{name: t.double() for name, t in wide.items() if isinstance(t, torch.Tensor)})
    share, dims = many.q.shape[0] // many.k.shape[0], a.rotary.dims
    nope = many.k.shape[1] - dims

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads = many.k.shape[0]
    number = torch.complex(draw(heads, dims // 2), draw(heads, dims // 2))
    plain, value = draw(heads, nope, nope) + 3 * torch.eye(nope), draw(heads, 6, 6) + 3 * torch.eye(6)

    def rows(t: torch.Tensor, factor: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        z, rest = a.rotary.to_complex(t)  # type: ignore[union-attr]
        return a.rotary.from_complex(z * factor[..., None], matrix @ rest)  # type: ignore[union-attr]

    def biased(t: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.cat((t, bias[..., None]), -1)

    k = rows(biased(many.k, many.k_bias), number, plain)
    undo = (1 / number).conj().repeat_interleave(share, 0), plain.inverse().mT.repeat_interleave(share, 0)
    q = rows(biased(many.q, many.q_bias), *undo)
    v = value @ biased(many.v, many.v_bias)
    o = torch.einsum("ehd,hdc->ehc", many.o, value.inverse().repeat_interleave(share, 0))
    return dataclasses.replace(
        many, q=q[..., :-1], q_bias=q[..., -1], k=k[..., :-1], k_bias=k[..., -1], v=v[..., :-1], v_bias=v[..., -1], o=o
    )
