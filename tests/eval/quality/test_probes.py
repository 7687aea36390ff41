"""Probes against models whose answers are known: one that copies, so far and no farther, over a cache of what it has read."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.versions import CACHE
from eval.inputs.source import Source
from eval.inputs.text import Text, Tokens
from eval.quality.evaluation import report_of
from eval.quality.probes import RUN, figures, probed, probes_for, probes_on
from eval.quality.settings import EvaluationSettings
from eval.report.quality import sections
from eval.terminal.progress import silent

WORDS = 256
IDS = torch.randint(128, WORDS, (3000,), generator=torch.Generator().manual_seed(0))


def encode(text: str) -> torch.Tensor:
    """A token for each letter: none of these is in the text."""
    return torch.tensor(list(text.encode()))


class Output(dict[str, Any]):
    @property
    def logits(self) -> torch.Tensor:
        return self["logits"]


class Copier:
    """Predicts what followed most of the last 16 tokens, up to `reach` back; guesses evenly where fewer than 4 agree."""

    device, dtype, name_or_path = torch.device("cpu"), torch.float32, "copier"

    def __init__(self, reach: int) -> None:
        self.reach, self.chunks = reach, list[int]()

    def forward(self, input_ids: torch.Tensor, use_cache: bool, **held: torch.Tensor) -> Output:
        assert use_cache
        ids = torch.cat((held.get(CACHE, input_ids.new_empty(0)), input_ids[0]))
        place = torch.arange(len(ids))
        ago = place[:, None] - place
        same = run = (ids[:, None] == ids).long()
        for _ in range(15):
            run = torch.nn.functional.pad(run, (1, 0, 1, 0))[:-1, :-1] * (ids[:, None] == ids)
            same = same + run
        length, before = torch.where((ago > 0) & (ago <= self.reach), same, 0).max(1)
        logits = 100.0 * torch.nn.functional.one_hot(ids[before + 1], WORDS) * (length >= 4)[:, None]
        self.chunks.append(input_ids.shape[1])
        return Output({"logits": logits[None, -input_ids.shape[1] :], CACHE: ids})

    __call__ = forward


def test_what_a_model_finds_so_far_and_no_farther(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.quality.probes._TOKENS", 1024)
    probes, copier = probes_on(IDS, 1024, encode), Copier(256)
    found = probed(probes, copier, "copier", silent)
    assert max(copier.chunks) == 512
    guessed = pytest.approx(math.log(WORDS), rel=0.1)
    for distance in (128, 256):
        nats, exact = found["copy", distance]
        assert len(nats) == len(exact) >= 2
        assert nats.max() < 0.4, "after four tokens"
        assert not exact.all(), "the first ones cannot be known"
        assert found["key–value", distance].exact.all()
    assert float(found["copy", 512].nats.mean()) == guessed == float(found["text", 512].nats.mean())
    assert not found["key–value", 512].exact.any()
    assert [at for task, at in found if task == "text"] == [0, 128, 256, 512]


def test_errors_of_differences_are_those_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.quality.probes._TOKENS", 512)
    probes = probes_on(IDS, 512, encode)
    source, other = (probed(probes, Copier(reach), "copier", silent) for reach in (512, 512))
    assert all(one["nats"] == 0 == one["standard_error"] for one in figures(other, source) if one["answers"] > 1)
    nats = source["copy", 128].nats
    (one,) = (one for one in figures(source, source) if (one["task"], one["at"]) == ("copy", 128))
    assert one["standard_error"] == pytest.approx(float(nats.std()) / math.sqrt(len(nats)))


def test_every_sequence_begins_with_bos_if_the_tokenizer_adds_one() -> None:
    probes = probes_on(IDS, 513, encode, bos=7)
    assert all(reading.ids[0] == 7 and len(reading.ids) == 513 for reading in probes)
    for asked in probes[2:]:
        for (task, at), positions in asked.answers:
            if task == "copy":
                assert torch.equal(asked.ids[positions], asked.ids[positions - at])


def test_answers_stand_where_they_are_said_to_be() -> None:
    probes, again = probes_on(IDS, 2048, encode), probes_on(IDS, 2048, encode)
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(probes, again, strict=True))
    texts = {tuple(run.tolist()) for run in IDS.unfold(0, 2048, 1)}
    assert {tuple(reading.ids.tolist()) for reading in probes[:1]} <= texts
    for reading in probes[1:]:
        assert {task for (task, _), _ in reading.answers} == {"copy", "key–value", "four codes", "variables"}
        everything = torch.cat([positions for _, positions in reading.answers])
        assert len(everything.unique()) == len(everything), "no two overlap"
        text = bytes(one if one < 128 else 32 for one in reading.ids.tolist()).decode()
        for (task, at), positions in reading.answers:
            answer = "".join(text[place] for place in positions.tolist())
            if at is not None:
                assert torch.equal(reading.ids[positions], reading.ids[positions - at]), (task, at)
            if task == "copy":
                assert len(positions) == RUN - 1
            elif task == "four codes":
                codes = re.findall(r" \d{5}", answer)
                assert "".join(codes) == answer
                assert [f" is{code}." in text for code in codes] == 4 * [True]
            else:
                assert len(answer) == 6 == len(answer.rstrip())
                assert int(answer) >= 10_000
                assert text.count(answer) == 2, "where it is named, and where it is asked"


@pytest.mark.parametrize(("tokens", "positions"), [(3000, 192), (100, 8192)])
def test_what_is_too_short_is_left_out(checkpoint: Callable[..., Path], tokens: int, positions: int) -> None:
    source = Source.parse(str(checkpoint(max_position_embeddings=positions)))
    text = Tokens("text", IDS[:tokens], tokens, 1.0, None)
    assert probes_for(EvaluationSettings(), [source], text) is None


def test_sequences_end_where_longrope_would_make_the_cache_anew(checkpoint: Callable[..., Path]) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 256}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    source = Source.parse(
        str(checkpoint("phi3", rope_parameters=rope, original_max_position_embeddings=256, max_position_embeddings=1024))
    )
    probes = probes_for(EvaluationSettings(), [source], Tokens("text", IDS, len(IDS), 1.0, None))
    assert {len(reading.ids) for reading in probes} == {256}


def test_a_report_holds_them_for_every_model(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.quality.probes._TOKENS", 512)
    changes = {"max_position_embeddings": 256, "num_hidden_layers": 1}
    paths = [checkpoint(**changes), checkpoint(name="small", num_key_value_heads=2, **changes)]
    sources = [Source.parse(str(path)) for path in paths]
    text = Text("novel.txt", "It was a bright cold day in April, and the clocks were striking thirteen. " * 8)
    settings = EvaluationSettings(contexts=(32,), device="cpu")
    assert report_of(sources, text, replace(settings, probes=False))["probes"] is None
    report = report_of(sources, text, settings)
    source, small = report["probes"]
    assert [source["name"], small["name"]] == ["source", "small"]
    nats = {(one["task"], one["at"]): one["nats"] for one in source["found"]}
    assert {("text", 0), ("text", 128), ("copy", 128), ("key–value", 128)} == set(nats)
    alone = report_of(sources[1:], text, settings)["probes"][0]["found"]
    lost = {(one["task"], one["at"]): one["nats"] for one in small["found"]}
    for one in alone:
        cell = one["task"], one["at"]
        assert one["nats"] == pytest.approx(nats[cell] + lost[cell])
        assert lost[cell]
    *_, probes = sections(report)
    assert probes.header == ["probe", "model", "0", "128", "anywhere"]
    assert [row[:2] for row in probes.rows[:2]] == [["text", "source"], ["text", "small"]]
    settings = replace(settings, cache_dtypes=("int2", "int4_per_token_head"))
    plain, coarse, served = report_of(sources[:1], text, settings)["probes"]
    assert (plain["name"], coarse["name"]) == ("source", "source (int2 cache)")
    assert all(one["nats"] for one in coarse["found"])
    assert all(one["nats"] for one in served["found"]), "also while it generates"
