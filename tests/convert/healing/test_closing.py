"""The healing that ends a conversion: what it changes and records, how it resumes, and when it is left out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from written import same_but_for_the_run, weights

from attention.errors import Failure, Interrupted, Refusal
from convert import gqa, heal, mla, mqa, sweep
from convert.healing import closing, loop, models
from convert.healing.batches import TrainingText
from convert.healing.trainer import HealingTrainer
from eval.inputs.text import Tokens

Make = Callable[..., Path]
SIZES: dict[str, Any] = {"method": "mean", "calibration_tokens": 1024, "calibration_context": 32, "max_shard_size": "40KB"}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate at which tiny random models learn within a few steps."""
    monkeypatch.setattr("convert.healing.plan.start_rate", lambda loss, width: 3e-3)


def healing(path: Path) -> dict[str, Any]:
    return json.loads((path / "conversion.json").read_text())["healing"]


def test_a_result_is_distilled_before_it_is_published(
    checkpoint: Make, text: Path, tmp_path: Path, logits: Callable[..., torch.Tensor]
) -> None:
    source = checkpoint()
    mqa(source, tmp_path / "plain", text=text, heal=0, **SIZES)
    done = mqa(source, tmp_path / "healed", text=text, heal="2k", **SIZES)
    found = done.provenance["healing"]
    assert (found["tokens"], found["held_out_tokens"], found["passes"]) == (1984, 2048, pytest.approx(62 / 32))
    assert found["after"]["kl"] < found["before"]["kl"]
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "healed")
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert (
        done.provenance["tensors"]["healed"]
        == sorted(changed)
        == sorted(n for n in before if "attn" in n or "input_layer" in n)
    )
    assert not set(changed) & set(done.provenance["tensors"]["copied"])
    assert f"KL {found['before']['kl']:.4f} → {found['after']['kl']:.4f} on 2048 others" in str(done)
    card = (tmp_path / "healed" / "README.md").read_text()
    assert "distilled from the source on 1984 tokens of that text" in card
    assert "--heal 2000" in card
    expected, *results = (logits(path).log_softmax(-1) for path in (source, tmp_path / "plain", tmp_path / "healed"))
    distances = [torch.nn.functional.kl_div(one, expected, log_target=True, reduction="sum") for one in results]
    assert distances[1] < distances[0]


def test_what_judges_it_was_not_calibrated_on(
    checkpoint: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, of = [], TrainingText.of

    def noted(*args: Any) -> TrainingText:
        asked.append(of(*args))
        return asked[-1]

    monkeypatch.setattr(closing.TrainingText, "of", noted)
    mqa(checkpoint(), tmp_path / "out", text=text, heal=512, **SIZES)
    (blocks,) = asked
    calibrated = set(map(tuple, blocks.tokens.blocks(32).tolist()))
    assert len(blocks.held_out) == 64
    assert not calibrated & set(map(tuple, blocks.blocks[blocks.held_out].tolist()))


def test_it_is_a_healing_of_the_plain_result_on_the_same_tokens(checkpoint: Make, tmp_path: Path) -> None:
    source, text = checkpoint(), ["a b c d e f g h i j k l m n o p q r s t u v w x y z " * 20]
    given: dict[str, Any] = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "method": "svd", "refit": False, "text": text}
    given |= {"calibration_context": 16, "calibration_tokens": len(text[0])}
    plain, closed, healed = (tmp_path / name for name in ("plain", "closed", "healed"))
    mla(source, plain, heal=0, **given)
    mla(source, closed, heal=640, **given)
    heal(plain, healed, text=[text[0][: len(text[0]) // 16 * 16]], tokens=640, context=16, eval_every=160)
    assert healing(closed)["text_hash"] == healing(healed)["text_hash"], "the calibration text is the whole text"
    assert healing(closed)["curve"] == healing(healed)["curve"]
    found, expected = weights(closed), weights(healed)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(weights(plain)[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("at", ["trained", "kept", "replaced", "noted", "damaged"])
def test_a_run_that_was_stopped_resumes_to_the_same_bytes(
    at: str, checkpoint: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, arguments = checkpoint(), {"text": text, "heal": 1024} | SIZES
    mqa(source, tmp_path / "whole", **arguments)

    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def after(times: int, function: Any) -> Any:
        calls = itertools.count(1)

        def counted(*given: Any, **named: Any) -> Any:
            found = function(*given, **named)
            return stop() if next(calls) == times else found

        return counted

    def files(*given: Any) -> Iterator[tuple[str, str]]:
        for number, one in enumerate(closing_files(*given)):
            if at == "replaced" and number == 1:
                stop()  # this file is healed, and its note is of what was converted
            yield one
            if at == "noted" and number == 1:
                stop()

    closing_files = closing.write_files
    with monkeypatch.context() as patch:
        patch.setattr(closing, "write_files", files)
        if at == "trained":
            patch.setattr(HealingTrainer, "compute_loss", after(7, HealingTrainer.compute_loss))
        if at == "damaged":
            patch.setattr("convert.converting.checked", stop)
        if at == "kept":
            patch.setattr(loop, "_seal", after(3, loop._seal))
        with pytest.raises(Interrupted):
            mqa(source, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
    if at == "damaged":
        shard = sorted((tmp_path / "out.partial" / "checkpoint").glob("*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    if at in ("replaced", "noted", "damaged"):
        with pytest.raises(Refusal, match="was begun with 1024 tokens, not 0"):
            mqa(source, tmp_path / "out", resume=True, **(arguments | {"heal": 0}))
    mqa(source, tmp_path / "out", resume=True, **arguments)
    same_but_for_the_run(tmp_path / "whole", tmp_path / "out")


def test_a_result_that_does_not_train_can_be_published_as_it_is(
    checkpoint: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint()
    mqa(source, tmp_path / "plain", text=text, heal=0, **SIZES)

    def failing(*_: Any) -> Any:
        raise Failure("the loss is nan")

    with monkeypatch.context() as patch:
        patch.setattr(models, "train", failing)
        with pytest.raises(Failure, match="the conversion is done, its healing failed: the loss is nan") as failure:
            mqa(source, tmp_path / "out", text=text, heal=1024, **SIZES)
    assert failure.value.hint is not None
    assert "--resume and --heal 0" in failure.value.hint
    with pytest.raises(Refusal, match="begun with 1024 tokens, not 2048"):
        mqa(source, tmp_path / "out", text=text, heal=2048, resume=True, **SIZES)
    mqa(source, tmp_path / "out", text=text, heal=0, resume=True, **SIZES)
    same_but_for_the_run(tmp_path / "plain", tmp_path / "out")


def test_a_text_of_a_few_blocks_heals_nothing(
    checkpoint: Make, text: Path, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    gqa(checkpoint(), tmp_path / "out", groups=2, text=text, heal=512, calibration_tokens=224, calibration_context=32)
    assert healing(tmp_path / "out") is None
    assert any("not healed: the text has 7 blocks of 32 tokens, and 8 or more are needed" in said for said in warned())


def test_by_default_where_the_model_trains_in_memory(
    checkpoint: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint()
    monkeypatch.setattr("convert.planning.memory.HEALED", 65536)

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
    assert swept.plans[0].calibration is not None
    assert swept.plans[0].calibration.heal == 0, "methods are compared by what they do themselves"
    monkeypatch.setattr("convert.planning.memory.whole_memory", lambda device: 10**6)
    assert by_default(text=text) == 0
    assert by_default(text=text, heal=1024) == 1024
    with pytest.raises(Refusal, match="--heal is about calibration text, and there is none"):
        by_default(no_text=True, heal=1024)


def test_blocks_are_those_of_the_calibration_or_parts_of_them(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    found = mqa(checkpoint(max_position_embeddings=8192), tmp_path / "out", text=text, dry_run=True).plan.calibration
    assert found is not None
    of = {context: replace(found, context=context).heal_context for context in (64, 512, 600, 2048, 3000)}
    assert of == {64: 64, 512: 512, 600: 300, 2048: 512, 3000: 500}
    tokens = Tokens("t", torch.arange(7 * 601 + 5), 0, 0.0, None)
    cut = closing._blocks(tokens, 601, 300).ids.view(-1, 300)
    assert cut[:, 0].tolist() == [601 * row + start for row in range(7) for start in (0, 300)]


def test_a_sweep_that_resumes_heals_what_it_has_not(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    source = checkpoint()

    def swept(**given: Any) -> list[Any]:
        sweep(source, tmp_path / "all", groups=[2], methods=["aligned"], text=text, evaluate=text, **given)
        return [healing(path) for path in (tmp_path / "all").iterdir() if (path / "conversion.json").exists()]

    sizes = {"calibration_tokens": 1024, "calibration_context": 32}
    assert swept(**sizes) == [None]
    (found,) = swept(heal=512, resume=True, overwrite=True, **sizes)
    assert found["tokens"] == 512
