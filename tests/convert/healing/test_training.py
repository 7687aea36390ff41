"""One step: its gradients are those of a plain one, its rates follow the schedule, and what is fixed stays."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny import VOCABULARY, tiny_config, tiny_model

from attention.encoded_forward import store_encoded
from attention.formats import FORMATS
from attention.rounded import rounding_cache
from attention.spec import AttentionSpec
from convert.families import family_of
from convert.healing.batches import TrainingText
from convert.healing.student import fixed, trained
from convert.healing.teacher import Running
from convert.healing.trainable import Trainable
from convert.healing.training import Distillation, Schedule, Trainer
from eval.inputs.text import Tokens

SCHEDULE = Schedule(steps=10, batch=4, micro_batch=2, rate=1e-2, seed=0)


def text(vocabulary: int = 96) -> TrainingText:
    ids = torch.randint(4, vocabulary, (16 * 40,), generator=torch.Generator().manual_seed(2))
    return TrainingText.of([(Tokens("random", ids, len(ids), 1.0, None), 1.0)], 16, 10**6, 4)


def trainer(student: Any, teacher: Any, schedule: Schedule = SCHEDULE, part: str = "attention") -> Trainer:
    names = trained(student, family_of(student.config.model_type).for_config(student.config), 3, part)
    what = Trainable(student.requires_grad_(False), names)
    module = Distillation(student, Running(teacher.requires_grad_(False), None), 0.0, VOCABULARY)
    return Trainer(Accelerator(cpu=True), module, text(), schedule, what)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ce", [0.0, 0.5])
def test_gradients_of_all_weights_are_those_of_plain_logits(tied: bool, ce: float) -> None:
    config = tiny_config("llama", tie_word_embeddings=tied)
    student, teacher = tiny_model(config, 1), tiny_model(config, 2).requires_grad_(False)
    indices = text().batch(0, 4, 0)
    ids = text().blocks[indices]
    Distillation(student, Running(teacher, None), ce, VOCABULARY)(ids, indices).backward()
    found = {name: p.grad for name, p in student.named_parameters()}
    student.zero_grad()
    logits = student(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    expected = teacher(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    loss = (expected.exp() * (expected - logits)).sum()
    loss = loss + ce * torch.nn.functional.nll_loss(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    loss.backward()
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-4 * largest, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_the_students_cache_is_read_rounded(form: str) -> None:
    config = tiny_config("llama")
    student, teacher = tiny_model(config, 1), tiny_model(config, 2).requires_grad_(False)
    indices, spec = text().batch(0, 4, 0), AttentionSpec.from_config(config)
    ids = text().blocks[indices]
    through = Distillation(student, Running(teacher, None), 0.0, VOCABULARY, partial(rounding_cache, FORMATS[form], spec))
    found = through(ids, indices, measured_blocks=4)
    expected = teacher(ids).logits[:, :-1].log_softmax(-1)
    with torch.no_grad():
        logits = store_encoded(student.eval(), form)(ids).logits[:, :-1].log_softmax(-1)
    assert found.kl == pytest.approx(float((expected.exp() * (expected - logits)).sum()), rel=1e-5)


def test_a_step_is_one_of_adamw_on_the_mean_of_all_tokens() -> None:
    config = tiny_config("llama")
    student, other, teacher = tiny_model(config, 1), tiny_model(config, 1), tiny_model(config, 2)
    stepping = trainer(student, teacher)
    weights = {name: p for name, p in other.named_parameters() if "self_attn" in name or "input_layernorm" in name}
    other.requires_grad_(False)
    for parameter in weights.values():
        parameter.requires_grad_(True)
    groups = [
        {"params": [p for p in weights.values() if (p.ndim > 1) == matrix], "weight_decay": 0.01 * matrix}
        for matrix in (True, False)
    ]
    optimiser = torch.optim.AdamW(groups, lr=SCHEDULE.rate * SCHEDULE.share(0), betas=(0.9, 0.95))
    ids = text().blocks[text().batch(0, 4, 0)]
    expected = teacher(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    logits = other(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    loss = (expected.exp() * (expected - logits)).sum(-1).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
    optimiser.step()
    assert stepping.step(0, SCHEDULE) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, weight in stepping.weights().items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_what_is_fixed_stays_under_all_steps() -> None:
    teacher, student = tiny_model(tiny_config("llama")), tiny_model(tiny_config("deepseek_v3", q_lora_rank=80))
    stepping = trainer(student, teacher)
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    for step in range(5):
        stepping.step(step, SCHEDULE)
    after, masks = dict(student.named_parameters()), fixed(student)
    assert masks
    for name, mask in masks.items():
        assert torch.equal(after[name][mask], before[name][mask]), name
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in changed
    assert changed == set(stepping.weights())


def test_a_state_brings_back_everything() -> None:
    config = tiny_config("llama")
    one = trainer(tiny_model(config, 1), tiny_model(config, 2))
    one.step(0, SCHEDULE)
    state = copy.deepcopy(one.state())  # it shares memory with what trains on
    one.step(1, SCHEDULE)
    other = trainer(tiny_model(config, 1), tiny_model(config, 2))
    other.load(state)
    other.step(1, SCHEDULE)
    assert all(torch.equal(weight, other.weights()[name]) for name, weight in one.weights().items())


def test_the_rate_rises_and_falls() -> None:
    schedule = Schedule(1000, 1, 1, 1.0, 0)
    shares = [schedule.share(step) for step in range(1000)]
    assert shares[0] == 0.1
    assert shares[9] == shares[10] == 1
    assert shares[504] == pytest.approx(0.5, abs=0.01)
    assert shares[999] < 1e-4
    assert all(a >= b for a, b in itertools.pairwise(shares[10:]))
    assert Schedule(1, 1, 1, 1.0, 0).share(0) == 1
