"""The healing that ends a conversion: what it changes and records, how it resumes, and when it is left out."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from written import Make, raising, same_but_for_the_run, weights

from attention.errors import Failure, Interrupted, Refusal
from convert import gqa, heal, mla, mqa, sweep
from convert.execute.describe import Conversion
from convert.healing import closing, loop
from convert.healing.trainer import HealingTrainer
from eval import evaluate
from eval.inputs.text import Tokens

SIZES: dict[str, Any] = {"method": "mean", "calibration_tokens": 1024, "calibration_context": 32, "max_shard_size": "40KB"}


@pytest.fixture(autouse=True, scope="module")
def fast() -> Iterator[None]:
    """A rate at which tiny random models learn within a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convert.healing.plan._START", (2e-4, 2e-4, 2e-4))
        yield


@pytest.fixture(scope="module")
def given(shelf: Make, spoken: str) -> tuple[Path, dict[str, Any]]:
    """A source, and the options of a conversion that ends with a healing."""
    return shelf(), SIZES | {"text": [spoken], "heal": 512}


@pytest.fixture(scope="module")
def plain(given: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, options = given
    return mqa(source, tmp_path_factory.mktemp("plain") / "out", **(options | {"heal": 0})).output


@pytest.fixture(scope="module")
def whole(given: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    source, options = given
    return mqa(source, tmp_path_factory.mktemp("whole") / "out", **options)


def healing(path: Path) -> dict[str, Any]:
    return json.loads((path / "conversion.json").read_text())["healing"]


def test_a_result_is_distilled_before_it_is_published(plain: Path, whole: Conversion) -> None:
    found = whole.provenance["healing"]
    assert (found["tokens"], found["held_out_tokens"], found["passes"]) == (512, 96, 512 / 672), "an eighth of the blocks"
    assert found["after"]["kl"] < found["before"]["kl"]
    before, after = weights(plain), weights(whole.output)
    changed = sorted(name for name, tensor in before.items() if not torch.equal(tensor, after[name]))
    assert whole.provenance["tensors"]["healed"] == changed
    assert changed == sorted(name for name in before if "attn" in name or "input_layer" in name)
    assert not set(changed) & set(whole.provenance["tensors"]["copied"])
    assert f"KL {found['before']['kl']:.4f} → {found['after']['kl']:.4f} on 96 others" in str(whole)
    card = (whole.output / "README.md").read_text()
    assert "distilled from the source on 512 tokens of the same texts" in card
    assert "--heal 512" in card


@pytest.mark.usefixtures("writing")
def test_source_and_result_are_loaded_once_to_heal_check_and_evaluate(
    given: tuple[Path, dict[str, Any]], loaded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the source once more, to write what the check reads. What is measured is the published result."""
    monkeypatch.setattr("convert.calibration.own_text._LEAST_WORDS", 0.0)
    (source, options), text = given, ["quick brown foxes " * 20]
    done = mqa(source, tmp_path / "out", evaluate=text, **options)
    assert done.provenance["healing"]["after"]["step"] > 0
    assert done.provenance["check"] is not None
    assert sorted(path == str(source) for path in loaded) == [False, True, True]
    measured = evaluate([source, done.output], text=text)
    for one, other in zip(done.report["models"], measured["models"], strict=True):
        assert (one["loss_nats"], one["kl_to_source"]) == (other["loss_nats"], other["kl_to_source"])


def test_it_is_a_healing_of_the_plain_result_on_the_same_tokens(shelf: Make, tmp_path: Path) -> None:
    source, text = shelf(), ["a b c d e f g h i j k l m n o p q r s t u v w x y z " * 20]
    given: dict[str, Any] = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "method": "svd", "refit": False, "text": text}
    given |= {"calibration_context": 16, "calibration_tokens": len(text[0])}
    plain, closed, healed = (tmp_path / name for name in ("plain", "closed", "healed"))
    mla(source, plain, heal=0, **given)
    mla(source, closed, heal=320, **given)
    heal(plain, healed, text=[text[0][: len(text[0]) // 16 * 16]], tokens=320, context=16, eval_every=80)
    assert healing(closed)["text_hash"] == healing(healed)["text_hash"], "the calibration text is the whole text"
    assert healing(closed)["curve"] == healing(healed)["curve"]
    found, expected = weights(closed), weights(healed)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(weights(plain)[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("at", ["trained", "replaced", "damaged"])
def test_a_run_that_was_stopped_resumes_to_the_same_bytes(
    at: str, given: tuple[Path, dict[str, Any]], whole: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source, options), out = given, tmp_path / "out"
    write_files, step, stop = closing.write_files, HealingTrainer.compute_loss, raising(KeyboardInterrupt())

    def files(*arguments: Any) -> Iterator[tuple[str, str]]:
        for number, one in enumerate(write_files(*arguments)):
            if number == 1:
                stop()  # this file is healed, and its note is of what was converted
            yield one

    def loss(trainer: Any, *arguments: Any, **named: Any) -> Any:
        return stop() if trainer.state.global_step == 9 else step(trainer, *arguments, **named)

    with monkeypatch.context() as patch:
        places = {"trained": HealingTrainer, "replaced": closing, "damaged": "convert.converting.checked"}
        named = {"trained": ("compute_loss", loss), "replaced": ("write_files", files), "damaged": (stop,)}
        patch.setattr(places[at], *named[at])
        with pytest.raises(Interrupted):
            mqa(source, out, **options)
    assert not out.exists()
    if at == "damaged":
        shard = sorted((tmp_path / "out.partial" / "checkpoint").glob("*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    if at != "trained":
        with pytest.raises(Refusal, match="was begun with 512 tokens, not 0"):
            mqa(source, out, resume=True, **(options | {"heal": 0}))
    mqa(source, out, resume=True, **options)
    same_but_for_the_run(whole.output, out)


def test_a_result_that_does_not_train_can_be_published_as_it_is(
    given: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = given[0], given[1] | {"text": "self"}  # of which a healing takes rows of its own
    plain = mqa(source, tmp_path / "plain", **(options | {"heal": 0})).output
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", raising(Failure("the loss is nan")))
        with pytest.raises(Failure, match="the conversion is done, its healing failed: the loss is nan") as failure:
            mqa(source, tmp_path / "out", **options)
    assert "--resume and --heal 0" in str(failure.value.hint)
    with pytest.raises(Refusal, match="begun with 512 tokens, not 2048"):
        mqa(source, tmp_path / "out", resume=True, **(options | {"heal": 2048}))
    mqa(source, tmp_path / "out", resume=True, **(options | {"heal": 0}))
    same_but_for_the_run(plain, tmp_path / "out")


def test_a_text_of_few_blocks_heals_nothing(shelf: Make, spoken: str, tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    sizes = {"calibration_tokens": 224, "calibration_context": 32}
    gqa(shelf(), tmp_path / "out", groups=2, method="mean", text=[spoken[:600]], heal=512, **sizes)
    assert healing(tmp_path / "out") is None
    assert any("not healed: the text has 7 blocks of 32 tokens, and 8 or more are needed" in said for said in warned())


def test_by_default_where_the_model_trains_in_memory(
    shelf: Make, spoken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, text = shelf(), [spoken]
    monkeypatch.setattr("convert.planning.base.HEALED", 65536)

    def by_default(**given: Any) -> Any:
        found = mqa(source, tmp_path / "out", dry_run=True, **given).plan.calibration
        return found and found.heal

    assert by_default(text=text) == 32768, "as many tokens as are calibrated on"
    assert by_default(text="self") == by_default(text=text, calibration_tokens=10**6) == 65536
    assert by_default(text=text, calibration_tokens=2048) == 2048
    assert by_default(text=text, heal=0) == 0
    assert by_default(no_text=True) is None
    assert by_default(text=text, method="mean", refit=True) == 0, "a baseline is healed only if asked for"
    assert by_default(text=text, method="mean", heal=1024) == 1024
    swept = sweep(source, tmp_path / "all", groups=[2], methods=["aligned"], text=text, evaluate=text, dry_run=True)
    assert swept.plans[0].calibration.heal == 0, "methods are compared by what they do themselves"
    monkeypatch.setattr("convert.planning.base.whole_memory", lambda device: 10**6)
    assert by_default(text=text) == 0
    assert by_default(text=text, heal=1024) == 1024
    with pytest.raises(Refusal, match="--heal is about calibration text, and there is none"):
        by_default(no_text=True, heal=1024)


def test_blocks_are_those_of_the_calibration_or_parts_of_them(shelf: Make, spoken: str, tmp_path: Path) -> None:
    found = mqa(shelf(max_position_embeddings=8192), tmp_path / "out", text=[spoken], dry_run=True).plan.calibration
    of = {context: replace(found, context=context).heal_context for context in (64, 512, 600, 2048, 3000)}
    assert of == {64: 64, 512: 512, 600: 300, 2048: 512, 3000: 500}
    tokens = Tokens("t", torch.arange(7 * 601 + 5), 0, 0.0, None)
    cut = closing._blocks(tokens, 601, 300).ids.view(-1, 300)
    assert cut[:, 0].tolist() == [601 * row + start for row in range(7) for start in (0, 300)]
