"""Perplexity, KL and agreement against a naive computation, one token and one forward pass at a time, in fp64."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring import compare
from tiny import VOCABULARY, tiny_config, tiny_model

from attention.errors import Failure, Refusal
from eval.inputs.text import Tokens
from eval.quality import perplexity
from eval.quality.perplexity import Protocol, Score
from eval.quality.settings import PROTOCOLS

BOS = 1
FIRST = 10  # tokens of a text bear their index plus this, so that a block shows where it was cut


@pytest.fixture(scope="module")
def source() -> Any:
    return tiny_model(tiny_config("llama", num_hidden_layers=2))


@pytest.fixture(scope="module")
def converted() -> Any:
    return tiny_model(tiny_config("llama", num_hidden_layers=2, num_key_value_heads=2), seed=1)


def text(count: int, bos: int | None = BOS) -> Tokens:
    return Tokens("text", torch.arange(FIRST, FIRST + count), count, 1.0, bos)


def contexts(protocol: str, context: int, tokens: Tokens) -> Iterator[tuple[list[int], int]]:
    """Every scored token with what the model may see before it, from the protocol's description; the only block is kept."""
    bos, ids = [] if tokens.bos is None else [tokens.bos], tokens.ids.tolist()
    if protocol == "bos":
        for at in range(len(ids) // (context - 1) * (context - 1) or len(ids)):
            yield bos + ids[at - at % (context - 1) : at], ids[at]
        return
    ids = bos + ids
    if protocol == "paper":
        for at in range(len(ids) // context * context or len(ids)):
            if at % context:
                yield ids[at - at % context : at], ids[at]
        return
    stride = context // 2
    for at in range(1, len(ids)):
        start = 0 if at < context else ((at - context) // stride + 1) * stride
        yield ids[start:at], ids[at]


def naive(source: Any, model: Any, protocol: str, context: int, tokens: Tokens) -> Score:
    score = Score()
    for seen, target in contexts(protocol, context, tokens):
        with torch.inference_mode():
            expected, found = (m(torch.tensor([seen])).logits[0, -1].double().softmax(-1) for m in (source, model))
        score.nats -= math.log(found[target])
        score.tokens += 1
        score.kl += sum(p * math.log(p / q) for p, q in zip(expected.tolist(), found.tolist(), strict=True))
        score.agreed += int(expected.argmax() == found.argmax())
        score.accepted += float(torch.minimum(expected, found).sum())
    return score


@pytest.mark.parametrize(("protocol", "context", "bos"), [("paper", 8, BOS), ("bos", 8, BOS), ("sliding", 7, None)])
def test_scores_are_those_of_a_naive_computation(
    source: Any, converted: Any, protocol: str, context: int, bos: int | None
) -> None:
    tokens = text(45, bos)
    theirs, ours = compare(source, [converted], Protocol.named(protocol, context).blocks(tokens))
    for found, model in ((theirs, source), (ours, converted)):
        expected = naive(source, model, protocol, context, tokens)
        assert found.tokens == expected.tokens
        assert found.agreed == expected.agreed
        assert found.nats == pytest.approx(expected.nats, rel=1e-5)
        assert found.kl == pytest.approx(expected.kl, rel=1e-5, abs=1e-9)
        assert found.accepted == pytest.approx(expected.accepted, rel=1e-5)


def test_figures_are_the_sums_divided_once() -> None:
    tokens = Tokens("text", torch.arange(20), 80, 0.25, None)
    source, model = (
        Score(nats=30.0, tokens=15, kl=0.0, agreed=15),
        Score(nats=33.0, tokens=15, kl=4.5, agreed=12, accepted=10.5),
    )
    assert model.as_figures(tokens, source) == {
        "perplexity": pytest.approx(math.exp(2.2)),
        "loss_nats": pytest.approx(0.2),
        "bits_per_byte": pytest.approx(2.2 / math.log(2) / 4),
        "tokens": 15,
        "kl_to_source": pytest.approx(0.3),
        "top1_agreement": pytest.approx(0.8),
        "acceptance": pytest.approx(0.7),
    }


def test_a_model_that_guesses_bytes_evenly_needs_eight_bits_per_byte() -> None:
    with pytest.raises(Failure, match="perplexity overflows at 1000 nats per token"):
        _ = Score(nats=2000.0, tokens=2).perplexity
    one_token_a_byte = Tokens("text", torch.arange(100), 100, 1.0, None)
    score = Score(nats=100 * math.log(256), tokens=100)
    assert score.as_figures(one_token_a_byte, score)["bits_per_byte"] == pytest.approx(8)
    two_bytes_a_token = Tokens("text", torch.arange(50), 100, 0.5, None)
    score = Score(nats=50 * math.log(256**2), tokens=50)
    assert score.as_figures(two_bytes_a_token, score)["bits_per_byte"] == pytest.approx(8)


def test_a_model_is_at_no_distance_from_itself(source: Any) -> None:
    theirs, ours = compare(source, [source], Protocol.named("sliding", 16).blocks(text(60)))
    assert ours.kl == pytest.approx(0, abs=1e-9)
    assert ours.agreed == ours.tokens == theirs.tokens > 40
    assert ours.nats == theirs.nats


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_figures_do_not_depend_on_batching(source: Any, converted: Any, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Protocol.named(protocol, 8).blocks(text(60))
    together = compare(source, [converted], blocks)
    monkeypatch.setattr(perplexity, "_LOGITS_AT_ONCE", 1)
    apart = compare(source, [converted], blocks)
    for ours, theirs in zip(together, apart, strict=True):
        assert (ours.tokens, ours.agreed) == (theirs.tokens, theirs.agreed)
        assert ours.nats == pytest.approx(theirs.nats, rel=1e-6)
        assert ours.kl == pytest.approx(theirs.kl, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("blocks_at_once", "calls"), [(1, 7), (2, 4), (3, 3), (100, 1)])
def test_no_more_blocks_go_through_together_than_their_logits_allow(
    source: Any, blocks_at_once: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    hook = source.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    monkeypatch.setattr(perplexity, "_LOGITS_AT_ONCE", blocks_at_once * 8 * VOCABULARY)
    compare(source, [], Protocol.named("bos", 8).blocks(text(49)))
    hook.remove()
    assert len(seen) == calls
    assert sum(seen) == 7
    assert max(seen) == min(blocks_at_once, 7)


@pytest.mark.parametrize(("damaged", "dtype"), [("the source", torch.float32), ("the converted model", torch.bfloat16)])
def test_logits_that_are_not_finite_fail_with_the_dtype_and_a_next_step(damaged: str, dtype: torch.dtype) -> None:
    models = [tiny_model(tiny_config("llama", num_hidden_layers=1)).to(dtype) for _ in range(2)]
    models[0].name_or_path, models[1].name_or_path = "the source", "the converted model"
    models[damaged == "the converted model"].lm_head.weight.data[5] = math.inf
    with pytest.raises(Failure) as caught:
        compare(models[0], models[1:], Protocol.named("paper", 8).blocks(text(20)))
    assert str(caught.value) == f"the logits of {damaged} are not finite in {str(dtype).removeprefix('torch.')}"
    assert "--dtype" in caught.value.hint


def cut(protocol: str, context: int, count: int, bos: int | None = BOS) -> list[tuple[list[int], int]]:
    blocks = Protocol.named(protocol, context).blocks(text(count, bos))
    return [(ids, batch.first) for batch in blocks for ids in batch.ids.tolist()]


def test_paper_opens_the_text_and_no_later_block_with_bos() -> None:
    assert cut("paper", 4, 10) == [([1, 10, 11, 12], 1), ([13, 14, 15, 16], 1)]
    assert cut("paper", 4, 11) == [([1, 10, 11, 12], 1), ([13, 14, 15, 16], 1), ([17, 18, 19, 20], 1)]


def test_bos_opens_every_block_with_bos_and_drops_the_tail() -> None:
    assert cut("bos", 4, 10) == [([1, 10, 11, 12], 1), ([1, 13, 14, 15], 1), ([1, 16, 17, 18], 1)]
    assert cut("bos", 4, 12)[-1] == ([1, 19, 20, 21], 1)


def test_sliding_with_an_odd_context_overlaps_by_the_larger_half() -> None:
    assert cut("sliding", 5, 10, bos=None) == [
        ([10, 11, 12, 13, 14], 1),
        ([12, 13, 14, 15, 16], 3),
        ([14, 15, 16, 17, 18], 3),
        ([16, 17, 18, 19], 3),
    ]


@settings(deadline=None, max_examples=150)
@given(
    protocol=st.sampled_from(PROTOCOLS), context=st.integers(2, 14), count=st.integers(2, 60), bos=st.sampled_from([None, BOS])
)
def test_blocks_score_what_the_protocol_says(protocol: str, context: int, count: int, bos: int | None) -> None:
    bos = BOS if protocol == "bos" else bos
    found = [(ids[:at], ids[at]) for ids, first in cut(protocol, context, count, bos) for at in range(first, len(ids))]
    assert found == list(contexts(protocol, context, text(count, bos)))


def test_protocols_that_there_are_not_are_refused() -> None:
    for context in (1, -5):
        with pytest.raises(Refusal, match=f"a context of {context} predicts nothing: it must be at least 2 tokens"):
            Protocol.named("paper", context)
    with pytest.raises(Refusal, match=r"no protocol 'papre' \(choose paper, bos, sliding\)"):
        Protocol.named("papre", 64)
    with pytest.raises(
        Failure, match="'bos' opens every block with a BOS token, and the model's tokenizer adds none"
    ) as caught:
        cut("bos", 4, 10, bos=None)
    assert caught.value.hint == "use --protocol paper"
