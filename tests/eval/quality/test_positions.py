"""Loss by position: buckets, their sums, and what a report shows of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scoring import compare
from tiny import tiny_config, tiny_model

from eval.inputs.text import Tokens
from eval.quality.perplexity import ByPosition, bounds, buckets_of
from eval.quality.protocol import Protocol


def test_each_position_is_within_the_bounds_of_its_bucket() -> None:
    positions = torch.arange(5000)
    numbers = buckets_of(positions).tolist()
    for position, number in enumerate(numbers):
        start, end = bounds(number)
        assert start <= position < end
    assert [bounds(number) for number in range(4)] == [(0, 128), (128, 256), (256, 512), (512, 1024)]


def test_sums_do_not_depend_on_the_pieces() -> None:
    generator = torch.Generator().manual_seed(0)
    nats, positions = torch.rand(600, generator=generator), torch.randint(700, (600,), generator=generator)
    source, whole, pieces = ByPosition(), ByPosition(), ByPosition()
    source.add(torch.zeros(600), positions)
    whole.add(nats, positions)
    for part in torch.arange(600).split(70):
        pieces.add(nats[part], positions[part])
    found = pieces.as_figures(source)
    for one, other in zip(found, whole.as_figures(source), strict=True):
        assert one == other | {"loss_nats": pytest.approx(other["loss_nats"])}
    for place in found:
        chosen = (positions >= place["from"]) & (positions < place["to"])
        assert place["tokens"] == int(chosen.sum())
        assert place["loss_nats"] == pytest.approx(float(nats[chosen].mean()))


def test_buckets_without_tokens_are_left_out() -> None:
    late = ByPosition()
    late.add(torch.tensor([1.0, 3.0]), torch.tensor([300, 301]))
    assert late.as_figures(late) == [{"from": 256, "to": 512, "tokens": 2, "loss_nats": 0.0}]


def test_a_model_that_is_wrong_late_in_a_block_is_seen_to_be() -> None:
    source = tiny_model(tiny_config("llama", num_hidden_layers=1, max_position_embeddings=512))
    late: Any = tiny_model(tiny_config("llama", num_hidden_layers=1, max_position_embeddings=512))
    forward = late.forward

    def worse(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits[:, 256:] *= -3
        return out

    late.forward = worse
    ids = torch.randint(3, 96, (800,), generator=torch.Generator().manual_seed(1))
    blocks = Protocol.named("paper", 400).blocks(Tokens("text", ids, 800, 1.0, None))
    theirs, ours = compare(source, [late], blocks)
    found = ours.by_position.as_figures(theirs.by_position)
    assert [(place["from"], place["tokens"]) for place in found] == [(0, 256), (128, 256), (256, 286)]
    assert [place["loss_nats"] for place in found[:2]] == [0, 0]
    assert found[2]["loss_nats"] > 0.01
    mean = sum(place["loss_nats"] * place["tokens"] for place in found) / ours.tokens
    assert mean == pytest.approx(ours.loss - theirs.loss)
