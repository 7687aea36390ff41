"""The survey: its statistics are the moments of what layers see, and it goes on wherever it was cut off."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from records import blocks_of, inputs, measured
from records import record as random_record
from streams import WINDOWS, InMemory, model_of, of_blocks, records_of, seen_by, stream_of
from tiny_mla import tokens

from attention.errors import Failure
from attention.forward import heads_of
from attention.record import PLAIN, Attention, Scoring
from convert.calibration.stream import LayerStream
from convert.calibration.survey import FIRST_TOKENS, Moments, matches, survey
from convert.methods.statistics import Attended, Statistics
from eval.inputs.sealed import Shelf


def run_survey(model: Any, directory: Path, blocks: torch.Tensor) -> Callable[[int], Statistics]:
    return survey(stream_of(model, directory / "inputs", blocks), Shelf(directory, "source"), records_of(model), range(3))


def attended(a: Attention, x: torch.Tensor) -> Attended:
    """One query of one head after another, in fp64."""
    share, found, sunk = len(a.q) // len(a.k), [], []
    for block in x.double():
        positions = torch.arange(len(block))
        rows, keys = ((w.double() @ block.T).mT for w in (a.q, a.k))
        if a.q_bias is not None and a.k_bias is not None:
            rows, keys = rows + a.q_bias.double()[:, None], keys + a.k_bias.double()[:, None]
        if a.rotary is not None:
            rows, keys = (a.rotary.rotation(positions, part.dtype)(part) for part in (rows, keys))
        for h in range(len(rows)):
            for t in range(len(block)):
                seen = slice(max(0, t + 1 - (a.scoring.window or t + 1)), t + 1)
                logits, cap = a.scale * keys[h // share, seen] @ rows[h, t], a.scoring.softcap
                logits = logits if cap is None else cap * torch.tanh(logits / cap)
                biases = (0 if a.scoring.slopes is None else a.scoring.slopes[h]) * positions[seen]
                sink = logits[:0] if a.sinks is None else a.sinks[h : h + 1]
                probabilities = torch.cat((logits + biases, sink)).softmax(0)[: len(logits)]
                read, rest = probabilities @ block[seen], 1 - probabilities.sum()
                sunk.append(rest * torch.cat((read, torch.stack((torch.ones_like(rest), rest)))))
                found.append((block[seen].T @ (probabilities[:, None] * block[seen]), torch.outer(read, read), read))
    seen, read, mean = (torch.stack(parts).mean(0) for parts in zip(*found, strict=True))
    return Attended(seen, seen - read, read, mean, None if a.sinks is None else torch.stack(sunk).mean(0))


@pytest.mark.parametrize(
    ("groups", "biased", "scoring"),
    [
        (4, True, PLAIN),
        (1, False, Scoring((1.0, 0.6, 0.3, 0.1))),
        (2, True, Scoring(window=3)),
        (2, False, Scoring(window=4, softcap=0.5)),
    ],
    ids=str,
)
def test_inputs_are_weighed_as_attention_sees_them(groups: int, biased: bool, scoring: Scoring) -> None:
    a = replace(random_record(groups, 4 // groups, pairs=2, nope=3, width=8, biased=biased), scoring=scoring)
    x = 2 * inputs(8, tokens=9, blocks=3)
    moments = Moments(0, of_blocks(3, 9, 8), a)
    moments.see(x)
    found, expected = moments.statistics().attended, attended(a, x)
    for name in ("seen", "within", "read", "mean"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
    assert torch.linalg.eigvalsh(found.within).min() > -1e-4
    first = inputs(8, tokens=1, blocks=5)
    moments.see_first(first)
    alone, mixed = attended(a, first), moments.statistics().attended
    for name, tensor in expected.tensors.items():
        if name != "matching":
            mean = (tensor + FIRST_TOKENS * getattr(alone, name)) / (1 + FIRST_TOKENS)
            torch.testing.assert_close(getattr(mixed, name), mean, rtol=1e-4, atol=1e-4)


def test_a_sink_is_a_token_of_zeros_and_of_no_constant() -> None:
    """Its share is what rows lack of one: where biases are weighed, the constant of tokens has a mean and a variance."""
    a, x = random_record(2, 2, pairs=2, nope=3, width=8, sinks=True), 2 * inputs(8, tokens=9, blocks=3)
    moments = Moments(0, of_blocks(3, 9, 8), a)
    moments.see(x)
    found, expected = moments.statistics().attended, attended(a, x)
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(getattr(found, name), tensor, rtol=1e-4, atol=1e-4)
    assert found.sunk[-2] > 0.05
    assert found.shrunk(27, None).sunk is found.sunk
    # The same with the constant as one more channel of the input, which nothing reads.
    a = replace(a, **{name: torch.nn.functional.pad(getattr(a, name), (0, 1)) for name in "qkv"})
    of_constant = attended(a, torch.nn.functional.pad(x, (0, 1), value=1))
    for name in ("seen", "within", "read"):
        torch.testing.assert_close(getattr(found, f"{name}_with_constant"), getattr(of_constant, name), rtol=1e-4, atol=1e-4)


def test_heads_that_attend_behind_earlier_places_of_the_same_two_tokens_copy() -> None:
    ids = torch.tensor([1, 2, 3, 9, 1, 2, 5, 1, 2, 2])
    assert matches(ids, torch.arange(10)).nonzero().tolist() == [[5, 2], [8, 2], [8, 6]]
    a, x = random_record(2, 2, pairs=2, nope=3, width=8), inputs(8, tokens=10, blocks=2)
    moments = Moments(0, of_blocks(2, 10, 8, ids), a)
    moments.see(x)
    found = [heads_of(a, block).attention_of(torch.tensor([5, 8])) for block in blocks_of(x)]
    expected = sum(p[:, 0, 2] + p[:, 1, 2] + p[:, 1, 6] for p in found) / 4
    torch.testing.assert_close(moments.statistics().attended.matching, expected.double())


def test_a_few_queries_speak_for_a_long_block(monkeypatch: pytest.MonkeyPatch) -> None:
    a, x = random_record(2, 2, pairs=2, nope=3, width=8, biased=False), inputs(8, tokens=200, blocks=4)
    found = []
    for queries in (20, 200):
        monkeypatch.setattr("convert.calibration.survey.QUERIES", queries)
        moments = Moments(0, of_blocks(4, 200, 8), a)
        moments.see(x)
        found.append(moments.statistics().attended)
    few, all_of_them = found
    torch.testing.assert_close(few.within, all_of_them.within, rtol=0.1, atol=0.1 * float(all_of_them.within.diagonal().mean()))
    assert not torch.equal(few.within, all_of_them.within)


@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("gemma2", WINDOWS)])
def test_statistics_are_the_moments_of_what_layers_see(
    model_type: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.calibration.stream._TOKENS", 48)  # 7 blocks as 4 and 3
    model, blocks = model_of(model_type, **changes), tokens(7, 12)
    weights = model.state_dict()

    def read(name: str) -> torch.Tensor:
        assert ".layers.2." not in name or "self_attn" not in name, "inputs of the last layer are all that is wanted"
        return weights[name]

    stream = stream_of(model, tmp_path / "inputs", blocks, InMemory(model, read))
    known = survey(stream, Shelf(tmp_path, "source"), records_of(model), range(3))
    with torch.inference_mode():
        states = model(blocks, output_hidden_states=True).hidden_states
    for layer, x in enumerate(seen_by(model, blocks)):
        found, expected = known(layer), measured(x)
        assert found.tokens == 84
        assert found.second.dtype == found.mean.dtype == torch.float64
        torch.testing.assert_close(found.second, expected.second, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-4, atol=1e-4)
        ones = measured(torch.nn.functional.pad(x, (0, 1), value=1))
        torch.testing.assert_close(found.with_constant, ones.second, rtol=1e-4, atol=1e-4)
        energy = states[layer].double().square().sum(-1).reciprocal().mean()  # of the residual stream
        assert found.inverse_energy == pytest.approx(float(energy), rel=1e-4)
        torch.testing.assert_close(found.sample.rows.float(), x, rtol=1e-2, atol=1e-2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"source-0000{layer}.safetensors" for layer in range(3)]
    nothing = InMemory(model, lambda name: pytest.fail(f"{name} is read, although the survey is complete"))
    survey(stream_of(model, tmp_path / "inputs", blocks, nothing), Shelf(tmp_path, "source"), records_of(model), range(3))


def test_without_a_record_attention_is_assumed() -> None:
    x = inputs(8, tokens=9, blocks=3)
    moments = Moments(0, of_blocks(3, 9, 8), random_record(1, 1, pairs=1, nope=0, width=8, biased=False), shown=False)
    moments.see(x)
    found = moments.statistics()
    assert torch.equal(found.attended.seen, found.second)
    assert torch.equal(found.attended.within, found.covariance)


@pytest.mark.parametrize(
    ("value", "scale", "what"),
    [
        (float("nan"), 1.0, "input of layer 17's"),
        (1e30, 1.0, "input of layer 17's"),
        (1.0, float("nan"), "attention of layer 17"),
    ],
)
def test_what_is_not_finite_fails_with_its_layer(value: float, scale: float, what: str) -> None:
    a, x = random_record(1, 2, pairs=1, nope=0, width=4, biased=False), torch.ones(2, 3, 4)
    x[1, 2, 3] = value
    moments = Moments(17, of_blocks(2, 3, 4), replace(a, scale=scale))
    moments.see(x)
    with pytest.raises(Failure, match=f"the {what}.* is not finite on the calibration text"):
        moments.statistics()


def test_tokens_without_an_embedding_do_not_outweigh_all_others(tmp_path: Path) -> None:
    model, blocks = model_of(), tokens(7, 12)
    with torch.no_grad():
        model.model.embed_tokens.weight[int(blocks[0, 0])] = 0
        typical = 1 / float(model.model.embed_tokens(blocks).double().square().sum(-1).median())
    found = run_survey(model, tmp_path, blocks)(0).inverse_energy
    assert typical / 2 < found < 1e3 * typical


STEPS = ["embed", "advance 0", "put 0", "advance 1", "put 1", "put 2"]


@pytest.mark.parametrize(("cut", "after"), [("embed", True), ("advance 1", False), ("advance 1", True), ("put 1", True)])
def test_a_survey_goes_on_from_any_step(cut: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, blocks, steps, armed = model_of(), tokens(7, 12), [], [True]
    directories = [tmp_path / "whole", tmp_path / "cut"]
    for directory in directories:
        directory.mkdir()
    whole = run_survey(model, directories[0], blocks)

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any) -> Any:
            step = f"{name} {args[0]}" if args else name
            stops = step == cut and armed[0]
            if stops and not after:
                raise KeyboardInterrupt
            found = function(self, *args)
            steps.append(step)
            if stops:
                raise KeyboardInterrupt
            return found

        return wrapped

    for owner, name in ((LayerStream, "embed"), (LayerStream, "advance"), (Shelf, "put")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    with pytest.raises(KeyboardInterrupt):
        run_survey(model, directories[1], blocks)
    armed[0] = False
    known = run_survey(model, directories[1], blocks)
    again = [cut] if (cut, after) == ("advance 1", True) else []  # its statistics were not on the shelf yet
    assert sorted(steps) == sorted([*STEPS, *again])
    for layer in range(3):
        assert torch.equal(known(layer).second, whole(layer).second)
        assert torch.equal(known(layer).mean, whole(layer).mean)


def test_lost_inputs_are_made_again_and_statistics_stay_the_same(tmp_path: Path) -> None:
    model, blocks = model_of(), tokens(7, 12)
    known = run_survey(model, tmp_path, blocks)
    (tmp_path / "source-00001.safetensors").unlink()
    before = (tmp_path / "source-00000.safetensors").read_bytes()
    expected = measured(seen_by(model, blocks)[1])
    (tmp_path / "inputs-2").write_bytes(b"of no use: layer 1 comes first")
    run_survey(model, tmp_path, blocks)
    assert (tmp_path / "source-00000.safetensors").read_bytes() == before
    torch.testing.assert_close(known(1).second, expected.second, rtol=1e-4, atol=1e-4)
