"""Families with fused QKV: ALiBi of BLOOM and MPT; Falcon's layouts and norms, what its class cannot run, its own results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import decodes_alike
from tiny import tiny_config
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from written import Convert, Logits, Make, damage, ok

from attention import load, pack
from attention.errors import Refusal
from attention.spec import AttentionSpec
from convert.families import FAMILIES, family_of
from eval.quality.lockstep import measured_bytes_per_token

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


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "one KV head": {"multi_query": True},
    "one for each, in turn": {"parallel_attn": False, "bias": True},
    "some, two norms": {"new_decoder_architecture": True, "num_kv_heads": 4},
    "some, one norm": {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1, "bias": True},
}


@pytest.mark.parametrize("case", [case for case in ARCHITECTURES if case != "one KV head"])
def test_one_head_is_held_by_its_own_class_if_that_has_the_norms(
    case: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = checkpoint("falcon", **ARCHITECTURES[case])
    ok(convert("mqa", source, tmp_path / "out", "--method", "mean"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == ("kvfold" if case == "some, two norms" else "falcon")
    model = load(tmp_path / "out")
    assert measured_bytes_per_token(model, "float32") == AttentionSpec.from_config(model.config).bytes_per_token("float32")
    assert AttentionSpec.from_config(model.config).kind == "MQA"
    decodes_alike(model, torch.arange(4, 16)[None], static=False)


def test_equal_heads_of_the_grouped_architectures_merge_without_loss(
    checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    """Into kvfold's class for some heads, and its own for one, which then says multi_query."""
    for case, groups in (("some, two norms", 2), ("some, one norm", 1)):
        source, out = checkpoint("falcon", name=case, **ARCHITECTURES[case]), tmp_path / f"{groups} heads"
        damage(source, _equal_kv_heads)
        ok(convert("gqa", source, out, "--groups", groups))
        torch.testing.assert_close(logits(out), logits(source), rtol=1e-4, atol=1e-4)


def _equal_kv_heads(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if "query_key_value" in name:
            rows = tensor.unflatten(0, (4, 4, 8))  # 4 KV heads: Q, Q, K, V
            rows[:, 2:] = rows[:1, 2:]


def test_what_the_class_caches_beyond_its_heads_is_said() -> None:
    for changes in ARCHITECTURES.values():
        config = tiny_config("falcon", **changes)
        expected = {"KV heads that transformers caches": 8} if config.new_decoder_architecture else {}
        assert family_of("falcon").of(config).describe()["also"] == expected
