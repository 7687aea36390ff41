"""Healing from end to end: what it gains, what it leaves alone, and what happens when it is stopped."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, integrations
from transformers.integrations import integration_utils
from written import Convert, Logits, constants_stay, edit, raising, refused, same_but_for_the_run, weights

from attention.errors import Failure, Interrupted, Refusal
from attention.models import AUTO_MAP, CODE
from convert import Healing, heal
from convert.healing import run
from convert.healing.texts import TrainingTexts
from convert.healing.trainer import HealingTrainer, share
from convert.healing.weights import write_beside
from convert.output.destination import Output
from eval import evaluate
from eval.inputs.source import Source

Results = Callable[[str], Path]
Sizes = dict[str, Any]


def same_weights(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_it_comes_closer_to_its_source(healed: Healing, converted: Path, logits: Logits) -> None:
    course = healed.provenance["healing"]
    assert course["after"]["kl"] < 0.9 * course["before"]["kl"]
    assert [point["step"] for point in healed.curve] == [0, 2, 4, 6, 8, 10]
    assert (course["tokens"], healed.curve) == (640, course["curve"])
    # The published weights are those of the best point.
    source, before, after = map(logits, (healed.plan.teacher.reference, converted, healed.output))
    distances = [
        torch.nn.functional.kl_div(x.log_softmax(-1), source.log_softmax(-1), log_target=True, reduction="sum")
        for x in (before, after)
    ]
    assert distances[1] < distances[0]
    assert not healed.output.with_name("out.partial").exists()


def test_only_attention_and_its_norms_change(healed: Healing, converted: Path) -> None:
    before, after = weights(converted), weights(healed.output)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert set(before) == set(after)
    assert changed == {name for name in before if "self_attn" in name or "input_layernorm" in name}
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (healed.output / name).read_bytes() == (converted / name).read_bytes()
    provenance = json.loads((healed.output / "conversion.json").read_text())
    assert provenance["tensors"]["healed"] == sorted(changed)
    assert (provenance["method"], provenance["kind"]) == ("mean", "MQA")
    assert provenance["conversion"]["recipe"]["mqa"]["method"] == "mean"


def test_held_out_text_is_evaluated(healed: Healing) -> None:
    assert [entry["name"] for entry in healed.report["models"]] == ["source", "converted", "healed"]
    assert healed.report["models"][2]["kl_to_source"] < healed.report["models"][1]["kl_to_source"]
    assert (healed.report["protocol"]["context"], healed.report["models"][2]["method"]) == (16, "mean")
    card = (healed.output / "README.md").read_text()
    assert "→ 192 bytes per token (25.0 %), by method `mean`." in card
    assert "| healed |" in card
    assert "## Loading" in card
    assert str(healed.output.with_name("out.partial")) not in json.dumps(healed.report)


def test_command_line(healed: Healing, converted: Path, text: Path, sizes: Sizes, tmp_path: Path, convert: Convert) -> None:
    """A command and its recipe give what the API gives; what is finished is not done again, and what differs is refused."""
    other, options = tmp_path / "other.txt", [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    other.write_text("another text " * 100)
    given = ["--text", "self", "--text", text, *options]
    planned = convert("heal", converted, tmp_path / "x", *given, "--dry-run")
    assert "640 tokens of the teacher's own text and " in planned.stdout
    assert "in 10 steps of 4 × 16" in planned.stdout
    assert "GB (student " in planned.stdout
    assert not list(tmp_path.glob("x*"))
    out = Path(shutil.copytree(healed.output, tmp_path / "out"))
    assert "is finished already" in convert("heal", converted, out, *given, "--resume").stderr
    for changed in ([*given[:3], other, *given[4:]], ["--text", text, "--text", "self", *options]):
        refused(convert("heal", converted, out, *changed, "--resume"), 2, "was made by another command, or of others")
    again = convert("run", out, tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert same_weights(tmp_path / "again", out)
    twice = json.loads((tmp_path / "again" / "conversion.json").read_text())
    assert twice["recipe"] == healed.provenance["recipe"]
    assert twice["healing"] == healed.provenance["healing"]


def stopping(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Raise an error before this step is taken, once."""
    taken = HealingTrainer.compute_loss

    def stopped(self: HealingTrainer, *given: Any, **named: Any) -> Any:
        if self.state.global_step == step:
            monkeypatch.setattr(HealingTrainer, "compute_loss", taken)
            raise error
        return taken(self, *given, **named)

    monkeypatch.setattr(HealingTrainer, "compute_loss", stopped)


def test_a_run_that_is_stopped_again_and_again_gives_the_same_bytes(
    healed: Healing, converted: Path, text: Path, sizes: Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the user, for lack of memory, by a failure before the next checkpoint, and by a full disk."""
    out, given = tmp_path / "out", {"text": ["self", text], "evaluate": text} | sizes
    stopping(monkeypatch, 3, KeyboardInterrupt())
    with pytest.raises(Interrupted, match="interrupted"):
        heal(converted, out, **given)
    assert not out.exists()
    monkeypatch.setattr("convert.calibration.own_text._Writer.written", None)  # what was written is not written again
    stopping(monkeypatch, 2, torch.OutOfMemoryError("out of memory"))
    with pytest.raises(Failure, match="no memory left on cpu") as error:
        heal(converted, out, resume=True, **given)
    assert "--checkpointing" in str(error.value.hint)
    stopping(monkeypatch, 3, Failure("something else"))
    with pytest.raises(Failure, match="something else"):
        heal(converted, out, resume=True, **given)
    full = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 19904 vs 19792")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", raising(full))
        with pytest.raises(Failure, match=r"stopped: cannot write .*unexpected pos") as error:
            heal(converted, out, resume=True, **given)
    assert "--resume" in str(error.value.hint)
    done = heal(converted, out, resume=True, **given)
    assert done.curve == healed.curve
    same_but_for_the_run(out, healed.output)
    assert not list(tmp_path.glob("out.partial"))


def test_other_code_beside_the_weights_is_said(
    results: Results, text: Path, sizes: Sizes, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    path = Path(shutil.copytree(results("gpt_neox mqa"), tmp_path / "mqa"))
    file = path / "modeling_kvfold.py"
    file.write_text("import this\n" + file.read_text())
    heal(path, tmp_path / "out", text=text, **(sizes | {"tokens": 64}))
    assert (tmp_path / "out" / file.name).read_bytes() == (results("gpt_neox mqa") / file.name).read_bytes()
    assert any(f"in place of {file.name} (version " in said and "; the result gets kvfold's" in said for said in warned())
    assert any("only 192 held-out tokens judge" in said and "2048 are held out of a text of 16384" in said for said in warned())


def test_what_a_single_step_gains_is_kept(results: Results, text: Path, tmp_path: Path) -> None:
    """Of a latent in kvfold's class, from GPT-2's transposed matrices; the rate follows from the loss."""
    path = results("gpt2 mla")
    done = heal(path, tmp_path / "out", text=text, tokens=10, context=16, device="cpu")
    start, end = done.curve
    course = done.provenance["healing"]
    assert (end["tokens"], course["rates_tried"]) == (16, {}), "a whole block, and no trials"
    assert course["rate"] == 3e-6
    assert course["after"]["kl"] == pytest.approx(end["kl"])
    assert end["kl"] < start["kl"]
    for name in ("config.json", *(file.name for file in path.glob("*.py"))):
        assert (tmp_path / "out" / name).read_bytes() == (path / name).read_bytes()


def test_shards_tied_heads_constants_and_padding_stay_as_they_are(
    results: Results, text: Path, sizes: Sizes, tmp_path: Path
) -> None:
    """All weights train, and the head is in the files, as some engines want it."""
    path = tmp_path / "mla"
    path.mkdir()
    before = weights(results("padded"))
    embeddings = before["model.embed_tokens.weight"]
    halves = {"one.safetensors": ("model.e", "model.layers.0"), "two.safetensors": ("model.l", "model.n", "lm_head")}
    names: dict[str, str] = {}
    for file, starts in halves.items():
        part = {name: tensor for name, tensor in before.items() if name.startswith(starts) and name not in names}
        part |= {"lm_head.weight": embeddings.clone()} if file.startswith("two") else {}
        save_file(part, path / file, {"format": "pt"})
        names |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "conversion.json"):
        shutil.copyfile(results("padded") / file, path / file)
    heal(path, tmp_path / "out", text=text, train="all", **(sizes | {"lr": 2e-5}))
    untied = shutil.copytree(path, tmp_path / "untied")
    save_file(load_file(path / "two.safetensors") | {"lm_head.weight": 2 * embeddings}, untied / "two.safetensors")
    with pytest.raises(Refusal, match=r"ties model\.embed_tokens\.weight and lm_head\.weight, which differ"):
        heal(untied, tmp_path / "other", text=text, train="all", **sizes)
    for file in halves:
        assert load_file(tmp_path / "out" / file).keys() == load_file(path / file).keys()
    index = "model.safetensors.index.json"
    assert (tmp_path / "out" / index).read_bytes() == (path / index).read_bytes()
    after = weights(tmp_path / "out")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], embeddings)
    constants_stay(before, after)


def test_lora_comes_closer_and_keeps_constants_and_padding(results: Results, text: Path, sizes: Sizes, tmp_path: Path) -> None:
    path = results("padded")
    done = heal(path, tmp_path / "out", text=text, train="lora", **(sizes | {"lr": 5e-5, "tokens": 1280}))
    course = done.provenance["healing"]
    assert course["after"]["kl"] < 0.9 * course["before"]["kl"]
    assert done.provenance["recipe"]["heal"]["lora_rank"] == 16
    before, after = weights(path), weights(tmp_path / "out")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert set(after) == set(before)
    assert all("self_attn" in name or "input_layernorm" in name for name in changed)
    constants_stay(before, after)
    for up in (name for name in before if name.endswith("kv_b_proj.weight")):
        unread = ~before[up].any(0)
        assert unread.any()
        assert not after[up][:, unread].any()
        assert up in changed


def test_what_loses_nothing_stays_bit_for_bit(
    shelf: Callable[..., Path], text: Path, sizes: Sizes, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    """A model that is its own teacher."""
    source = shelf("llama")
    done = heal(source, tmp_path / "out", teacher=source, text=text, **sizes)
    assert same_weights(tmp_path / "out", source)
    assert any("loses nothing" in line for line in warned())
    assert "there was nothing to gain" in str(done)
    assert "changed no weights" in (tmp_path / "out" / "README.md").read_text()


def test_what_gains_nothing_stays_bit_for_bit_and_is_not_trained_again(
    results: Results, text: Path, sizes: Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.healing.trainer.share", lambda step, steps: -share(step, steps))  # up every gradient
    given = {"text": text} | sizes | {"eval_every": 64}
    with monkeypatch.context() as patched:
        patched.setattr("convert.output.evaluation.report_of", raising(Failure("no evaluation today")))
        with pytest.raises(Failure, match="the healing is done, its evaluation failed"):
            heal(results("mla"), tmp_path / "out", evaluate=text, **given)
    stopping(monkeypatch, 5, AssertionError("it trains on"))
    done = heal(results("mla"), tmp_path / "out", resume=True, **given)
    assert same_weights(tmp_path / "out", results("mla"))
    found = [point["kl"] for point in done.curve]
    assert found == sorted(found)
    assert len(found) == 6  # the start, the first point of the training, and four that were no better
    assert done.provenance["healing"]["after"]["step"] == 0


def test_figures_are_of_the_weights_that_are_written(results: Results, text: Path, sizes: Sizes, tmp_path: Path) -> None:
    done = heal(results("bfloat16"), tmp_path / "out", text=text, **sizes)
    after = done.provenance["healing"]["after"]
    best = min(done.curve, key=lambda point: point["kl"])
    assert after["step"] == best["step"]
    assert after["kl"] != best["kl"]  # rounded to bfloat16
    assert after["kl"] == pytest.approx(best["kl"], rel=0.05)
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}
    # A healing of the result begins there.
    again = heal(tmp_path / "out", tmp_path / "again", text=text, **(sizes | {"tokens": 64}))
    assert again.curve[0]["kl"] == pytest.approx(after["kl"], rel=1e-5)
    assert again.provenance["conversion"]["recipe"]["mqa"]["method"] == "mean"
    assert again.provenance["recipe"]["heal"]["teacher"] == done.plan.teacher.reference


def test_training_goes_through_the_rounding_of_the_cache(results: Results, text: Path, sizes: Sizes, tmp_path: Path) -> None:
    """By default for the format that the conversion was made for; over such a cache, the result is closer to its source."""
    done = heal(results("int2"), tmp_path / "out", text=text, **(sizes | {"lr": 7e-5}))
    assert done.provenance["kv_bytes_per_token"] == {"before": 768, "after": 54, "cache_dtype": "int2"}
    assert "through its rounding" in (tmp_path / "out" / "README.md").read_text()
    paths = [done.plan.teacher.reference, results("int2"), tmp_path / "out"]
    report = evaluate(paths, text=text, context=16, max_tokens=2000, cache_dtype=["int2"])
    _, before, after = (model["kl_to_source"] for model in report["models"] if model["cache_format"])
    assert after < 0.9 * before


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    """Let transformers have a tracker."""

    def have(kind: type) -> None:
        monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", kind)
        monkeypatch.setattr(integrations, "get_available_reporting_integrations", lambda: ["wandb"])

    return have


def test_a_tracker_gets_the_curve(
    converted: Path, text: Path, sizes: Sizes, tmp_path: Path, tracked: Callable[[type], None]
) -> None:
    found: list[tuple[int, dict[str, float]]] = []

    class Tracker(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **named: Any) -> None:
            found.append((state.global_step, dict(logs)))

    tracked(Tracker)
    done = heal(converted, tmp_path / "out", text=text, track="wandb", **sizes)
    points = [(step, logs["eval_kl"]) for step, logs in found if "eval_kl" in logs]
    assert points == [(point["step"], point["kl"]) for point in done.curve[1:]]
    assert max(logs.get("learning_rate", 0) for _, logs in found) == pytest.approx(sizes["lr"], rel=0.1)
    assert sum("loss" in logs for _, logs in found) == 10


def test_a_tracker_that_does_not_start_is_named(
    converted: Path, text: Path, sizes: Sizes, tmp_path: Path, tracked: Callable[[type], None]
) -> None:
    class Tracker(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            raise ValueError("no key")

    tracked(Tracker)
    with pytest.raises(Failure, match="the tracker wandb does not start: ValueError: no key"):
        heal(converted, tmp_path / "out", text=text, track="wandb", **sizes)


def test_code_that_config_json_names_elsewhere_is_replaced(results: Results, tmp_path: Path) -> None:
    path = Path(shutil.copytree(results("gpt_neox mqa"), tmp_path / "mqa"))
    edit(path, auto_map={"AutoConfig": "evil--code.Config"})
    write_beside(tmp_path, Source.parse(str(path)), 0)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert all((tmp_path / file.name).read_bytes() == file.read_bytes() for file in CODE)


def test_too_little_memory_is_said(
    converted: Path, text: Path, sizes: Sizes, tmp_path: Path, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    heal(converted, tmp_path / "out", text=text, **sizes)
    monkeypatch.setattr(run, "free_memory", lambda device: 10**3)
    assert not any("GB free" in said for said in warned())
    heal(converted, tmp_path / "again", text=text, **sizes)
    assert any("cpu has 0.0 GB free, and healing takes 0.0 GB without activations" in said for said in warned())


PACES = 0.01, 0.002  # seconds of a token in a step and in a measurement


def test_a_time_is_as_many_tokens_as_it_takes(
    converted: Path, text: Path, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_paces", lambda plan, module: PACES)
    given = {"text": text, "dry_run": True, "context": 32, "batch_tokens": 128, "device": "cpu", "lr": 1e-3}
    for time, seconds in (("1min", 60), (30, 30), ("0.5h", 1800)):
        plan = heal(converted, tmp_path / "out", time=time, **given).plan
        assert run._seconds(plan, TrainingTexts.read(plan), *PACES) == pytest.approx(seconds, rel=0.1)
    for changes, says in (
        ({"time": 1}, r"a healing of 128 tokens takes .* seconds here, longer than --time allows"),
        ({"time": "1h", "tokens": 100}, "contradict each other"),
        ({"time": "1x"}, r"'1x' is not a time"),
    ):
        with pytest.raises(Refusal, match=says):
            heal(converted, tmp_path / "out", **(given | changes))
    monkeypatch.setattr(run, "launched_count", lambda: 2)
    with pytest.raises(Refusal, match="2 processes would each time steps"):
        heal(converted, tmp_path / "two", time=30, **given)


def test_what_was_begun_keeps_its_tokens(healed: Healing, tmp_path: Path) -> None:
    """However fast its steps are now; one that is finished and replaced is timed anew."""
    plan = replace(healed.plan, asked=10**9, output=replace(healed.plan.output, resume=True))
    resumed = run.within(plan, 1.0, lambda *_: None)
    assert (resumed.tokens, resumed.batch, resumed.steps) == (640, 4, 10)
    assert run._begun(replace(plan.output, overwrite=True)) is None
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "inputs.json").write_text('{"tokens": 1280, "batch_tokens": 64}')
    assert run._begun(Output(tmp_path / "out", resume=True, overwrite=True)) == (1280, 64)


def test_steps_are_timed_and_leave_nothing_behind(converted: Path, text: Path, tmp_path: Path) -> None:
    told: list[Any] = []
    sizes = {"context": 32, "batch_tokens": 128, "device": "cpu", "lr": 1e-3, "train": "all"}
    given = {"time": 20, "dry_run": True, "progress": lambda *progress: told.append(progress)}
    assert heal(converted, tmp_path / "out", text=text, **given, **sizes).plan.tokens > 1000
    assert told[-1] == ("time steps", 9, 9, "step")
    assert not list(tmp_path.glob("out*"))
