"""Healing from end to end: what it gains, what it leaves alone, and what happens when it is stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import rows
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY, save_tokenizer, tiny_config, tiny_model
from transformers import TrainerCallback, integrations
from transformers.integrations import integration_utils

from attention import load
from attention.errors import Failure, Interrupted, Refusal
from attention.models import AUTO_MAP, CODE, unlike_ours
from convert import heal, mla, mqa
from convert.healing.plan import start_rate
from convert.healing.trainer import Distillation, HealingTrainer, share
from eval import evaluate
from eval.report.quality import _remarks

SIZES: dict[str, Any] = {"tokens": 1280, "context": 16, "batch_tokens": 64, "lr": 3e-3, "device": "cpu"}
TRIED = SIZES | {"lr": "auto", "tokens": 2400, "batch_tokens": 16}  # as few steps as rates are tried for
Make = Callable[..., Path]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_it_comes_closer_to_its_source(converted: Path, text: Path, tmp_path: Path, logits: Callable[..., Any]) -> None:
    done = heal(converted, tmp_path / "out", text=text, **SIZES)
    found = done.provenance["healing"]
    assert found["after"]["kl"] < 0.9 * found["before"]["kl"]
    assert [point["step"] for point in done.curve] == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert found["tokens"] == 1280
    # The published weights are those of the best point.
    source, before, after = logits(tmp_path / "source"), logits(converted), logits(tmp_path / "out")
    distances = [
        torch.nn.functional.kl_div(x.log_softmax(-1), source.log_softmax(-1), log_target=True, reduction="sum")
        for x in (before, after)
    ]
    assert distances[1] < distances[0]


def test_only_attention_and_its_norms_change(converted: Path, text: Path, tmp_path: Path) -> None:
    heal(converted, tmp_path / "out", text=text, **SIZES)
    before, after = weights(converted), weights(tmp_path / "out")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert set(before) == set(after)
    assert changed == {name for name in before if "self_attn" in name or "input_layernorm" in name}
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (converted / name).read_bytes()
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert provenance["tensors"]["healed"] == sorted(changed)
    assert (provenance["method"], provenance["kind"]) == ("mean", "MQA")
    assert provenance["conversion"]["recipe"]["mqa"]["method"] == "mean"


def test_other_code_beside_the_weights_is_said_and_replaced(
    checkpoint: Make, text: Path, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    mqa(checkpoint("gpt_neox"), tmp_path / "mqa", method="mean")
    file = tmp_path / "mqa" / CODE[1].name
    file.write_text("import this\n" + file.read_text())
    heal(tmp_path / "mqa", tmp_path / "out", text=text, **SIZES)
    assert (tmp_path / "out" / file.name).read_bytes() == CODE[1].read_bytes()
    said = unlike_ours(tmp_path / "mqa")
    assert f"in place of {file.name} (version " in str(said)
    assert f"{said}; the result gets kvfold's" in warned()
    load(tmp_path / "mqa")
    assert warned()[-1] == said
    report = evaluate([tmp_path / "mqa", tmp_path / "out"], text=text, context=32, max_tokens=128)
    assert [model["code"] for model in report["models"]] == [said, None]
    assert f"Warning: of mqa, {said}." in "\n".join(_remarks(report))
    file.write_bytes(CODE[1].read_bytes())
    assert unlike_ours(tmp_path / "mqa") is None
    config = tmp_path / "mqa" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": {"AutoConfig": "evil--code.Config"}}))
    heal(tmp_path / "mqa", tmp_path / "again", text=text, **SIZES)
    assert "in place of the code that auto_map names in" in warned()[-2]  # before what few held-out tokens mean
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_another_teacher_than_the_stated_source_is_said(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    source = checkpoint("llama")
    mqa(source, tmp_path / "mqa", method="mean")
    said = "conversion.json says that it was made from"
    known = heal(tmp_path / "mqa", tmp_path / "out", text=text, dry_run=True, **SIZES)
    same = heal(tmp_path / "mqa", tmp_path / "out", text=text, teacher=source, dry_run=True, **SIZES)
    assert not any(said in note for plan in (known, same) for note in plan.plan.notes)
    other = heal(tmp_path / "mqa", tmp_path / "out", text=text, teacher=tmp_path / "mqa", dry_run=True, **SIZES)
    assert any(f"{said} {source}, and the teacher is {tmp_path / 'mqa'}" in note for note in other.plan.notes)


def test_what_a_single_step_gains_is_kept(converted: Path, text: Path, tmp_path: Path) -> None:
    done = heal(converted, tmp_path / "out", text=text, **(SIZES | {"tokens": 10, "batch_tokens": None}))
    start, end = done.curve
    assert (end["tokens"], done.provenance["healing"]["rates_tried"]) == (16, {}), "a whole block, and no trials"
    assert end["kl"] < start["kl"]
    assert done.provenance["healing"]["after"]["kl"] == pytest.approx(end["kl"])


def test_too_few_held_out_tokens_are_said(
    converted: Path, text: Path, tmp_path: Path, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    heal(converted, tmp_path / "out", text=text, **SIZES)
    assert any(
        "736 held-out tokens judge the healing" in line and "2048 are held out of a text of 16384" in line for line in warned()
    )
    monkeypatch.setattr("convert.healing.run.LEAST_HELD_OUT", 736)
    heal(converted, tmp_path / "again", text=text, **SIZES)
    assert sum("judge the healing" in line for line in warned()) <= 1


def test_shards_stay_as_they_are(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    mla(checkpoint("llama"), tmp_path / "mla", kv_lora_rank=24, qk_rope_head_dim=8, method="svd", max_shard_size="40KB")
    heal(tmp_path / "mla", tmp_path / "out", text=text, **SIZES)
    files = {path.name for path in (tmp_path / "mla").glob("*.safetensors*")}
    assert len(files) > 2
    for name in files:
        if name.endswith(".json"):
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "mla" / name).read_bytes()
        else:
            assert load_file(tmp_path / "out" / name).keys() == load_file(tmp_path / "mla" / name).keys()


@pytest.mark.parametrize("written", [False, True])  # some engines want the head in the file, too
def test_tied_heads_stay_tied(written: bool, checkpoint: Make, text: Path, tmp_path: Path) -> None:
    mqa(checkpoint("llama", tie_word_embeddings=True), tmp_path / "mqa", method="mean")
    found = weights(tmp_path / "mqa")
    embeddings = found["model.embed_tokens.weight"]
    if written:
        save_file(found | {"lm_head.weight": embeddings.clone()}, tmp_path / "mqa" / "model.safetensors")
    heal(tmp_path / "mqa", tmp_path / "out", text=text, train="all", **SIZES)
    healed = weights(tmp_path / "out")
    assert ("lm_head.weight" in healed) == written
    assert torch.equal(healed.get("lm_head.weight", healed["model.embed_tokens.weight"]), healed["model.embed_tokens.weight"])
    assert not torch.equal(healed["model.embed_tokens.weight"], embeddings)


def test_constants_and_padding_of_a_latent_stay(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    mla(checkpoint("llama"), tmp_path / "mla", kv_lora_rank=80, qk_rope_head_dim=8, pad_rank=True, method="svd")
    found = weights(tmp_path / "mla")
    for name in (name for name in found if name.endswith("o_proj.weight")):
        found[name] *= 1.3  # something to heal
    save_file(found, tmp_path / "mla" / "model.safetensors")
    heal(tmp_path / "mla", tmp_path / "out", text=text, **(SIZES | {"lr": 3e-4}))
    before, after = weights(tmp_path / "mla"), weights(tmp_path / "out")
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn."
        norm, bias, down = (
            f"{name}{part}" for part in ("kv_a_layernorm.weight", "kv_a_proj_with_mqa.bias", "kv_a_proj_with_mqa.weight")
        )
        assert torch.equal(before[norm], after[norm])
        assert torch.equal(before[bias][:80], after[bias][:80])
        empty = (before[down] == 0).all(1)
        assert empty.any()
        assert (after[down][empty] == 0).all()
        assert not torch.equal(before[down], after[down])
    mla(
        tmp_path / "out", tmp_path / "again", kv_lora_rank=16, qk_rope_head_dim=8, method="svd"
    )  # it is a source like any other


@pytest.mark.parametrize("model_type", rows(["gpt2", "qwen3", "qwen2", "gpt_neox"], ["gpt2", "qwen3"]))
def test_results_in_other_classes(model_type: str, checkpoint: Make, text: Path, tmp_path: Path) -> None:
    mla(
        checkpoint(model_type),
        tmp_path / "mla",
        kv_lora_rank=24,
        qk_rope_head_dim=0 if model_type == "gpt2" else 4,
        method="svd",
    )
    done = heal(tmp_path / "mla", tmp_path / "out", text=text, **(SIZES | {"lr": 3e-4}))
    assert done.provenance["healing"]["after"]["kl"] < done.provenance["healing"]["before"]["kl"]
    for name in ("config.json", *(path.name for path in (tmp_path / "mla").glob("*.py"))):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "mla" / name).read_bytes()


def test_what_loses_nothing_stays_bit_for_bit(
    checkpoint: Make, text: Path, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    mqa(checkpoint("llama", duplicated=4), tmp_path / "mqa", method="mean")
    done = heal(tmp_path / "mqa", tmp_path / "out", text=text, **SIZES)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "mqa" / "model.safetensors").read_bytes()
    assert any("loses nothing" in line for line in warned())
    assert "there was nothing to gain" in str(done)
    assert "changed no weights" in (tmp_path / "out" / "README.md").read_text()


def uphill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step go up its gradient: a training that gains nothing, whatever its weights are."""
    monkeypatch.setattr("convert.healing.trainer.share", lambda step, steps: -share(step, steps))


def test_what_gains_nothing_stays_bit_for_bit(
    checkpoint: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uphill(monkeypatch)
    mla(checkpoint("llama"), tmp_path / "mla", kv_lora_rank=24, qk_rope_head_dim=8, method="svd")
    done = heal(tmp_path / "mla", tmp_path / "out", text=text, **SIZES)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "mla" / "model.safetensors").read_bytes()
    found = [point["kl"] for point in done.curve]
    assert found == sorted(found)
    assert len(found) == 6  # the start, the first point of the training, and four that were no better
    assert done.provenance["healing"]["after"]["step"] == 0


def stopping(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Raise an error before this step is taken, once."""
    taken = HealingTrainer.compute_loss

    def stopped(self: HealingTrainer, *given: Any, **named: Any) -> Any:
        if self.state.global_step == step:
            monkeypatch.setattr(HealingTrainer, "compute_loss", taken)
            raise error
        return taken(self, *given, **named)

    monkeypatch.setattr(HealingTrainer, "compute_loss", stopped)


@pytest.mark.parametrize("step", rows([1, 7, 19], [7]))
def test_a_stopped_run_ends_as_one_that_was_not(
    step: int, converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = heal(converted, tmp_path / "whole", text=text, **SIZES)
    stopping(monkeypatch, step, KeyboardInterrupt())
    with pytest.raises(Interrupted, match="interrupted"):
        heal(converted, tmp_path / "out", text=text, **SIZES)
    assert not (tmp_path / "out").exists()
    done = heal(converted, tmp_path / "out", text=text, resume=True, **SIZES)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert done.curve == whole.curve
    assert not (tmp_path / "out.partial").exists()


def flipped(checkpoint: Path) -> None:
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / "model.safetensors").write_bytes(data)


def cut_to_a_row(checkpoint: Path) -> None:
    found = load_file(checkpoint / "model.safetensors")
    name = next(name for name, weight in found.items() if weight.ndim > 1)
    save_file(found | {name: found[name][:1].clone()}, checkpoint / "model.safetensors")


def progressed(checkpoint: Path) -> None:
    found = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps(found | {"global_step": 10**9}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flipped,
    "a tensor cut to its first row": cut_to_a_row,
    "no optimizer": lambda checkpoint: (checkpoint / "optimizer.pt").unlink(),
    "another step": progressed,
    "no JSON": lambda checkpoint: (checkpoint / "sealed.json").write_text("{"),
}


def test_a_damaged_checkpoint_does_not_count(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    whole = heal(converted, tmp_path / "whole", text=text, **SIZES)
    stopping(monkeypatch, 7, KeyboardInterrupt())
    with pytest.raises(Interrupted):
        heal(converted, tmp_path / "out", text=text, **SIZES)
    shutil.copytree(tmp_path / "out.partial", tmp_path / "stopped")
    for damage, damaged in DAMAGES.items():
        (checkpoint,) = (tmp_path / "out.partial" / "training").glob("checkpoint-*")  # its point is the best
        damaged(checkpoint)
        before = len(warned())
        done = heal(converted, tmp_path / "out", text=text, resume=True, **SIZES)
        assert any(f"{checkpoint} is damaged" in line for line in warned()[before:]), damage
        assert done.curve == whole.curve, damage
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "stopped", tmp_path / "out.partial")


def test_a_finished_run_is_not_done_again(
    converted: Path, text: Path, tmp_path: Path, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    heal(converted, tmp_path / "out", text=text, **SIZES)
    stopping(monkeypatch, 0, AssertionError("it trains"))
    heal(converted, tmp_path / "out", text=text, resume=True, **SIZES)
    assert any("finished already" in line for line in warned())


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_best(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = Distillation.forward, [0]

    def broken(self: Any, ids: torch.Tensor, measures: bool = False) -> Any:
        calls[0] += not measures
        found = run(self, ids, measures)
        return found * torch.nan if calls[0] > 5 and not measures else found

    monkeypatch.setattr(Distillation, "forward", broken)
    with pytest.raises(Failure, match="the norm of the gradients is nan at step 6") as error:
        heal(converted, tmp_path / "out", text=text, **SIZES)
    assert "--lr" in str(error.value.hint)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out.partial" / "training").glob("checkpoint-*/model.safetensors"))


def test_without_memory_it_says_what_takes_less_and_goes_on(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping(monkeypatch, 5, torch.OutOfMemoryError("out of memory"))
    with pytest.raises(Failure, match="no memory left on cpu") as error:
        heal(converted, tmp_path / "out", text=text, **SIZES)
    assert "--checkpointing" in str(error.value.hint)
    done = heal(converted, tmp_path / "out", text=text, resume=True, checkpointing=True, micro_batch_tokens=16, **SIZES)
    assert done.curve[-1]["step"] == 20


def test_a_full_disk_leaves_what_can_be_resumed(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = heal(converted, tmp_path / "whole", text=text, **SIZES)
    save, calls = torch.save, [0]

    def full(*arguments: Any, **options: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")
        save(*arguments, **options)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(Failure, match=r"stopped: cannot write .*file write failed") as error:
        heal(converted, tmp_path / "out", text=text, **SIZES)
    assert "--resume" in str(error.value.hint)
    done = heal(converted, tmp_path / "out", text=text, resume=True, **SIZES)
    assert done.curve == whole.curve
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_layers_computed_again_give_the_same(converted: Path, text: Path, tmp_path: Path) -> None:
    plain = heal(converted, tmp_path / "plain", text=text, **SIZES)
    again = heal(converted, tmp_path / "again", text=text, checkpointing=True, **SIZES)
    assert [point["kl"] for point in again.curve] == pytest.approx([point["kl"] for point in plain.curve], rel=1e-4)


def test_parts_of_a_step_give_what_the_whole_step_gives(converted: Path, text: Path, tmp_path: Path) -> None:
    plain = heal(converted, tmp_path / "plain", text=text, **SIZES)
    parts = heal(converted, tmp_path / "parts", text=text, micro_batch_tokens=16, **SIZES)
    assert [point["kl"] for point in parts.curve] == pytest.approx([point["kl"] for point in plain.curve], rel=1e-4)


# At rates that are too high, training is chaos: another CPU finds another one best.
@pytest.mark.parametrize(
    ("start", "counts"), [(2.7e-2, [3]), (3e-5, [6]), (2.7, [3, 4])], ids=["around the best", "too low", "too high"]
)
def test_a_rate_is_chosen_among_three_or_beyond_them(
    start: float, counts: list[int], converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.healing.plan.start_rate", lambda loss, width: start)
    done = heal(converted, tmp_path / "out", text=text, **(TRIED | {"tokens": 300 * 16}))
    tried, rate = done.provenance["healing"]["rates_tried"], done.provenance["healing"]["rate"]
    assert len(tried) in counts  # without those at which the loss is not finite
    assert rate == max(float(rate) for rate, kl in tried.items() if kl <= 1.1 * min(tried.values()))
    rates = sorted(map(float, tried))
    assert rates[1:] == pytest.approx([3 * rate for rate in rates[:-1]], rel=1e-2)
    assert counts == [6] or rates[0] < rate < rates[-1]


def test_rates_are_not_tried_for_longer_than_a_fifth_of_the_steps(converted: Path, text: Path, tmp_path: Path) -> None:
    done = heal(converted, tmp_path / "out", text=text, **(TRIED | {"tokens": 149 * 16}))
    assert done.provenance["healing"]["rates_tried"] == {}
    assert done.provenance["healing"]["rate"] == pytest.approx(start_rate(done.curve[0]["loss_nats"], 64))


def test_the_text_itself_helps_too(converted: Path, text: Path, tmp_path: Path) -> None:
    done = heal(converted, tmp_path / "out", text=text, ce=0.1, **SIZES)
    assert done.provenance["healing"]["after"]["kl"] < done.provenance["healing"]["before"]["kl"]


def test_held_out_text_is_evaluated_and_warned_of(
    converted: Path, text: Path, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    done = heal(converted, tmp_path / "out", text=text, evaluate=text, **SIZES)
    assert done.report is not None
    assert [entry["name"] for entry in done.report["models"]] == ["source", "converted", "healed"]
    assert done.report["models"][2]["kl_to_source"] < done.report["models"][1]["kl_to_source"]
    assert any("shares 100% of its runs with the training text" in line for line in warned())
    assert done.report["protocol"]["context"] == 16
    assert done.report["models"][2]["method"] == "mean"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "→ 192 bytes per token (25.0 %), by method `mean`." in card
    assert "| healed |" in card
    assert "## Loading" in card
    assert str(tmp_path / "out.partial") not in json.dumps(done.provenance["evaluation"])


@pytest.mark.parametrize(
    ("left", "expected"), [("provenance", "ordinary `llama` checkpoint"), ("nothing", "as the one that it was healed")]
)
def test_the_card_says_how_to_load_it_from_the_provenance_alone(
    converted: Path, text: Path, tmp_path: Path, left: str, expected: str
) -> None:
    shutil.copytree(converted, tmp_path / "model")
    (tmp_path / "model" / "README.md").unlink()
    provenance = tmp_path / "model" / "conversion.json"
    known = json.loads(provenance.read_text())
    provenance.write_text(json.dumps(known if left == "provenance" else {"source": known["source"]}))
    heal(tmp_path / "model", tmp_path / "out", text=text, teacher=known["recipe"]["mqa"]["model"], **(SIZES | {"tokens": 64}))
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert card.count("## Loading") == 1
    assert expected in card.partition("## Loading")[2]


@pytest.mark.parametrize(
    "spoilt", [{"loading": {"model_type": "llama"}}, {"metadata": "x"}, {"loading": None, "metadata": {"tags": "x"}}], ids=str
)
def test_provenance_of_another_shape_does_not_stop_the_card(
    converted: Path, text: Path, tmp_path: Path, spoilt: dict[str, Any]
) -> None:
    shutil.copytree(converted, tmp_path / "model")
    provenance = tmp_path / "model" / "conversion.json"
    provenance.write_text(json.dumps(json.loads(provenance.read_text()) | spoilt))
    heal(tmp_path / "model", tmp_path / "out", text=text, **(SIZES | {"tokens": 64}))
    assert "## Loading" in (tmp_path / "out" / "README.md").read_text()


def test_the_curve_is_beside_the_weights(converted: Path, text: Path, tmp_path: Path) -> None:
    done = heal(converted, tmp_path / "out", text=text, **SIZES)
    lines = (tmp_path / "out" / "healing.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == done.curve


def test_a_tracker_gets_the_curve(converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, dict[str, float]]] = []

    class Tracker(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **named: Any) -> None:
            found.append((state.global_step, dict(logs)))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Tracker)
    monkeypatch.setattr(integrations, "get_available_reporting_integrations", lambda: ["wandb"])
    done = heal(converted, tmp_path / "out", text=text, track="wandb", **SIZES)
    assert [(step, logs["eval_kl"]) for step, logs in found if "eval_kl" in logs] == [
        (point["step"], point["kl"]) for point in done.curve[1:]
    ]
    assert sum("loss" in logs for _, logs in found) == 20


def test_trackers_that_do_not_start_are_named(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tracker(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            raise ValueError("no key")

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Tracker)
    monkeypatch.setattr(integrations, "get_available_reporting_integrations", list)
    with pytest.raises(Refusal, match="the package of the tracker wandb is not installed"):
        heal(converted, tmp_path / "out", text=text, track="wandb", dry_run=True, **SIZES)
    with pytest.raises(Refusal, match="transformers knows no tracker 'pencil'"):
        heal(converted, tmp_path / "out", text=text, track="pencil", dry_run=True, **SIZES)
    monkeypatch.setattr(integrations, "get_available_reporting_integrations", lambda: ["wandb"])
    with pytest.raises(Failure, match="the tracker wandb does not start: ValueError: no key"):
        heal(converted, tmp_path / "out", text=text, track="wandb", **SIZES)


def test_the_same_command_twice_gives_the_same_bytes(converted: Path, text: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        heal(converted, tmp_path / name, text=text, **SIZES)
    for path in sorted((tmp_path / "one").iterdir()):
        found = [(tmp_path / name / path.name).read_bytes() for name in ("one", "two")]
        if path.name == "conversion.json":
            found = [json.dumps({k: v for k, v in json.loads(raw).items() if k != "run"}).encode() for raw in found]
        assert found[0] == found[1], path.name


def test_checkpoints_outlive_a_resumed_run_that_fails(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = heal(converted, tmp_path / "whole", text=text, **SIZES)
    stopping(monkeypatch, 7, KeyboardInterrupt())
    with pytest.raises(Interrupted):
        heal(converted, tmp_path / "out", text=text, **SIZES)
    stopping(monkeypatch, 6, Failure("something else"))
    with pytest.raises(Failure, match="something else"):
        heal(converted, tmp_path / "out", text=text, resume=True, **SIZES)
    done = heal(converted, tmp_path / "out", text=text, resume=True, **SIZES)
    assert done.curve == whole.curve


def test_a_rate_that_blows_up_leaves_nothing_behind(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two largest of three rates give no finite loss; the gradients of these steps must not get into others."""
    forward, run, rates = Distillation.forward, HealingTrainer.run, [0.0]

    def noted(self: HealingTrainer, steps: int, rate: float, *given: Any) -> None:
        rates.append(rate)
        run(self, steps, rate, *given)

    def broken(self: Any, ids: torch.Tensor, measures: bool = False) -> Any:
        found = forward(self, ids, measures)
        return found * torch.nan if not measures and rates[-1] > 2e-4 else found

    monkeypatch.setattr(HealingTrainer, "run", noted)
    monkeypatch.setattr(Distillation, "forward", broken)
    monkeypatch.setattr("convert.healing.plan.start_rate", lambda loss, width: 4e-4)
    done = heal(converted, tmp_path / "out", text=text, **TRIED)
    assert max(map(float, done.provenance["healing"]["rates_tried"])) == done.provenance["healing"]["rate"] == 1.33e-4
    monkeypatch.undo()
    plain = heal(converted, tmp_path / "plain", text=text, **(TRIED | {"lr": 1.33e-4}))
    assert done.curve == plain.curve


def test_a_run_that_stopped_early_stays_so_when_resumed(
    checkpoint: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convert.output import evaluation

    uphill(monkeypatch)
    mla(checkpoint("llama"), tmp_path / "mla", kv_lora_rank=24, qk_rope_head_dim=8, method="svd")
    whole = heal(tmp_path / "mla", tmp_path / "whole", text=text, **SIZES)
    assert whole.curve[-1]["step"] < 20

    def failing(*arguments: Any, **options: Any) -> None:
        raise Failure("no evaluation today")

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "report_of", failing)
        with pytest.raises(Failure, match="the healing is done, its evaluation failed"):
            heal(tmp_path / "mla", tmp_path / "out", text=text, evaluate=text, **SIZES)
    stopping(monkeypatch, whole.curve[-1]["step"], AssertionError("it trains on"))
    done = heal(tmp_path / "mla", tmp_path / "out", text=text, resume=True, **SIZES)
    assert done.curve == whole.curve


def test_figures_are_of_the_weights_that_are_written(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    mqa(checkpoint("llama"), tmp_path / "mqa", method="mean", dtype="bfloat16")
    done = heal(tmp_path / "mqa", tmp_path / "out", text=text, **SIZES)
    after = done.provenance["healing"]["after"]
    best = min(done.curve, key=lambda point: point["kl"])
    assert after["step"] == best["step"]
    assert after["kl"] != best["kl"]  # rounded to bfloat16
    assert after["kl"] == pytest.approx(best["kl"], rel=0.05)
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}
    # A healing of the result begins there.
    again = heal(tmp_path / "out", tmp_path / "again", text=text, **SIZES)
    assert again.curve[0]["kl"] == pytest.approx(after["kl"], rel=1e-5)
    assert again.provenance["conversion"]["recipe"]["mqa"]["method"] == "mean"
    assert again.provenance["recipe"]["heal"]["teacher"] == str(tmp_path / "source")


class TestRefusals:
    """What arguments and configs show is refused before weights are read."""

    def test_another_vocabulary(self, converted: Path, text: Path, tmp_path: Path) -> None:
        tiny_model(tiny_config("llama", vocab_size=80)).save_pretrained(tmp_path / "other")
        with pytest.raises(ValueError, match=rf"\({VOCABULARY} tokens\) and its teacher .* \(80\) differ"):
            heal(converted, tmp_path / "out", teacher=tmp_path / "other", text=text, **SIZES)

    def test_a_source_that_is_gone(self, converted: Path, text: Path, tmp_path: Path) -> None:
        (tmp_path / "source").rename(tmp_path / "moved")
        with pytest.raises(ValueError, match="which is not there") as error:
            heal(converted, tmp_path / "out", text=text, **SIZES)
        assert "--teacher" in str(error.value.hint)  # type: ignore[attr-defined]
        heal(converted, tmp_path / "out", teacher=tmp_path / "moved", text=text, **SIZES)

    def test_a_model_that_nobody_converted(self, checkpoint: Make, text: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="names its source"):
            heal(checkpoint("llama"), tmp_path / "out", text=text, **SIZES)

    def test_a_text_shorter_than_a_step(self, converted: Path, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="has 0 blocks of 16 tokens, too few to hold one out"):
            heal(converted, tmp_path / "out", text=["too short"], **SIZES)
        assert not (tmp_path / "out.partial").exists()

    def test_an_output_that_exists(self, converted: Path, text: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="lie inside each other"):
            heal(converted, converted, text=text, **SIZES)
        heal(converted, tmp_path / "out", text=text, **SIZES)
        with pytest.raises(ValueError, match="exists already"):
            heal(converted, tmp_path / "out", text=text, **SIZES)
        heal(converted, tmp_path / "out", text=text, overwrite=True, **SIZES)

    def test_wrong_numbers(self, converted: Path, text: Path, tmp_path: Path) -> None:
        for changes, says in (
            ({"lr": 0.0}, "lr is"),
            ({"tokens": 0}, "tokens is 0"),
            ({"tokens": "many"}, "invalid number of tokens"),
            ({"context": 500}, "exceeds the 128 positions"),
            ({"ce": -1.0}, "ce is"),
            ({"device": "tpu"}, "no device 'tpu'|not supported"),
            ({"effort": "all", "tokens": None}, "no effort 'all'"),
            ({"train": "everything"}, "nothing trains 'everything'"),
            ({"lr": "fast"}, "invalid learning rate 'fast'"),
        ):
            with pytest.raises(ValueError, match=says):
                heal(converted, tmp_path / "out", **(SIZES | {"text": text} | changes))

    def test_pickled_weights_and_stacked_experts(self, checkpoint: Make, text: Path, tmp_path: Path) -> None:
        mqa(checkpoint("mixtral"), tmp_path / "mqa", method="mean")
        with pytest.raises(ValueError, match="cannot be written back"):
            heal(tmp_path / "mqa", tmp_path / "out", text=text, train="all", dry_run=True, **SIZES)
        torch.save(weights(tmp_path / "mqa"), tmp_path / "mqa" / "pytorch_model.bin")
        (tmp_path / "mqa" / "model.safetensors").unlink()
        with pytest.raises(ValueError, match="holds pickled weights"):
            heal(tmp_path / "mqa", tmp_path / "out", text=text, **SIZES)

    def test_another_tokenizer(self, converted: Path, text: Path, tmp_path: Path) -> None:
        save_tokenizer(converted, 64)
        with pytest.raises(RuntimeError, match="make other tokens of the same text"):
            heal(converted, tmp_path / "out", text=text, **SIZES)


def test_command_line(converted: Path, text: Path, tmp_path: Path, convert: Callable[..., Any]) -> None:
    sizes = ["--tokens", "1280", "--context", 16, "--batch-tokens", 64, "--device", "cpu"]
    planned = convert("heal", converted, tmp_path / "out", "--text", text, *sizes, "--dry-run")
    assert planned.exit_code == 0
    assert "1280 tokens of train.txt in 20 steps of 4 × 16, 24% of the text" in planned.stdout.replace(f"{tmp_path}/", "")
    assert "the steps are too few to try others" in planned.stdout
    assert "each tried for 10 steps" in str(heal(converted, tmp_path / "out", text=text, dry_run=True, **TRIED))
    assert not (tmp_path / "out.partial").exists()
    done = convert("heal", converted, tmp_path / "out", "--text", text, *sizes, "--lr", "3e-3", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["conversion"]["healing"]["rate"] == 3e-3
    again = convert("run", tmp_path / "out", tmp_path / "again", "--text", text)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert convert("heal", converted, tmp_path / "x", "--text", text, "--lr", "fast").exit_code == 2


# ---- formats of the cache --------------------------------------------------------------------------------------------


@pytest.fixture
def latent(checkpoint: Make, text: Path, tmp_path: Path) -> Path:
    """A latent that a cache in few bits can hold, made for one, far from its source."""
    options: dict[str, Any] = {"method": "svd", "no_text": True, "cache_dtype": "int2"}
    mla(checkpoint(), tmp_path / "latent", kv_lora_rank=24, qk_rope_head_dim=8, **options)
    return tmp_path / "latent"


def test_training_goes_through_the_rounding_of_the_cache(latent: Path, text: Path, tmp_path: Path) -> None:
    """By default for the format that the conversion was made for; over such a cache, the result is closer to its source."""
    sizes = SIZES | {"lr": 1e-3}
    through, plain = heal(latent, tmp_path / "through", text=text, **sizes).provenance, tmp_path / "plain"
    without = heal(latent, plain, text=text, cache_dtype="float32", **sizes).provenance
    assert through["kv_bytes_per_token"] == {"before": 768, "after": 48, "cache_dtype": "int2"}
    assert without["kv_bytes_per_token"] == {"before": 768, "after": 384, "cache_dtype": "float32"}
    assert through["healing"]["before"]["kl"] > 1.02 * without["healing"]["before"]["kl"]  # what rounding costs
    assert "through its rounding" in (tmp_path / "through" / "README.md").read_text()
    assert "through its rounding" not in (plain / "README.md").read_text()
    paths = [tmp_path / "source", latent, tmp_path / "through"]
    report = evaluate(paths, text=text, context=16, max_tokens=2000, cache_dtype=["int2"])
    _, before, after = (model["kl_to_source"] for model in report["models"] if model["cache_format"])
    assert after < 0.8 * before


def test_what_cannot_be_trained_through_a_cache_is_refused(latent: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="--checkpointing computes layers again without a cache"):
        heal(latent, tmp_path / "out", text=text, checkpointing=True, **SIZES)
    with pytest.raises(Refusal, match="no KV cache is kept in 'int5'"):
        heal(latent, tmp_path / "out", text=text, cache_dtype="int5", **SIZES)
