"""Models that cap logits attend eagerly, whatever transformers chooses."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_config, tiny_model
from tiny_mla import error, logits, tokens

from attention import load
from attention.versions import keep_caps


def test_a_model_that_caps_logits_never_attends_through_sdpa() -> None:
    ids = tokens(2, 12)
    model, free = (tiny_model(tiny_config("gemma2", attn_logit_softcapping=cap)) for cap in (0.05, None))
    expected = logits(model, ids)
    assert error(logits(free, ids), expected) > 1e-3
    model.config._attn_implementation = "sdpa"  # as transformers before 5.23 chooses
    assert keep_caps(model) is model
    assert model.config._attn_implementation == "eager"
    assert torch.equal(logits(model, ids), expected)


def test_others_attend_as_transformers_chose() -> None:
    model = tiny_model(tiny_config("llama"))
    model.config._attn_implementation = "sdpa"
    assert keep_caps(model).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("model_type", ["gemma2", "vaultgemma"])
def test_loaded_models_keep_their_caps(model_type: str, tmp_path: object) -> None:
    tiny_model(tiny_config(model_type)).save_pretrained(str(tmp_path))
    assert load(str(tmp_path)).config._attn_implementation == "eager"
