"""Models trained for a few seconds: random weights prove wiring, trained ones that text makes a conversion lose less."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import rows
from tiny import save_tokenizer, tiny_config
from written import Convert, ok

from attention import load

NOUNS = ("cat", "moon", "tree", "king", "boat", "river", "stone", "child")
VERBS = ("saw", "led to", "met", "hid", "was")
STEPS, BATCH, LENGTH = 150, 8, 64
TYPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 8, "num_hidden_layers": 2},
    "gpt2": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 16},
}


def chain(seed: int, sentences: int = 1500) -> str:
    """Sentences that begin with the noun that the last one ended with: to write one, a model has to look back."""
    draw = random.Random(seed)
    text, last = "", draw.choice(NOUNS)
    for _ in range(sentences):
        following = draw.choice(NOUNS)
        text += f"the {last} {draw.choice(VERBS)} the {following}. "
        last = following
    return text


def encoded(path: Path, text: str) -> torch.Tensor:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(path)(text, add_special_tokens=False).input_ids
    return torch.tensor(ids)


def trained(model_type: str, path: Path) -> Path:
    from transformers import AutoModelForCausalLM

    save_tokenizer(path)
    torch.manual_seed(0)
    config = tiny_config(model_type, tie_word_embeddings=True, **TYPES[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    ids, optimizer = encoded(path, chain(0)), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        starts = torch.randint(len(ids) - LENGTH, (BATCH,)).tolist()
        rows = torch.stack([ids[start : start + LENGTH] for start in starts])
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    return path


def loss(path: Path, ids: torch.Tensor) -> float:
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)[:32]
    with torch.inference_mode():
        return float(load(path)(rows, labels=rows).loss)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("model_type", rows(TYPES, ["llama"]))
def test_text_makes_conversions_of_a_trained_model_lose_less(model_type: str, convert: Convert, tmp_path: Path) -> None:
    source = trained(model_type, tmp_path / "source")
    ids = encoded(source, chain(1))
    own = loss(source, ids)
    assert own < 1.5, "it has learned something: 27 characters by chance are 3.3 nats"
    (tmp_path / "text.txt").write_text(chain(2), encoding="utf-8")
    text = ["--text", tmp_path / "text.txt", "--calibration-tokens", 2048, "--calibration-context", LENGTH]
    for size in (["mqa"], ["mla", "--kv-budget", "12.5%"]):
        lost = []
        for name, more in (("without", []), ("with", text)):
            out = tmp_path / f"{size[0]}-{name}"
            ok(convert(size[0], source, out, *size[1:], *more))
            lost.append(loss(out, ids) - own)
        without, calibrated = lost
        assert calibrated + 1e-3 >= 0, "no conversion is better than its source by chance"
        assert calibrated < 0.8 * without, size
