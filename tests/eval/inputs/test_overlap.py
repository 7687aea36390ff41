"""The share of a text's runs that another text holds."""

from __future__ import annotations

import torch

from eval.inputs.overlap import shared_share


def test_runs_are_found_at_any_place() -> None:
    ids = torch.randint(1000, (320,), generator=torch.Generator().manual_seed(0))
    assert shared_share(ids, ids) == 1
    assert shared_share(ids, torch.cat((ids[:5], ids[32:96], ids[:3]))) == 0.2
    assert shared_share(ids, ids.flip(0)) == 0
    assert shared_share(ids[:10], ids[:30]) == 1
