"""The course of a healing: which rate is chosen, which checkpoint counts, and when it has come to its end."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention.errors import Failure
from convert.healing import loop
from convert.healing.loop import Point, Progressed
from convert.healing.trainer import NotFinite

FILES = {"model.safetensors": b"weights", "optimizer.pt": b"moments", "trainer_state.json": b"{}"}


def curve(*found: float) -> list[Point]:
    return [Point(step, step, 0.1, None, kl, kl) for step, kl in enumerate(found)]


@pytest.mark.parametrize(
    ("found", "stale"),
    [
        ([1.0], False),
        ([1.0, 0.9, 0.8, 0.7, 0.6, 0.5], False),
        ([1.0, 0.5, 0.6, 0.6, 0.6], False),
        ([1.0, 0.5, 0.6, 0.6, 0.6, 0.6], True),
        ([1.0, 1.3, 1.2, 1.15, 1.1, 1.05], False),  # worse than at first, and better each time
        ([1.0, 1.3, 1.4, 1.4, 1.4, 1.4], True),
    ],
)
def test_four_points_that_are_no_better_end_it(found: list[float], stale: bool) -> None:
    assert Progressed(0.1, {}, curve(*found)).is_stale == stale


class Trainer:
    """One that loses so many nats at a rate, and restores its weights between rates."""

    def __init__(self, loses: Callable[[float], float]) -> None:
        self.loses, self.rate, self.steps = loses, 0.0, list[int]()

    def weights(self) -> str:
        return "as they were"

    def restore(self, weights: str) -> None:
        assert weights == "as they were"
        self.rate = 0.0

    def run(self, steps: int, rate: float, done: Callable[[int], object]) -> None:
        assert not self.rate, "the weights of another rate"
        self.rate = rate
        self.steps.append(steps)

    def measure(self) -> tuple[float, float]:
        if math.isnan(found := self.loses(self.rate)):
            raise NotFinite("KL is nan")
        return found, found


def chosen(loses: Callable[[float], float], rates: list[float], most: int = 6) -> tuple[float, dict[str, float]]:
    plan: Any = SimpleNamespace(rates=lambda loss: rates, trial_steps=10, most_rates=most, batch=1, context=16)
    trainer: Any = Trainer(loses)
    found = loop._chosen(plan, trainer, Point(0, 0, 0.0, None, 1.0, 1.0), lambda *_: None)
    assert trainer.steps == [10] * len(trainer.steps)
    return found


def around(best: float) -> Callable[[float], float]:
    return lambda rate: abs(math.log(rate / best)) + 1


@pytest.mark.parametrize(
    ("best", "most", "rate", "count"),
    [
        (2e-3, 6, 2e-3, 3),  # others lie around it
        (2e-2, 6, 1.8e-2, 5),
        (1e-7, 6, 2.47e-5, 6),  # too far away to be found
        (2e-2, 4, 1.8e-2, 4),
        (2e-4, 6, 2.22e-4, 5),
    ],
)
def test_a_rate_is_chosen_among_three_or_beyond_them(best: float, most: int, rate: float, count: int) -> None:
    found, tried = chosen(around(best), [2e-3 / 3, 2e-3, 6e-3], most)
    assert found == pytest.approx(rate, rel=1e-2)
    assert len(tried) == count
    rates = sorted(map(float, tried))
    assert rates[1:] == pytest.approx([3 * rate for rate in rates[:-1]], rel=1e-2)


def test_the_largest_of_rates_that_are_about_as_good_is_chosen() -> None:
    assert chosen(lambda rate: {1e-3: 1.0, 3e-3: 1.09, 9e-3: 1.11}[rate], [1e-3, 3e-3, 9e-3], 3)[0] == 3e-3


def test_rates_at_which_nothing_is_finite_do_not_count() -> None:
    found, tried = chosen(lambda rate: 1.0 / rate if rate < 5e-3 else math.nan, [1e-3, 3e-3, 9e-3])
    assert (found, set(tried)) == (3e-3, {"1.00e-03", "3.00e-03"})
    with pytest.raises(Failure, match=r"after 10 steps at any learning rate of 1\.0e-03, 3\.0e-03, 9\.0e-03"):
        chosen(lambda rate: math.nan, [1e-3, 3e-3, 9e-3])
    assert chosen(lambda rate: math.nan, [1e-3]) == (1e-3, {}), "one that is given is not tried"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """After steps 2, which is the best, and 3."""
    for step, kl in ((2, (1.0, 0.9, 0.5)), (3, (1.0, 0.9, 0.5, 0.6))):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        for name, content in FILES.items():
            (checkpoint / name).write_bytes(content)
        loop._seal(checkpoint, Progressed(3e-3, {"3.00e-03": 0.9}, curve(*kl)))
    return tmp_path


def test_the_last_checkpoint_counts_with_its_progress(checkpoints: Path) -> None:
    (checkpoints / "checkpoint-10").mkdir()  # a run was stopped while it wrote it
    expected = Progressed(3e-3, {"3.00e-03": 0.9}, curve(1.0, 0.9, 0.5, 0.6))
    assert loop._last(checkpoints) == expected


@pytest.mark.parametrize("name", [*FILES, "sealed.json"])
@pytest.mark.parametrize(("damaged", "left"), [(3, 2), (2, None)], ids=["the last", "the best"])
def test_a_damaged_checkpoint_does_not_count(
    name: str, damaged: int, left: int | None, checkpoints: Path, warned: Callable[[], list[str]]
) -> None:
    file = checkpoints / f"checkpoint-{damaged}" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    found = loop._last(checkpoints)
    assert (found and found.step) == left
    assert any("checkpoint-3 is damaged, so training goes on from an earlier one" in said for said in warned())


def test_a_checkpoint_without_a_file_does_not_count(checkpoints: Path) -> None:
    for step in (2, 3):
        (checkpoints / f"checkpoint-{step}" / "optimizer.pt").unlink()
    assert loop._last(checkpoints) is None
