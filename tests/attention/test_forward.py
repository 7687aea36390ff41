"""What a record computes on a sample is what the naive reference computes, and where its heads look."""

import dataclasses

import pytest
import torch
from records import block_of, blocks_of, factored, factored_behind_norms, inputs, loss, record, run

from attention.formats import FORMATS
from attention.forward import Block, attention_output, attention_received, heads_of, output_at, output_error, values_of
from attention.qk_norm import QKNorm
from attention.record import Attention, Record, Scoring
from attention.rope import Rotary
from convert.methods.distances import attention_by_distance

SLOPED, CAPPED = Scoring((0.5, 0.25, 0.1, 0.02)), Scoring(window=5, softcap=0.4)
RECORDS: dict[str, Record] = {
    "MHA": record(4, 1),
    "GQA with dims that do not turn": record(2, 3, nope=3),
    "MQA, interleaved": record(1, 4, pairing="interleaved"),
    "no biases": record(biased=False),
    "attention factor": record(factor=1.3),
    "longrope": dataclasses.replace(
        record(),
        rotary=Rotary(
            torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64), "half", 1.2,
            torch.tensor([0.5, 0.1, 0.01], dtype=torch.float64), 20,
        ),
    ),
    "no positions": record(pairs=0, nope=6),
    "ALiBi": record(pairs=0, nope=6, alibi=True),
    "ALiBi, GQA with RoPE": record(2, 3, nope=3, alibi=True),
    "ALiBi behind a norm": record(norm="head", nope=2, alibi=True).on_projected_inputs(),
    "MLA with ALiBi": dataclasses.replace(factored(), scoring=SLOPED),
    "MLA with ALiBi, without RoPE": dataclasses.replace(factored(pairs=0), scoring=SLOPED),
    "window": dataclasses.replace(record(2, 3, nope=3), scoring=Scoring(window=5)),
    "window of one token": dataclasses.replace(record(), scoring=Scoring(window=1)),
    "window beyond the block": dataclasses.replace(record(), scoring=Scoring(window=24)),
    "cap": dataclasses.replace(record(2, 3, nope=3), scoring=Scoring(softcap=0.4)),
    "cap and window": dataclasses.replace(record(2, 3), scoring=Scoring(window=5, softcap=0.4)),
    "cap and window behind a norm": dataclasses.replace(record(norm="head"), scoring=CAPPED).on_projected_inputs(),
    "ALiBi and window": dataclasses.replace(record(pairs=0, nope=6), scoring=Scoring(SLOPED.slopes, 5)),
    "MLA with a window": dataclasses.replace(factored(), scoring=Scoring(window=5)),
    "MLA with cap and window": dataclasses.replace(factored(), scoring=CAPPED),
    "sinks": record(2, 3, nope=3, sinks=True),
    "sinks and a window": dataclasses.replace(record(2, 3, sinks=True), scoring=Scoring(window=5)),
    "sinks and a cap": dataclasses.replace(record(4, 1, sinks=True), scoring=CAPPED),
    "sinks, with slopes": record(pairs=0, nope=6, alibi=True, sinks=True),
    "sinks behind a norm": record(norm="head", nope=2, sinks=True).on_projected_inputs(),
    "shared gains": record(norm="shared", nope=2),
    "gains per head": record(norm="head"),
    "one norm over all heads": record(norm="all"),
    "norm after rope": record(norm="after", pairing="interleaved"),
    "norm with biases": record(norm="layer"),
    "behind a norm": record(norm="head", nope=2).on_projected_inputs(),
    "behind a clamp": record(nope=2).on_projected_inputs(0.7),
    "behind a norm and a clamp": record(norm="all", nope=2).on_projected_inputs(0.7),
    "MLA": factored(),
    "MLA, normalised": dataclasses.replace(factored(), normalised=True, gain=torch.linspace(0.3, 2, 9)),
    "MLA behind a norm": factored_behind_norms(),
    "MLA without biases": factored(biased=False),
    "MLA, half": factored(pairing="half"),
    "MLA with a long list": dataclasses.replace(
        factored(),
        rotary=Rotary(
            torch.tensor([1.0, 0.3], dtype=torch.float64), "interleaved", 1.0,
            torch.tensor([0.5, 0.1], dtype=torch.float64), 20,
        ),
    ),
    "bfloat16": dataclasses.replace(record(biased=False), **{name: getattr(record(), name).bfloat16() for name in "qkvo"}),
}  # fmt: skip


ROUNDED: dict[str, Record] = {
    "cached in int8": dataclasses.replace(record(2, 3, nope=2), rounding=FORMATS["int8"]),
    "MLA cached in int4": dataclasses.replace(factored(rank=11), rounding=FORMATS["int4"]),
    "MLA with a norm, cached in int8": dataclasses.replace(factored(), normalised=True, rounding=FORMATS["int8"]),
}


@pytest.mark.parametrize("case", [*RECORDS, *ROUNDED])
def test_outputs_are_the_references(case: str) -> None:
    a = (RECORDS | ROUNDED)[case]
    for x in (inputs(20), inputs(20, tokens=1, blocks=3)):
        found = attention_output(a, blocks_of(x))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), run(a, x).flatten(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", RECORDS)
def test_outputs_of_some_tokens_are_those_of_all(case: str) -> None:
    a, block = RECORDS[case], block_of(inputs(20)[0])
    tokens = torch.tensor([0, 3, len(block) - 1])
    torch.testing.assert_close(output_at(a, block, tokens), attention_output(a, [block])[tokens], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 5, 23])
@pytest.mark.parametrize("softcap", [None, 0.4])
def test_windows_are_seen_in_every_span(window: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.forward._SPAN", 4)
    scoring, x = Scoring(window=window, softcap=softcap), inputs(20)
    for a in (dataclasses.replace(record(2, 3), scoring=scoring), dataclasses.replace(factored(), scoring=scoring)):
        torch.testing.assert_close(attention_output(a, blocks_of(x)).double(), run(a, x).flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_a_sample_in_half_precision_is_computed_in_single() -> None:
    a, x = record(), inputs(20).bfloat16()
    torch.testing.assert_close(attention_output(a, blocks_of(x)), attention_output(a, blocks_of(x.float())), rtol=0, atol=0)


def test_the_error_is_squared_relative_to_the_sources_output() -> None:
    a, b, x = record(), record(seed=1), inputs(20)
    assert output_error(a, b, blocks_of(x)) == pytest.approx(loss(a, b, x) ** 2, rel=1e-4)
    assert output_error(a, a, blocks_of(x)) == 0


@pytest.mark.parametrize("case", RECORDS)
def test_what_heads_attend_to_gives_the_references_outputs(case: str) -> None:
    """Also some of the heads alone, and some of the queries."""
    a, x = RECORDS[case], inputs(20)[0]
    heads, some = heads_of(a, block_of(x)), torch.tensor([0, 3, 20])
    values, contexts = values_of(a, heads), []
    for head in range(len(heads.plain)):
        logits, weights = heads.logits(head), heads.attention(head)
        contexts.append(weights @ values[head * len(values) // len(heads.plain)])
        part = heads.part(slice(head, head + 1))
        torch.testing.assert_close((heads.scale * part.queries @ part.keys.mT)[0], logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part.probabilities(logits[None, some], some)[0], weights[some], rtol=1e-4, atol=1e-5)
    out = torch.einsum("htd,ehd->te", torch.stack(contexts), a.o.float())
    found = (out if a.o_bias is None else out + a.o_bias.float()).double()
    torch.testing.assert_close(found, run(a, x[None])[0], rtol=1e-4, atol=1e-5)


def test_attention_is_summed_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.forward._SPAN", 4)
    a, x = record(2, 3), inputs(20, tokens=9)[0]
    found = attention_received(a, block_of(x))
    heads = heads_of(a, block_of(x))
    expected = torch.stack([heads.attention(head) for head in range(len(a.q))]).sum((0, 1)) / len(a.q)
    torch.testing.assert_close(found, expected.double(), rtol=1e-4, atol=1e-6)
    assert float(found.mean()) == pytest.approx(1)


@pytest.mark.parametrize("case", [case for case, a in RECORDS.items() if isinstance(a, Attention)])
def test_attention_is_summed_by_distance(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.forward._SPAN", 4)
    a, skipping = RECORDS[case], (0, 1, 2, 5, 6, 7, 8, 29, 30)
    blocks = [*blocks_of(inputs(20, tokens=9, blocks=2)), Block(inputs(20, tokens=9, blocks=1)[0], skipping)]
    found, expected = attention_by_distance(a, blocks), torch.zeros(len(a.q), 31, dtype=torch.float64)
    for block in blocks:
        heads = heads_of(a, block)
        for head in range(len(a.q)):
            weights = heads.attention(head)
            for t in range(9):
                for s in range(1, t + 1):  # a block's first token is left out
                    expected[head, block.positions[t] - block.positions[s]] += float(weights[t, s])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_positions_that_skip_turn_as_in_the_class() -> None:
    """A query after a skip attends before it, with RoPE's angles between both."""
    a, x = record(2, 2, 3), inputs(20, tokens=9, blocks=1)[0]
    positions = [0, 1, 2, 3, 4, 55, 56, 57, 58]
    long = inputs(20, tokens=59, blocks=1)[0]
    long[positions] = x
    weights = torch.stack([heads_of(a, block_of(long)).logits(head) for head in range(4)])[:, positions][:, :, positions]
    found = torch.stack([heads_of(a, Block(x, positions)).logits(head) for head in range(4)])
    torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-4)


def test_outputs_of_a_layer_that_adds_nothing_do_not_differ() -> None:
    a = record(2, 2, 2, 0, 20, biased=False)
    silent = dataclasses.replace(a, o=torch.zeros_like(a.o))
    assert output_error(silent, silent, blocks_of(inputs(20))) == 0
    assert output_error(silent, a, blocks_of(inputs(20))) > 1e6


def test_no_class_has_both_slopes_and_a_cap() -> None:
    with pytest.raises(ValueError, match="no class caps logits with ALiBi"):
        Scoring((0.5,), softcap=1.0)


def test_outputs_and_where_heads_look_take_no_derivative_of_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits alone need it, which ask for it; each output that they are judged by would pay for it, too."""
    a = record(norm="head")
    monkeypatch.delattr(QKNorm, "linearised")
    x = inputs(a.q.shape[-1])
    assert attention_output(a, blocks_of(x)).isfinite().all()
    assert heads_of(a, block_of(x[0])).part(slice(0, 2)).queries.isfinite().all()
