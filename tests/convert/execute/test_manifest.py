"""What is written of which tensors: shards, ties, dropped tensors, and weights that are not those of the config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import SMALL
from written import damage, ok, weights

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_stay_tied(tied: bool, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(tie_word_embeddings=tied)
    ok(convert("mqa", source, tmp_path / "out"))
    assert ("lm_head.weight" in weights(tmp_path / "out")) == (not tied)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == tied


def test_a_pickle_source_becomes_safetensors(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint(duplicated=2, tie_word_embeddings=True)
    tensors = weights(source)
    torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, source / "pytorch_model.bin")
    expected = logits(source)
    (source / "model.safetensors").unlink()
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    torch.testing.assert_close(logits(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert list(provenance["tensors"]["dropped"]) == ["lm_head.weight"]
    raw = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(raw))
    ok(convert("gqa", source, tmp_path / "untied", "--groups", 2))
    assert "lm_head.weight" in weights(tmp_path / "untied"), "an untied head is not dropped for sharing memory in a file"


def test_only_a_tied_head_is_dropped_for_sharing_memory(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(tie_word_embeddings=True)
    tensors = weights(source)
    tensors["model.layers.1.input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"]
    torch.save({"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    made = weights(tmp_path / "out")
    assert made.keys() == tensors.keys(), "the embedding is kept, though the head comes first"
    assert torch.equal(made["model.layers.1.input_layernorm.weight"], tensors["model.layers.0.input_layernorm.weight"])


def test_frequencies_that_old_checkpoints_keep_are_left_out(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    damage(source, lambda tensors: tensors.update({name: torch.ones(4)}))
    ok(convert("mla", source, tmp_path / "mla", *SMALL))
    ok(convert("mqa", source, tmp_path / "mqa"))
    assert name not in weights(tmp_path / "mla")
    assert name in weights(tmp_path / "mqa")
    dropped = json.loads((tmp_path / "mla" / "conversion.json").read_text())["tensors"]["dropped"]
    assert dropped[name] == "the model computes it itself"


# ---- bad weights -----------------------------------------------------------------------------------------------------


def nan_in(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors[name].view(-1)[0:1].fill_(float("nan")) and None


K = "model.layers.1.self_attn.k_proj"


BAD = {
    "missing tensor": (lambda t: t.pop(f"{K}.weight"), f"lacks tensor {K}.weight"),
    "names with a prefix": (
        lambda t: [t.update({f"module.{n}": t.pop(n)}) for n in list(t)],
        "lacks tensor model.layers.0.self_attn.q_proj.weight; it has module.lm_head.weight, as DistributedDataParallel names",
    ),
    "a base model alone": (
        lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in list(t)],
        "it has layers.0.self_attn.q_proj.weight, as a base model saved without its head does",
    ),
    "packed projections": (
        lambda t: t.update({K.replace("k_proj", "W_pack.weight"): t.pop(f"{K}.weight")}),
        f"lacks tensor {K}.weight; it has {K.replace('k_proj', 'W_pack')}.weight in its place",
    ),
    "GPTQ without a config of it": (
        lambda t: t.update({f"{K}.qweight": t.pop(f"{K}.weight").int()}), f"; it has {K}.qweight, as GPTQ and AWQ store",
    ),
    "wrong shape": (
        lambda t: t.update({f"{K}.weight": torch.ones(16, 64)}),
        f"disagree: {K}.weight is [16, 64], by the config it is [32, 64]",
    ),
    "NaN where heads merge": (nan_in(f"{K}.weight"), f"tensor {K}.weight holds NaN or infinite values"),
    "NaN elsewhere": (nan_in("model.norm.weight"), "tensor model.norm.weight holds NaN or infinite values"),
    "a bias that the config denies": (lambda t: t.update({f"{K}.bias": torch.ones(32)}), f"has tensor {K}.bias, which llama"),
    "more layers than the config": (
        lambda t: t.update({K.replace("1", "3") + ".weight": t[f"{K}.weight"].clone()}),
        "config.json gives 3 layers, and the weights hold model.layers.3.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_leave_nothing_behind(case: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    change, message = BAD[case]
    damage(source, change)
    result = convert("gqa", source, tmp_path / "out", "--groups", 2, "-q")
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
