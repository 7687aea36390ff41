"""What work costs, what a machine does in a second, and what people are told of it."""

from __future__ import annotations

import logging
from dataclasses import astuple
from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from attention.errors import Refusal
from eval.machine import forecast
from eval.machine.forecast import Decoder, Machine, Work, duration, foretell


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_PROBE", 0.001)
    forecast._measured.cache_clear()


def counted(config: Any, blocks: int, context: int) -> float:
    """The flops of a forward pass as torch counts them, with half of the products between tokens: those of the past."""
    config._attn_implementation = "eager"
    model = tiny_model(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.full((blocks, context), 3), use_cache=False)
    found = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    return sum(found.values()) - found.get("aten.bmm", 0) / 2


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "gpt_neox", "deepseek_v3", "minicpm3", "gemma2"])
def test_the_flops_of_a_forward_pass_are_those_that_torch_counts(model_type: str) -> None:
    found = Decoder.of(tiny_config(model_type)).forward(2 * 96, 96)
    assert found.flops == pytest.approx(counted(tiny_config(model_type), 2, 96), rel=0.03)


def test_by_hand() -> None:
    """Llama: 3 layers of width 64, 8 query heads and 4 KV heads of 8, an MLP of 32, 331 tokens in the vocabulary."""
    decoder = Decoder.of(tiny_config("llama"))
    matrices = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 32
    assert decoder.weights == 3 * matrices
    assert decoder.parameters == 3 * (matrices + 2 * 64) + 64 + 2 * 331 * 64
    of_attention = 3 * 8 * 10 * 10 / 2 * 2 * (8 + 8)
    assert decoder.forward(10, 10).flops == 10 * 2 * 3 * matrices + of_attention + 10 * 2 * 64 * 331
    assert decoder.forward(10, 10, logits=1).flops == decoder.forward(10, 10).flops - 9 * 2 * 64 * 331


def test_a_token_meets_its_own_experts_alone() -> None:
    one, two = (Decoder.of(tiny_config("mixtral", num_experts_per_tok=count)) for count in (1, 2))
    assert two.parameters == one.parameters
    assert two.weights - one.weights == pytest.approx(3 * 3 * 64 * 32)  # another expert of three matrices in each layer


def test_a_class_that_builds_nothing_without_weights_is_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(config: Any, trust_remote_code: bool) -> Any:
        raise Refusal("no")

    config = tiny_config("llama", intermediate_size=171)
    found = Decoder.of(config)
    monkeypatch.setattr(forecast, "without_weights", refused)
    usual = Decoder.of(config)
    assert (usual.layers, usual.width, usual.vocabulary, usual.heads) == (3, 64, 331, 24)
    assert usual.weights == pytest.approx(found.weights, rel=0.2)
    assert usual.parameters == pytest.approx(found.parameters, rel=0.2)
    assert usual.dims == pytest.approx(found.dims, rel=0.3)


def test_work_adds_up() -> None:
    decoder = Decoder.of(tiny_config("llama"))
    assert astuple(2 * decoder.forward(64, 32)) == pytest.approx(astuple(decoder.forward(128, 32)))
    assert sum([Work(flops=1), Work(bytes=2)], Work(calls=3)) == Work(1, 0, 2, 3)
    assert Machine("cpu", 10, 20, 40, 80).seconds(Work(10, 20, 40, 80)) == 4


def test_a_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine.measured(torch.device("cpu"), 576)
    assert all(rate > 0 for rate in astuple(machine)[1:])
    monkeypatch.setattr(forecast, "_seconds", None)
    assert Machine.measured(torch.device("cpu"), 576) is machine


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.01, "1 second"), (1, "1 second"), (7.26, "7.3 seconds"), (42.4, "42 seconds"), (99.6, "100 seconds"),
        (120, "2 minutes"), (725, "12 minutes"), (6000, "1.7 hours"), (86400, "24 hours"), (200_000, "2.3 days"),
        (2e7, "231 days"),
    ],
)  # fmt: skip
def test_durations_have_two_digits(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_what_is_done_in_a_moment_is_neither_measured_nor_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forecast, "_measured", None)
    with caplog.at_level(logging.INFO, "kvfold"):
        assert foretell(Work(flops=1e9, values=1e6), torch.device("cpu"), 64) is None
    assert not caplog.records


def test_what_takes_long_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def measured(name: str, width: int, dtype: str) -> Machine:
        return Machine(name, 1e11, 1e9, 1e10, 1e6)

    monkeypatch.setattr(forecast, "_measured", measured)
    with caplog.at_level(logging.INFO, "kvfold"):
        assert foretell(Work(flops=72e12), torch.device("cpu"), 64) == 720
        assert foretell(Work(flops=72e12), torch.device("cpu"), 64, without="the tasks") == 720
        assert foretell(Work(flops=4e11), torch.device("cpu"), 64) == 4  # quick on this machine
    said = [record.getMessage() for record in caplog.records]
    assert said == ["takes about 12 minutes on cpu", "takes about 12 minutes on cpu, without the tasks"]


def test_a_device_without_memory_is_left_to_the_work_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, width: int, dtype: str) -> Machine:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(forecast, "_measured", full)
    assert foretell(Work(flops=72e12), torch.device("cpu"), 64) is None


def test_evaluations_and_benchmarks_say_what_they_take(
    checkpoint: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from eval import bench, evaluate

    def slow(name: str, width: int, dtype: str) -> Machine:
        return Machine(name, 1e5, 1e4, 1e5, 1e3)

    monkeypatch.setattr(forecast, "_measured", slow)
    monkeypatch.setattr(forecast, "_SLOW", slow("", 0, ""))
    source, strings = (
        checkpoint(max_position_embeddings=256),
        ["Once there was a cat. It sat on the mat, and the mat was flat.\n" * 20],
    )
    found = []
    with caplog.at_level(logging.INFO, "kvfold"):
        for more in ({}, {"recall": True}, {"context": [64, 128]}):
            monkeypatch.setattr(forecast, "duration", lambda seconds: found.append(seconds) or "long")
            evaluate(source, text=strings, device="cpu", **more)
        bench(source, context=[16], steps=2, rounds=2, device="cpu")
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("takes")]
    assert said == 4 * ["takes about long on cpu"]
    assert found[1] > found[0]
    assert found[2] > 1.3 * found[0]
