"""The share of a text's runs that another text holds."""

from __future__ import annotations

import torch

from eval.inputs.overlap import overlap


def test_runs_are_found_at_any_place() -> None:
    ids = torch.randint(1000, (320,), generator=torch.Generator().manual_seed(0))
    assert overlap(ids, ids) == 1
    assert overlap(ids, torch.cat((ids[:5], ids[32:96], ids[:3]))) == 0.2
    assert overlap(ids, ids.flip(0)) == 0
    assert overlap(ids[:10], ids[:30]) == 1
