"""BLOOM, and MPT beside it: families with ALiBi."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from written import Convert, Make, ok

from attention import load, pack
from attention.errors import Refusal
from convert.families import FAMILIES

ALIBI = ("bloom", "mpt")


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 112])
def test_slopes_are_those_of_the_class(heads: int) -> None:
    config = tiny_config("bloom", num_attention_heads=heads, hidden_size=heads)
    torch.testing.assert_close(torch.tensor(FAMILIES["bloom"].of(config).slopes), _get_alibi_slopes(heads, torch.device("cpu")))
    config = tiny_config("mpt", num_attention_heads=heads, hidden_size=heads)
    torch.testing.assert_close(torch.tensor(FAMILIES["mpt"].of(config).slopes), -build_mpt_alibi_tensor(heads, 2)[:, 0, 0])


@pytest.mark.parametrize("model_type", ALIBI)
def test_other_functions_than_eager_are_refused(model_type: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """Their masks have no place for slopes."""
    ok(convert("gqa", checkpoint(model_type), tmp_path / "out", "--groups", 2))
    model, ids = load(tmp_path / "out"), torch.arange(4, 16)[None]
    assert model.config._attn_implementation == "eager"
    for name in ("sdpa", "flash_attention_2"):
        with pytest.raises((ValueError, ImportError)):
            load(tmp_path / "out", attn_implementation=name)
    with pytest.raises(Refusal, match="'eager'"):
        pack(model)
    module: Any = model.get_submodule(f"model.{FAMILIES[model_type].module(0)}")
    given = {"alibi": torch.zeros(8, 1, 12)} if model_type == "bloom" else {"position_bias": torch.zeros(8, 1, 128)}
    for mask in (None, torch.ones(1, 12)):
        with pytest.raises(ValueError, match="adds ALiBi to the masks of eager attention"):
            module(model.get_input_embeddings()(ids), attention_mask=mask, **given)


def test_masks_of_mpt_leave_room_for_scores_in_half_precision(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """A row of padding that sees nothing must not become −∞, and so NaN: scores below zero come on top."""
    ok(convert("gqa", checkpoint("mpt"), tmp_path / "out", "--groups", 2))
    module: Any = load(tmp_path / "out").get_submodule(f"model.{FAMILIES['mpt'].module(0)}")
    hidden, queries = torch.ones(1, 1, 4, 4, dtype=torch.bool), torch.zeros(1, 8, 4, 8, dtype=torch.float16)
    given = {"position_bias": torch.zeros(8, 1, 128)}
    found = module.mask_with_positions(hidden, queries, 4, given)
    assert (found.shape, given) == ((1, 8, 4, 4), {})
    assert torch.isfinite(found - 100).all()
    assert bool(((found + 100).float().exp() == 0).all())
