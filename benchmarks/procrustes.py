"""The published way to merge KV heads, as a baseline: heads are turned towards each other and averaged, and nothing is fitted.

Orthogonal Procrustes (arXiv 2412.20677). Of each group, keys are turned by a phase per rotary pair, with which RoPE commutes,
and values by an orthogonal matrix, each towards the group's mean; queries and the output projection turn back. Behind a
QK-norm, phases pass where both dims of a pair have one gain.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.record import Attention
from convert.methods.algebra import augmented
from convert.methods.grouped import Draw, GroupedMethod, merged_norm
from convert.methods.statistics import Statistics
from convert.methods.text import TextUse

_ROUNDS = 20  # of the generalised problem: turn all towards the mean, then take the mean again


def merge(attention: Attention, groups: int, draw: Draw, statistics: Statistics) -> Attention:
    """The means of turned heads, and the queries and output columns that turn back; fp32."""
    a, rotary, second = attention, attention.rotary, statistics.with_constant
    assert rotary is not None
    assert rotary.dims == a.k.shape[1], "all dims rotate"
    share = len(a.q) // a.num_kv_heads
    z = rotary.to_complex(augmented(a.k, a.k_bias))[0].unflatten(0, (groups, -1))  # [groups, n, L, E + 1]
    v = augmented(a.v, a.v_bias).unflatten(0, (groups, -1))  # [groups, n, D, E + 1]
    phases, turns = torch.ones_like(z[..., :1]), torch.eye(v.shape[2]).to(v).expand(*v.shape[:3], -1)
    for _ in range(_ROUNDS):
        key, value = (phases * z).mean(1, keepdim=True), (turns @ v).mean(1, keepdim=True)
        inner = ((key @ second.to(key)) * z.conj()).sum(-1, keepdim=True)
        phases = inner / inner.abs().clamp_min(1e-30)
        left, _, right = torch.linalg.svd(value @ second @ v.mT)
        turns = left @ right
    key, value = (phases * z).mean(1), (turns @ v).mean(1)
    every = phases.flatten(0, 1).repeat_interleave(share, 0)
    q = rotary.from_complex(every * rotary.to_complex(augmented(a.q, a.q_bias))[0]).float()
    k, v = rotary.from_complex(key).float(), value.float()
    back = turns.flatten(0, 1).repeat_interleave(share, 0)
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


METHOD = GroupedMethod("procrustes", "heads turned and averaged", "arXiv:2412.20677", TextUse.USED, merge)
