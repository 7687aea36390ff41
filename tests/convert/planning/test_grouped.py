"""`convert gqa` and `mqa`: groups that do not fit, and what a plan says of merges that are not exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from written import ok, refused

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]


def test_a_merge_that_cannot_be_exact_says_so(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    result = convert("gqa", checkpoint("cohere", use_qk_norm=True), tmp_path / "out", "--groups", 2, "--dry-run")
    assert "inexact: keys are normalised with gains per head" in result.stdout


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (3, "cannot make 3 groups from 8 KV heads: 3 does not divide 8 (choose 1, 2, 4 or 8)"),
        (16, "cannot make 16 groups from 8 KV heads: it must be between 1 and 8 (choose 1, 2, 4 or 8)"),
        (0, "cannot make 0 groups"),
    ],
)
def test_groups_that_do_not_fit(groups: int, message: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    refused(convert("gqa", checkpoint(num_key_value_heads=8), tmp_path / "out", "--groups", groups), 2, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", [[], ["--method", "mean", "--refit"]], ids=str)
def test_a_plan_says_that_normalised_queries_are_not_refitted(
    way: list[Any], checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path
) -> None:
    command = ["gqa", checkpoint("qwen3"), tmp_path / "out", "--groups", 2, "--dry-run", *on, *way]
    note = "queries are not refitted, outputs are: they are normalised after their projection"
    assert note in ok(convert(*command)).stdout.splitlines()
    command[1] = checkpoint("qwen2", name="other")
    assert "not refitted" not in ok(convert(*command)).stdout


def test_a_method_that_cannot_tell_similar_heads_is_refused(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    command = ["gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--method", "mean"]
    result = convert(*command, "--grouping", "similar")
    assert result.exit_code == 2
    assert "method mean does not say which heads are similar" in result.stderr
    assert "use --method aligned for that" in result.stderr
    assert convert(*command, "--grouping", "alike").exit_code == 2
