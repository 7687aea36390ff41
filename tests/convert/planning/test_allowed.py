"""A type that experiments found becomes MLA in kvfold's class only if a small twin loses nothing there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from alike import reads_its_cache
from found_types import SHARING, UNSHARED, WITHOUT_LATENT, small
from latents import SMALL, logits_of, same_logits
from rows import rows
from tiny import random_model, saved
from written import Convert, ok

import attention
from attention.errors import Refusal
from attention.models.modeling_kvfold import KvfoldLatentAttention
from attention.spec import AttentionSpec
from convert.families.reading import family_for
from convert.hosts.kvfold import HOST, LATENT_HOST
from convert.methods import load_latent
from convert.planning.allowed import require_held
from eval.inputs.source import Source

WEIGHTED = load_latent("weighted")


def source(model_type: str, path: Path) -> Source:
    return Source.parse(str(saved(random_model(small(model_type)), path)))


HELD = [name for name in (*SHARING, *UNSHARED) if name not in WITHOUT_LATENT]
FEW = ("cohere2_moe", "exaone_moe", "flex_olmo", "gpt-sw3", "minimax_m3_vl_text", "persimmon")


@pytest.mark.parametrize("model_type", rows(HELD, FEW))
def test_kvfolds_class_holds_what_experiments_found(model_type: str, tmp_path: Path) -> None:
    made = source(model_type, tmp_path / "source")
    require_held(LATENT_HOST, family_for(made.config), WEIGHTED)


# Classes that ignore the number of KV heads, and some with QK-norm, behind which kvfold's class shares heads.
@pytest.mark.parametrize("model_type", [*UNSHARED, "dots1", "exaone_moe", "flex_olmo"])
def test_kvfolds_class_holds_their_shared_heads(model_type: str, convert: Convert, tmp_path: Path) -> None:
    made = source(model_type, tmp_path / "source")
    require_held(HOST, family_for(made.config))
    ok(convert("gqa", made.reference, tmp_path / "out", "--groups", 2, "--class", "kvfold", "--no-text"))
    model = attention.load(tmp_path / "out")
    assert reads_its_cache(model) == 2
    assert AttentionSpec.from_config(model.config).num_kv_heads == 2


@pytest.mark.parametrize("model_type", ["solar_open", "minimax_m2"])
def test_a_found_type_of_full_size_loses_nothing(model_type: str, convert: Convert, tmp_path: Path) -> None:
    made = source(model_type, tmp_path / "source")
    whole = ("--kv-lora-rank", 32, "--qk-rope-head-dim", 32, "--method", "svd", "--no-text")
    ok(convert("mla", made.reference, tmp_path / "out", *whole))
    ids = torch.randint(4, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    before, after = logits_of(tmp_path / "source", ids), logits_of(tmp_path / "out", ids)
    same_logits(after, before)
    assert "MLA-16+8" in ok(convert("mla", made.reference, tmp_path / "less", *SMALL, "--no-text")).output


def test_a_type_with_other_models_inside_has_no_latent() -> None:
    config = small("phi4_multimodal")
    family = family_for(config)
    said = LATENT_HOST.refuses(family, family.spec.latent(40, 8))
    assert said == "its decoder is inside another model, and the class holds decoders alone"


def test_a_type_that_it_does_not_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = source("solar_open", tmp_path / "source")
    built = KvfoldLatentAttention.__init__

    def other(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self.scaling *= 1.1

    monkeypatch.setattr(KvfoldLatentAttention, "__init__", other)
    with pytest.raises(Refusal, match="kvfold's class does not compute what solar_open does, on a small model"):
        require_held(LATENT_HOST, family_for(made.config), WEIGHTED)
    monkeypatch.setattr(KvfoldLatentAttention, "forward", None)
    with pytest.raises(Refusal, match="a small model of solar_open in kvfold's class does not run: "):
        require_held(LATENT_HOST, family_for(made.config), WEIGHTED)
