"""Steps: gradients are those of plain logits, a step is one of AdamW, rates follow the schedule, and what is fixed stays."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, tiny_config, tiny_model

from attention.encoded_forward import store_encoded
from attention.formats import FORMATS
from attention.rounded import rounding_cache
from attention.spec import AttentionSpec
from convert.families import family_of
from convert.healing.batches import TrainingText
from convert.healing.student import fixed, trained
from convert.healing.trainable import Trainable
from convert.healing.trainer import Distillation, HealingTrainer, share
from eval.inputs.text import Tokens


def text(vocabulary: int = 96) -> TrainingText:
    ids = torch.randint(4, vocabulary, (16 * 40,), generator=torch.Generator().manual_seed(2))
    return TrainingText.of([(Tokens("random", ids, len(ids), 1.0, None), 1.0)], 16, 10**6, 4)


def trainer(student: Any, teacher: Any, directory: Path) -> HealingTrainer:
    names = trained(student, family_of(student.config.model_type).of(student.config), 3, "attention")
    what = Trainable(student.requires_grad_(False), names)
    module = Distillation(student, teacher.requires_grad_(False), 0.0, VOCABULARY)
    plan: Any = SimpleNamespace(
        batch=4, micro_batch=2, context=16, seed=0, device="cpu", output=SimpleNamespace(path=directory)
    )
    return HealingTrainer(plan, text(), module, what, directory)


def ignored(tokens: int) -> None: ...


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ce", [0.0, 0.5])
def test_gradients_of_all_weights_are_those_of_plain_logits(tied: bool, ce: float) -> None:
    config = tiny_config("llama", tie_word_embeddings=tied)
    student, teacher = tiny_model(config, 1), tiny_model(config, 2).requires_grad_(False)
    ids = text().blocks[text().order(4, 0)]
    Distillation(student, teacher, ce, VOCABULARY)(ids).backward()
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
    ids, spec = text().blocks[text().order(4, 0)], AttentionSpec.from_config(config)
    through = Distillation(student, teacher, 0.0, VOCABULARY, partial(rounding_cache, FORMATS[form], spec))
    found = through(ids, measures=True)[:, 0]
    expected = teacher(ids).logits[:, :-1].log_softmax(-1)
    with torch.no_grad():
        logits = store_encoded(student.eval(), form)(ids).logits[:, :-1].log_softmax(-1)
    distances = (expected.exp() * (expected - logits)).sum(-1).mean(1)
    torch.testing.assert_close(found.float(), distances, rtol=1e-5, atol=0)


def test_a_step_is_one_of_adamw_on_the_mean_of_all_tokens(tmp_path: Path) -> None:
    config = tiny_config("llama")
    student, other, teacher = tiny_model(config, 1), tiny_model(config, 1), tiny_model(config, 2)
    stepping = trainer(student, teacher, tmp_path)
    weights = {name: p for name, p in other.named_parameters() if "self_attn" in name or "input_layernorm" in name}
    other.requires_grad_(False)
    for parameter in weights.values():
        parameter.requires_grad_(True)
    groups = [
        {"params": [p for p in weights.values() if (p.ndim > 1) == matrix], "weight_decay": 0.01 * matrix}
        for matrix in (True, False)
    ]
    optimiser = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    ids = text().blocks[text().order(4, 0)]
    expected = teacher(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    logits = other(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    loss = (expected.exp() * (expected - logits)).sum(-1).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
    optimiser.step()
    stepping.run(1, 1e-2, ignored)
    assert stepping.state.log_history[-1]["train_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, weight in stepping.weights().items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


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
