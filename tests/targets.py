"""Targets of a small model with four KV heads."""

from __future__ import annotations

from typing import Any

from attention.spec import AttentionSpec
from convert.hosts import deepseek_v3, source_class
from convert.methods import load_grouped, load_latent
from convert.planning.targets import GroupedTarget, LatentTarget

MHA = AttentionSpec(2, 8, 4, 6)


def grouped(groups: int = 2, method: str = "mean", **options: Any) -> GroupedTarget:
    return GroupedTarget("gqa", options, MHA, MHA.grouped(groups), load_grouped(method), source_class.HOST)


def latent(before: AttentionSpec = MHA, rank: int = 16, rope: int = 4, channels: int = 15, **changes: Any) -> LatentTarget:
    return LatentTarget(before, before.latent(rank, rope), load_latent("svd"), deepseek_v3.HOST, channels, **changes)
