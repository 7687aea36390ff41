"""Layers converted in order: each step brings the result closer, and an interruption costs no layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from latents import SMALL
from rows import rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from written import Convert, Logits, Make, damage, layer_notes, ok, read, refused, same_but_for_the_run, stop_at, weights

from convert.calibration import survey
from convert.calibration.stream import LayerStream
from convert.execute import sequence
from convert.execute.job import Job
from eval.inputs.sealed import Shelf

SIZES: dict[str, list[Any]] = {"gqa": ["--groups", 2], "mla": SMALL}


def nats_lost(path: Path, source: Path, letters: Path) -> float:
    """KL of what the result says to what the source says, on the start of the text."""
    ids = AutoTokenizer.from_pretrained(source)(letters.read_text()[:256], return_tensors="pt")["input_ids"].view(8, 32)
    return nats_between(path, source, ids)


def nats_between(path: Path, source: Path, ids: torch.Tensor) -> float:
    said = []
    for model in (source, path):
        with torch.inference_mode():
            said.append(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits.log_softmax(-1))
    return float((said[0].exp() * (said[0] - said[1])).sum(-1).mean())


@pytest.mark.parametrize("command", SIZES)
def test_each_step_brings_the_result_closer_and_touches_nothing_else(
    command: str, shelf: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path
) -> None:
    source, lost = shelf(num_key_value_heads=8, num_hidden_layers=2), {}
    on = [*on, "--calibration-tokens", 2048]
    ways: dict[str, list[Any]] = {"blind": [], "method": [*on, "--no-refit"], "refit": on}
    for name, way in ways.items():
        ok(convert(command, source, tmp_path / name, *SIZES[command], *way))
        lost[name] = nats_lost(tmp_path / name, source, letters)
    assert min(lost["blind"], lost["method"]) > lost["refit"]
    notes = {name: layer_notes(tmp_path / name) for name in ways}
    errors = {name: [note["output_error"] for note in notes[name]] for name in ("method", "refit")}
    assert 0 < sum(errors["refit"]) < sum(errors["method"])
    assert [note["layer"] for note in notes["refit"]] == [0, 1]
    before, after = weights(source), weights(tmp_path / "refit")
    assert all(torch.equal(before[name], after[name]) for name in before if "self_attn" not in name)


def test_methods_that_look_at_weights_alone_can_be_refitted(
    shelf: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path
) -> None:
    command = ["gqa", shelf(), tmp_path / "out", "--groups", 2, "--method", "mean"]
    refused(convert(*command, *on), 2, "method mean looks at weights only and has no use for")
    ok(convert(*command, *on, "--refit"))
    ok(convert("gqa", shelf(), tmp_path / "plain", *command[3:]))
    assert nats_lost(tmp_path / "out", shelf(), letters) < nats_lost(tmp_path / "plain", shelf(), letters)
    assert read(tmp_path / "out" / "conversion.json")["calibration_hash"].startswith("sha256:")


def test_queries_are_sharpened_only_in_what_is_written(
    shelf: Make, convert: Convert, on: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers that follow are fitted to what they would be without."""
    source = shelf(num_hidden_layers=2)
    ok(convert("mla", source, tmp_path / "out", *SIZES["mla"], *on, "--dtype", "float32"))
    monkeypatch.setattr(sequence, "sharpened", lambda after, *_: after)
    ok(convert("mla", source, tmp_path / "plain", *SIZES["mla"], *on, "--dtype", "float32"))
    found, plain = weights(tmp_path / "out"), weights(tmp_path / "plain")
    assert found.keys() == plain.keys()
    changed = {name for name in found if not torch.equal(found[name], plain[name])}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}
    assert all(note["output_error"] > 1e-6 for note in layer_notes(tmp_path / "out"))


def test_a_layer_that_adds_nothing_still_adds_nothing(
    checkpoint: Make, convert: Convert, logits: Logits, on: list[Any], tmp_path: Path
) -> None:
    """As after pruning."""
    out = [f"model.layers.0.{part}.weight" for part in ("self_attn.o_proj", "mlp.down_proj")]
    source = damage(checkpoint(), lambda tensors: [tensors[name].zero_() for name in out])
    ok(convert("mla", source, tmp_path / "out", *SIZES["mla"], *on))
    assert torch.isfinite(logits(tmp_path / "out")).all()


@pytest.mark.parametrize("command", SIZES)
def test_first_tokens_of_texts_are_fitted_where_much_of_them_is_missing(
    command: str, checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.embed_tokens.weight"  # that of padding may be zero, and says nothing of other tokens
    source = damage(checkpoint(num_key_value_heads=8, num_hidden_layers=2), lambda tensors: tensors[name][0].zero_())
    ids = sequence.first_tokens(read(source / "config.json")["vocab_size"]).rows
    for module in (sequence, survey):
        monkeypatch.setattr(module, "FIRST_TOKENS", 10)
    for far in (1, 1e-6):
        monkeypatch.setattr(sequence, "_FAR", far)
        ok(convert(command, source, tmp_path / f"{far}", *SIZES[command], *on))
    assert nats_between(tmp_path / "1e-06", source, ids) < 0.9 * nats_between(tmp_path / "1", source, ids)
    plain, found = weights(tmp_path / "1"), weights(tmp_path / "1e-06")
    changed = [name for name in plain if "layers.0.self_attn" in name and not torch.equal(plain[name], found[name])]
    assert len(changed) > 1, "not outputs alone"


def test_first_tokens_are_both_ends_of_a_vocabulary_and_some_between() -> None:
    ids = sequence.first_tokens(151_936).rows.flatten().tolist()
    assert (len(ids), ids[:384], ids[-384:]) == (1022, [*range(384)], [*range(151_552, 151_936)])
    assert sequence.first_tokens(5).rows.flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("owner", "name", "count"),
    rows(
        [
            *((Job, "as_stored", count) for count in (1, 2, 3, 6)),
            (Shelf, "put", 2),
            *((LayerStream, "advance", count) for count in range(1, 9)),
        ],
        [(Job, "as_stored", 3), (Shelf, "put", 2), (LayerStream, "advance", 4)],
    ),
)
def test_an_interrupted_sequence_is_resumed_to_the_same_bytes(
    owner: type, name: str, count: int, shelf: Make, convert: Convert, on: list[Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source, options, made, put = shelf(), ["--groups", 2, *on], [], Shelf.put
    with monkeypatch.context() as patch:
        stop_at(patch, owner, name, count, KeyboardInterrupt())
        assert convert("gqa", source, tmp_path / "out", *options).exit_code == 130
    there = {path.name for path in (tmp_path / "out.partial" / "steps").glob("layer-*.safetensors")}
    again: list[LayerStream] = []
    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "put", lambda self, layer, *what: made.append(layer) or put(self, layer, *what))
        patch.setattr(LayerStream, "embed", again.append)
        ok(convert("gqa", source, tmp_path / "out", *options, "--resume"))
    assert made == list(range(len(there), 3)), "no layer is fitted twice"
    assert not again, "neither stream begins anew"
    ok(convert("gqa", source, tmp_path / "whole", *options))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()
