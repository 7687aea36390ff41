"""Checkpoints to heal, and one that was healed: each is made once for all tests, and none is to be changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from written import damage

from convert import Healing, heal, mla, mqa

LATENT: dict[str, Any] = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "method": "svd"}
PADDED: dict[str, Any] = LATENT | {"kv_lora_rank": 80, "pad_rank": True}


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    """Give a latent that holds everything something to heal."""
    for name in (name for name in tensors if name.endswith("o_proj.weight")):
        tensors[name] *= 1.3


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Letters in an order that never repeats: 100 blocks of 16 tokens, of which twelve are held out."""
    path = tmp_path_factory.mktemp("text") / "train.txt"
    letters = torch.randint(32, 126, (1600,), generator=torch.Generator().manual_seed(3)).tolist()
    path.write_text("".join(map(chr, letters)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def results(shelf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Conversions without healing: of Llama "mqa", "bfloat16", "mla", "int2" and "padded", or of another type: "gpt2 mla"."""
    directory = tmp_path_factory.mktemp("results")

    def find(name: str) -> Path:
        path, (model_type, _, kind) = directory / name, name.rpartition(" ")
        if path.exists():
            return path
        if kind in ("mqa", "bfloat16"):
            mqa(shelf(model_type or "llama"), path, method="mean", **({"dtype": kind} if kind == "bfloat16" else {}))
        elif kind == "padded":
            mla(shelf(tie_word_embeddings=True), path, **PADDED)
            damage(path, spoil)
        else:
            sizes = LATENT | {"qk_rope_head_dim": {"gpt2": 0, "gpt_neox": 4}.get(model_type, 8)}
            mla(shelf(model_type or "llama"), path, **sizes, no_text=True, cache_dtype=kind if kind == "int2" else None)
        return path

    return find


@pytest.fixture(scope="session")
def converted(results: Callable[[str], Path]) -> Path:
    """Llama with one KV head, which is the mean of all."""
    return results("mqa")


@pytest.fixture(scope="session")
def sizes() -> dict[str, Any]:
    """Ten steps of four blocks, with a point of the curve after every second one."""
    return {"tokens": 640, "context": 16, "batch_tokens": 64, "eval_every": 128, "lr": 2e-4, "device": "cpu"}


@pytest.fixture(scope="session")
def healed(converted: Path, text: Path, sizes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Healing:
    """It, healed on a text of which its source wrote half."""
    out = tmp_path_factory.mktemp("healed") / "out"
    return heal(converted, out, text=["self", text], evaluate=text, **sizes)
