"""GPTBigCode as an output class: MQA of GPT-2 and its like loads in stock transformers, and is what kvfold's class gives."""

from __future__ import annotations

from pathlib import Path

import torch
from held import GLOBAL, config_of
from latents import logits_of
from tiny import VOCABULARY, tiny_config
from tiny_mla import tokens
from written import Convert, Make, ok, weights

from convert.families import FAMILIES
from convert.hosts.gpt_bigcode import HOST


def test_fits_run_through_it(checkpoint: Make, convert: Convert, words: Path, tmp_path: Path) -> None:
    """The result's layers are run by its own class while queries, keys, values and outputs are fitted."""
    source = checkpoint("opt")
    with_text = ["--text", words, "--calibration-tokens", 384, "--refine", 2]
    ok(convert("mqa", source, tmp_path / "out", *with_text))
    assert config_of(tmp_path / "out")["model_type"] == "gpt_bigcode"
    ok(convert("mqa", source, tmp_path / "plain"))
    expected = logits_of(source, tokens(2, 24))
    far, near = (float((logits_of(tmp_path / name, tokens(2, 24)) - expected).norm()) for name in ("plain", "out"))
    assert near < far


def test_positions_that_only_padding_reads_are_dropped(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("opt")
    said = ok(convert("mqa", source, tmp_path / "out")).stdout
    assert "the first 2 rows of model.decoder.embed_positions.weight are dropped: only padding reads them" in said
    before, after = weights(source)["model.decoder.embed_positions.weight"], weights(tmp_path / "out")["transformer.wpe.weight"]
    assert torch.equal(after, before[2:])


def test_settings_are_carried() -> None:
    dropped = {"resid_pdrop": 0.25, "attn_pdrop": 0.5, "embd_pdrop": 0.125}
    names = {
        "gpt2": dropped,
        "gpt_neo": {"resid_dropout": 0.25, "attention_dropout": 0.5, "embed_dropout": 0.125} | GLOBAL,
        "opt": {"dropout": 0.25, "attention_dropout": 0.5},
    }
    for model_type, changes in names.items():
        more = {} if model_type == "opt" else {"layer_norm_epsilon": 1e-3}
        family = FAMILIES[model_type].of(tiny_config(model_type, **changes, **more))
        sized = HOST.sized({"own_key": 5}, family, family.spec.grouped(1))
        assert family.spec.grouped(1) == FAMILIES["gpt_bigcode"].of(sized).spec
        expected = dropped | ({"embd_pdrop": 0.0} if model_type == "opt" else {})
        assert {name: getattr(sized, name) for name in dropped} == expected
        assert sized.layer_norm_epsilon == (1e-5 if model_type == "opt" else 1e-3)
        assert (sized.n_inner, sized.vocab_size, sized.n_positions, sized.n_layer) == (32, VOCABULARY, 128, 3)
        assert not hasattr(sized, "own_key")
