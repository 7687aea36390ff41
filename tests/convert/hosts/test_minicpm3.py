"""Stock MiniCPM3 as an output class of MLA: exact for gemma at full size, gains stored whole, refused where it differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from latents import full_size
from tiny import tiny_config
from written import Convert, Make, ok, weights

from convert.families import family_of


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_gains_are_one_more_than_gemma_stores_rounded_once(
    stored: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = checkpoint("gemma")
    ok(convert("mla", source, tmp_path / "out", *full_size(4, 8), "--method", "svd", "--dtype", stored))
    before, after = weights(source), weights(tmp_path / "out")
    norms = [name for name in before if name.endswith("norm.weight")]
    assert len(norms) == 7
    for name in norms:
        assert torch.equal(after[name], (before[name].double() + 1).to(getattr(torch, stored))), name
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert set(norms) <= set(provenance["tensors"]["converted"])


def test_layers_that_scale_what_they_add_add_no_plain_output() -> None:
    family = family_of("minicpm3")
    assert family.of(tiny_config("minicpm3")).traits.adds_output
