"""The published way to merge KV heads, as a baseline: heads are turned towards each other and averaged, and nothing is fitted.

Orthogonal Procrustes (arXiv 2412.20677). Of each group, keys are turned by a phase per rotary pair, with which RoPE commutes,
and values by an orthogonal matrix, each towards the group's mean; queries and the output projection turn back. Behind a
QK-norm, phases pass where both dims of a pair have one gain.
"""

from dataclasses import replace

import torch

from attention.record import Attention
from convert.methods.algebra import augmented
from convert.methods.grouped import GroupedMethod, merged_norm
from convert.methods.statistics import Statistics
from convert.methods.text import TextUse

_ROUNDS = 20  # of the generalised problem: turn all towards the mean, then take the mean again


def merge(attention: Attention, groups: int, statistics: Statistics) -> Attention:
    """The means of turned heads, and the queries and output columns that turn back; fp32."""
    a, second = attention, statistics.with_constant
    repeats = len(a.q) // a.num_kv_heads
    queries, keys, values = (augmented(*part) for part in ((a.q, a.q_bias), (a.k, a.k_bias), (a.v, a.v_bias)))
    value, turns = _turned(values.unflatten(0, (groups, -1)), second)
    if a.rotary is None:
        key, of_keys = _turned(keys.unflatten(0, (groups, -1)), second)
        q, k = of_keys.flatten(0, 1).repeat_interleave(repeats, 0) @ queries, key
    else:
        assert a.rotary.dims == keys.shape[1], "all dims rotate"
        numbers, phases = _in_phase(a.rotary.to_complex(keys)[0].unflatten(0, (groups, -1)), second)
        every = phases.flatten(0, 1).repeat_interleave(repeats, 0)
        q, k = a.rotary.from_complex(every * a.rotary.to_complex(queries)[0]), a.rotary.from_complex(numbers)
    q, k, v, back = q.float(), k.float(), value.float(), turns.flatten(0, 1).repeat_interleave(repeats, 0)
    return replace(
        a,
        q=q[..., :-1],
        k=k[..., :-1],
        v=v[..., :-1],
        o=torch.einsum("ehd,hcd->ehc", a.o.double(), back).float(),
        q_bias=None if a.q_bias is None else q[..., -1],
        k_bias=None if a.k_bias is None else k[..., -1],
        v_bias=None if a.v_bias is None else v[..., -1],
        k_norm=merged_norm(a.k_norm, lambda rows: rows.float().unflatten(0, (groups, -1)).mean(1)),
    )


def _in_phase(z: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of complex heads `[groups, n, L, E + 1]` their means `[groups, L, E + 1]` and phases `[groups, n, L, 1]`."""
    phases = torch.ones_like(z[..., :1])
    for _ in range(_ROUNDS):
        mean = (phases * z).mean(1, keepdim=True)
        inner = ((mean @ second.to(mean)) * z.conj()).sum(-1, keepdim=True)
        phases = inner / inner.abs().clamp_min(1e-30)
    return (phases * z).mean(1), phases


def _turned(rows: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of heads `[groups, n, D, E + 1]` their means `[groups, D, E + 1]` and orthogonal matrices `[groups, n, D, D]`."""
    turns = torch.eye(rows.shape[2]).to(rows).expand(*rows.shape[:3], -1)
    for _ in range(_ROUNDS):
        left, _, right = torch.linalg.svd((turns @ rows).mean(1, keepdim=True) @ second @ rows.mT)
        turns = left @ right
    return (turns @ rows).mean(1), turns


METHOD = GroupedMethod("procrustes", "heads turned and averaged", "arXiv:2412.20677", TextUse.USED, merge)
