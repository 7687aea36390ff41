"""Queries through a latent in stock classes: exact at full rank, smaller below it, and refused where there is none."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_without_kvfold
from latents import full_size, logits_of, method_options, same_logits, tokens, tolerance
from rows import rows
from written import Convert, Make, left_nothing, ok, weights

from attention import load
from convert import mla
from convert.families.neutral import query_channels, query_rank

SMALL = ["--kv-lora-rank", 24, "--qk-rope-head-dim", 16]
FULL = query_rank(64)
ATTENTION = "model.layers.0.self_attn."
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"num_hidden_layers": 2}),
    "gemma": ("gemma", {}),
    "layers without RoPE": ("smollm3", {"num_hidden_layers": 2, "no_rope_layers": [1, 0]}),
}


def parameters(path: Path) -> int:
    return sum(math.prod(tensor.shape) for name, tensor in weights(path).items() if name.startswith(ATTENTION))


@pytest.mark.parametrize(
    ("method", "kind", "rank"),
    rows(
        product(["svd", "weighted with text"], ["llama", "qwen2", "gemma"], [FULL, FULL - 8]),
        [("svd", "llama", FULL), ("svd", "qwen2", FULL - 8), ("weighted with text", "gemma", FULL - 8)],
    ),
)
def test_a_rank_that_holds_the_input_loses_nothing(
    method: str, kind: str, rank: int, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    """Also one that lacks the channels which only round the rank up."""
    assert query_channels(rank) >= 64
    model_type, changes = KINDS[kind]
    source, ids = checkpoint(model_type, **changes), tokens(20)
    given = ["--q-lora-rank", rank, *method_options(method, words)]
    ok(convert("mla", source, tmp_path / "out", *full_size(4, 8), *given))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["q_lora_rank"] == rank
    same_logits(logits_of(tmp_path / "out", ids), logits_of(source, ids), tolerance(method))


@pytest.mark.parametrize("kind", rows(KINDS, ["qwen2", "layers without RoPE"]))
def test_less_is_lost_the_more_channels_there_are(
    kind: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    model_type, changes = KINDS[kind]
    source, ids, text = checkpoint(model_type, **changes), tokens(20), method_options("weighted with text", words)
    ok(convert("mla", source, tmp_path / "whole", *SMALL, *text))
    whole = logits_of(tmp_path / "whole", ids)
    errors = []
    for rank in (16, 32, 48):
        ok(convert("mla", source, tmp_path / f"{rank}", *SMALL, *text, "--q-lora-rank", rank))
        found = logits_of(tmp_path / f"{rank}", ids)
        errors.append(float((found - whole).norm()))
        same_logits(load(tmp_path / f"{rank}", when="always")(ids).logits.detach(), found)
    assert errors[0] > errors[1] > errors[2]
    assert parameters(tmp_path / "16") < parameters(tmp_path / "32") < parameters(tmp_path / "whole")


RUN = """
import json
from alike import cached_by
model, cache = cached_by(sys.argv[1], static=False)
print(json.dumps([model.config.q_lora_rank, cache.keys.shape[-1], cache.values.shape[-1]]))
"""


def test_a_result_runs_where_kvfold_is_not_installed_and_caches_no_more(
    checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    ok(convert("mla", checkpoint("qwen2"), tmp_path / "out", *SMALL, "--q-lora-rank", 24))
    done = run_without_kvfold(RUN, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [24, 24, 16]


def test_the_plan_says_what_is_saved(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("qwen2")
    shown = ok(convert("mla", source, tmp_path / "out", *SMALL, "--q-lora-rank", 24)).stdout
    ok(convert("mla", source, tmp_path / "whole", *SMALL))
    counts = [parameters(path) for path in (tmp_path / "out", source, tmp_path / "whole")]
    assert (
        "a layer has {:,} parameters; the source's has {:,}, and without a latent of queries it would have {:,}".format(*counts)
        in shown
    )
    assert "query biases go through q_a_proj, an identity" not in shown
    assert "a smaller MLA of the result would have kvfold's class" in shown
    full = ok(convert("mla", source, tmp_path / "full", *SMALL, "--q-lora-rank", FULL, "--dry-run")).stdout
    assert "parameters; the source's has" in full
    assert "kvfold's class" not in full
    recipe = json.loads((tmp_path / "out" / "conversion.json").read_text())["recipe"]
    assert recipe["mla"]["q_lora_rank"] == 24
    done = mla(source, tmp_path / "again", kv_lora_rank=24, qk_rope_head_dim=16, q_lora_rank=24)
    assert all(torch.equal(tensor, weights(done.output)[name]) for name, tensor in weights(tmp_path / "out").items())


def test_a_latent_of_queries_is_refined(
    checkpoint: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "convert.calibration.refine._TOLERATED", 1e9
    )  # nothing is gained here, and steps are taken all the same
    options = [*SMALL, *method_options("weighted with text", words), "--q-lora-rank", 24]
    source = checkpoint("llama")
    ok(convert("mla", source, tmp_path / "out", *options))
    ok(convert("mla", source, tmp_path / "refined", *options, "--refine", 4))
    before, after = (weights(tmp_path / name) for name in ("out", "refined"))
    name = f"{ATTENTION}q_a_proj.weight"
    assert before[name].shape == after[name].shape == (24, 64)
    assert not torch.equal(before[name], after[name])
    assert (after[name] - before[name]).norm() < before[name].norm()
    assert torch.equal(before[name][query_channels(24) :], after[name][query_channels(24) :]), "constants"


def test_results_with_less_are_sources_of_kvfolds_class(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    ok(convert("mla", checkpoint("llama"), tmp_path / "out", *SMALL, "--q-lora-rank", 24))
    whole = json.loads((tmp_path / "out" / "config.json").read_text())["kv_lora_rank"] - 1  # one channel is a constant
    for name, size in (("same", [whole, 16]), ("fewer rotary", [whole, 8])):  # its frequencies are a list
        sizes = ["--kv-lora-rank", size[0], "--qk-rope-head-dim", size[1], "--method", "svd"]
        ok(convert("mla", tmp_path / "out", tmp_path / name, *sizes))
    assert json.loads((tmp_path / "same" / "config.json").read_text())["model_type"] == "kvfold"
    ids = tokens(24)
    with torch.inference_mode():
        found = load(tmp_path / "same")(ids).logits
    torch.testing.assert_close(found, logits_of(tmp_path / "out", ids), rtol=1e-4, atol=1e-4)
    ok(convert("mla", checkpoint("llama", name="other"), tmp_path / "full", *SMALL, "--q-lora-rank", FULL))
    ok(
        convert(
            "mla", tmp_path / "full", tmp_path / "fewer", "--kv-lora-rank", 12, "--qk-rope-head-dim", 8, "--q-lora-rank", 24
        )
    )


@pytest.mark.parametrize(
    ("model_type", "rank", "message"),
    [
        ("gpt_neox", 24, "is a kvfold, which has no latent of queries, so it has no --q-lora-rank"),
        ("qwen3", 24, "is a kvfold, which has no latent of queries, so it has no --q-lora-rank"),
        ("llama", 81, "--q-lora-rank is 81"),
        ("llama", 7, "it must be from 8 to 80"),
        ("llama", 0, "it must be from 8 to 80"),
    ],
)
def test_ranks_that_no_class_has_are_refused(
    model_type: str, rank: int, message: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    size = ["--kv-lora-rank", 24, "--qk-rope-head-dim", 4, "--q-lora-rank", rank]
    left_nothing(convert("mla", checkpoint(model_type), tmp_path / "out", *size), 2, message, tmp_path / "out")


def test_every_split_of_a_budget_has_the_same_queries(checkpoint: Make, convert: Convert, words: Path, tmp_path: Path) -> None:
    options = ["--kv-budget", "50%", *method_options("weighted with text", words), "--q-lora-rank", 32]
    ok(convert("mla", checkpoint("llama", num_hidden_layers=1), tmp_path / "out", *options))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["q_lora_rank"] == 32
