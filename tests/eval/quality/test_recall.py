"""Recall against models whose answer is known: one that copies, one that guesses, one that copies so far and no farther."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.errors import Refusal
from eval.inputs.source import Source
from eval.inputs.text import Text
from eval.quality.evaluation import report_of
from eval.quality.recall import COPY, Recall
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import silent

WORDS = 50
IDS = torch.randint(WORDS, (3000,), generator=torch.Generator().manual_seed(0))


class Copier:
    """Predicts what followed the last occurrence of the last 4 tokens, up to `reach` tokens back; guesses evenly otherwise."""

    device, dtype, name_or_path = torch.device("cpu"), torch.float32, "copier"

    def __init__(self, reach: int, keeps: bool = True) -> None:
        self.reach, self.read = reach, 0
        self.forward = self.few if keeps else self.all

    def few(self, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.all(input_ids, use_cache).logits[:, logits_to_keep])

    def all(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        ids = input_ids[0].tolist()
        self.read += len(ids)
        logits = torch.zeros(1, len(ids), WORDS)
        for at in range(3, len(ids)):
            for before in range(at - 1, max(2, at - self.reach - 1), -1):
                if ids[before - 3 : before + 1] == ids[at - 3 : at + 1]:
                    logits[0, at, ids[before + 1]] = 100
                    break
        return SimpleNamespace(logits=logits)

    def __call__(self, **kwargs: Any) -> Any:
        return self.forward(**kwargs)


@pytest.mark.parametrize("keeps", [True, False], ids=["logits_to_keep", "all logits"])
def test_one_that_copies_so_far_is_seen_to_do_so(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.quality.recall._TOKENS", 4096)
    probe = Recall.of(IDS, 512 + COPY)
    assert probe.distances == (128, 256, 512)
    found = probe.measure(Copier(256, keeps), "copier", silent)
    near, middle, far = found["distances"]
    pairs = probe.conditions()["pairs"]
    assert [place["tokens"] for place in found["distances"]] == [(COPY - 1) * pairs[str(d)] for d in probe.distances]
    assert pairs["512"] == len(probe.sequences) == 4096 // (512 + COPY)
    assert near["nats"] < 0.5 > middle["nats"]
    assert far["nats"] == pytest.approx(math.log(WORDS), rel=0.05) == pytest.approx(found["first_nats"], rel=0.05)


def test_every_sequence_begins_with_bos_if_the_tokenizer_adds_one() -> None:
    plain, opened = Recall.of(IDS, 512 + COPY), Recall.of(IDS, 512 + COPY + 1, bos=7)
    for without, sequence in zip(plain.sequences, opened.sequences, strict=True):
        assert torch.equal(sequence.ids, torch.cat((torch.tensor([7]), without.ids)))
        assert torch.equal(sequence.ids[sequence.copies], without.ids[without.copies])
    assert Recall.of(IDS, 512 + COPY, bos=7).distances == (128, 256), "BOS takes a position"


def test_copies_are_equal_apart_and_lie_in_the_text() -> None:
    probe, again = Recall.of(IDS, 8192), Recall.of(IDS, 8192)
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(probe.sequences, again.sequences, strict=True))
    assert probe.distances == (128, 256, 512, 1024, 2048)
    text = {tuple(run.tolist()) for run in IDS.unfold(0, COPY, 1)}
    kept = []
    for sequence in probe.sequences:
        first, second = sequence.copies.unbind(1)
        assert torch.equal(sequence.ids[first], sequence.ids[second])
        assert torch.equal(second - first, torch.tensor(probe.distances)[:, None].expand(-1, COPY))
        assert len(set(sequence.copies.flatten().tolist())) == sequence.copies.numel(), "no two overlap"
        room = torch.tensor([max(1024, 2 * distance) for distance in probe.distances])
        assert (second[:, -1] < room).all(), "near copies tell nothing of far positions"
        assert {0, 2048} <= set(sequence.copies[..., 0].flatten().tolist()), "the farthest pair is at both ends"
        used = set(sequence.copies.flatten().tolist())
        free = [place for place in range(0, len(sequence.ids), COPY) if place not in used]
        kept += [tuple(sequence.ids[place : place + COPY].tolist()) for place in free]
    assert len(set(kept)) == len(kept) > 0, "each sequence has another part of the text"
    assert set(kept) <= text
    assert torch.cat([sequence.ids for sequence in probe.sequences]).max() < WORDS
    json.dumps(probe.conditions(), allow_nan=False)


@pytest.mark.parametrize(("tokens", "positions"), [(3000, 191), (63, 8192)])
def test_what_is_too_short_is_refused(tokens: int, positions: int) -> None:
    with pytest.raises(Refusal, match=f"at least 192 positions and a text of 64 tokens, not {positions} and {tokens}"):
        Recall.of(IDS[:tokens], positions)


def test_a_report_holds_it_for_every_model(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.quality.recall._TOKENS", 512)
    changes = {"max_position_embeddings": 256, "num_hidden_layers": 1}
    paths = [checkpoint(**changes), checkpoint(name="small", num_key_value_heads=2, **changes)]
    sources = [Source.parse(str(path)) for path in paths]
    text = Text("novel.txt", "It was a bright cold day in April, and the clocks were striking thirteen. " * 5)
    settings = EvaluationSettings(contexts=(32,), device="cpu")
    assert report_of(sources, text, settings)["recall"] is None
    report = report_of(sources, text, replace(settings, recall=True))
    assert report["recall"]["pairs"] == {"128": 4}
    assert [model["name"] for model in report["recall"]["models"]] == ["source", "small"]
    first, second = (model["distances"][0]["nats"] for model in report["recall"]["models"])
    alone = report_of(sources[1:], text, replace(settings, recall=True))["recall"]["models"][0]
    assert second == alone["distances"][0]["nats"] != first
    plain, coarse = report_of(sources[:1], text, replace(settings, recall=True, cache_dtypes=("int2",)))["recall"]["models"]
    assert (plain["name"], coarse["name"]) == ("source", "source (int2 cache)")
    assert plain["distances"][0]["nats"] == first != coarse["distances"][0]["nats"]
