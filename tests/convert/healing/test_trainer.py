"""Steps: one is that of AdamW, however it is divided; rates follow the schedule, and what is fixed stays."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, tiny_config, tiny_model

from convert.families import family_of
from convert.healing.loss import Distillation
from convert.healing.plan import named
from convert.healing.texts import TrainingText
from convert.healing.trainable import Trainable, compute_layers_again, fixed
from convert.healing.trainer import HealingTrainer, NotFinite, share
from eval.inputs.text import Tokens


def text(vocabulary: int = 96) -> TrainingText:
    ids = torch.randint(4, vocabulary, (16 * 40,), generator=torch.Generator().manual_seed(2))
    plan: Any = SimpleNamespace(context=16, tokens=10**6, batch=4, retrieval_limit=16)
    return TrainingText.of(plan, [Tokens("random", ids, len(ids), 1.0, None)])


def trainer(student: Any, teacher: Any, directory: Path, micro_batch: int = 2) -> HealingTrainer:
    names = named(student, family_of(student.config.model_type).of(student.config), range(3), "attention")
    what = Trainable(student.requires_grad_(False), names)
    module = Distillation(student, teacher.requires_grad_(False), VOCABULARY)
    plan: Any = SimpleNamespace(
        batch=4, micro_batch=micro_batch, context=16, seed=0, device="cpu", output=SimpleNamespace(path=directory)
    )
    return HealingTrainer(plan, text(), module, what, directory)


def ignored(tokens: int) -> None: ...


def test_a_step_is_one_of_adamw_on_the_mean_of_all_tokens(tmp_path: Path) -> None:
    config = tiny_config("llama")
    student, other, teacher = tiny_model(config, 1), tiny_model(config, 1), tiny_model(config, 2)
    for model in (student, other):  # smaller than usual, as others are larger
        model.model.layers[1].self_attn.q_proj.weight.detach().mul_(0.01)
    stepping = trainer(student, teacher, tmp_path)
    weights = {name: p for name, p in other.named_parameters() if "self_attn" in name or "input_layernorm" in name}
    other.requires_grad_(False)
    for parameter in weights.values():
        parameter.requires_grad_(True)
    scales = {p: max(1, float(p.detach().square().mean().sqrt()) / 0.02) for p in weights.values() if p.ndim > 1}
    groups = [{"params": [p], "lr": 1e-3 * scale, "weight_decay": 0.01} for p, scale in scales.items()]
    groups += [{"params": [p], "lr": 1e-3, "weight_decay": 0} for p in weights.values() if p.ndim == 1]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    ids = text().blocks[text().order(4, 0)]
    expected = teacher(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    logits = other(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    loss = (expected.exp() * (expected - logits)).sum(-1).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
    optimiser.step()
    stepping.run(1, 1e-3, ignored)
    assert stepping.state.log_history[-1]["train_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, weight in stepping.weights().items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def llamas(directory: Path, micro_batch: int = 2) -> HealingTrainer:
    config = tiny_config("llama")
    return trainer(tiny_model(config, 1), tiny_model(config, 2), directory, micro_batch)


def assert_alike(found: HealingTrainer, expected: HealingTrainer, tolerance: float) -> None:
    for name, weight in expected.weights().items():
        torch.testing.assert_close(found.weights()[name], weight, rtol=0, atol=tolerance, msg=name)


def test_parts_of_a_step_and_layers_computed_again_give_what_the_whole_step_gives(tmp_path: Path) -> None:
    whole, parts, again = llamas(tmp_path, 4), llamas(tmp_path, 1), llamas(tmp_path, 4)
    compute_layers_again(again.model.student)
    for stepping in (whole, parts, again):
        stepping.run(2, 1e-4, ignored)
    assert_alike(parts, whole, 1e-5)
    assert_alike(again, whole, 1e-5)


def test_steps_that_are_not_finite_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients must not get into others, once the weights are restored."""
    stepping, plain, compute = llamas(tmp_path), llamas(tmp_path), HealingTrainer.compute_loss
    weights = stepping.weights()
    with monkeypatch.context() as patch:
        patch.setattr(HealingTrainer, "compute_loss", lambda self, *given, **named: compute(self, *given, **named) * torch.nan)
        with pytest.raises(NotFinite, match="the norm of the gradients is nan at step 1") as error:
            stepping.run(2, 1e-2, ignored)
    assert "--lr" in str(error.value.hint)
    stepping.restore(weights)
    for one in (stepping, plain):
        one.run(2, 1e-3, ignored)
    assert_alike(stepping, plain, 0)


def test_what_is_fixed_stays_under_all_steps(tmp_path: Path) -> None:
    teacher, student = tiny_model(tiny_config("llama")), tiny_model(tiny_config("deepseek_v3", q_lora_rank=80))
    stepping = trainer(student, teacher, tmp_path)
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    stepping.run(5, 1e-2, ignored)
    after, masks = dict(student.named_parameters()), fixed(student)
    assert masks
    for name, mask in masks.items():
        assert torch.equal(after[name][mask], before[name][mask]), name
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in changed
    assert changed == set(stepping.weights())


def test_the_rate_rises_and_falls() -> None:
    shares = [share(step, 1000) for step in range(1000)]
    assert shares[0] == 0.1
    assert shares[9] == shares[10] == 1
    assert shares[504] == pytest.approx(0.5, abs=0.01)
    assert shares[999] < 1e-4
    assert all(a >= b for a, b in itertools.pairwise(shares[10:]))
    assert share(0, 1) == 1
