"""Whether a kernel computes here what torch computes, tried before it first serves, and what happens where it does not."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding import DEVICE, INTERPRETER, SCALE, TOLERANCE, grouped, on_gpu, ragged
from rows import rows

pytest.importorskip("triton")  # there are no wheels for other systems than Linux

import attention.kernels
from attention.kernels import GROUPED, decode_grouped, split_kv, torch_decode, trial, triton_decode
from attention.kernels.tiling import Shape

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETER and not torch.cuda.is_available(), reason="needs a GPU, or the interpreter"),
]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends that served, in order; torch does the work of both."""
    names: list[str] = []
    for name, entry in GROUPED.items():

        def run(*arguments: Any, name: str = name) -> torch.Tensor:
            names.append(name)
            return torch_decode.decode_grouped(*arguments)

        monkeypatch.setitem(GROUPED, name, replace(entry, run=run))
    monkeypatch.setattr(attention.kernels, "_warned", set())
    return names


def as_on_a_fresh_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of the kernels there, and nothing needs to be built."""
    on_gpu(monkeypatch)
    monkeypatch.setattr(triton_decode, "_INTERPRETED", False)
    for name in ("_failure", "_mistake"):
        monkeypatch.setattr(triton_decode, name, functools.cache(getattr(triton_decode, name).__wrapped__))
    monkeypatch.setattr(split_kv, "build", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)


@pytest.mark.parametrize("dtype", rows(TOLERANCE, [torch.float16]), ids=str)
@pytest.mark.parametrize(("groups", "mask"), [(None, None), (None, torch.bool), (2, torch.bool), (2, torch.float32)], ids=str)
def test_a_trial_finds_the_kernel_right(dtype: torch.dtype, groups: int | None, mask: torch.dtype | None) -> None:
    before = torch.get_rng_state()
    assert 0 < trial.deviation(Shape(3, 48, 24, groups, dtype, mask), DEVICE) < trial.tolerance(dtype)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("groups", [None, 2])
def test_a_trial_finds_a_kernel_wrong(groups: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = split_kv.decode
    monkeypatch.setattr(split_kv, "decode", lambda *arguments: kernel(*arguments).roll(1, 0))
    assert trial.deviation(Shape(3, 48, 24, groups, torch.float32, torch.bool), DEVICE) > 0.5


@pytest.mark.skipif(not INTERPRETER, reason="as on a GPU")
@pytest.mark.parametrize("strict", rows([False, True], [True]))
def test_a_trial_is_no_part_of_what_is_exported(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Step(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return decode_grouped(q, k, v, mask, SCALE)

    as_on_a_fresh_gpu(monkeypatch)
    call = *grouped(3, 6, 2, 20, 16, 16), ragged(3, 20)
    with torch.no_grad():
        exported = torch.export.export(Step(), call, strict=strict)
        assert (exported.module()(*call) - Step()(*call)).abs().max() < 1e-6
    assert [str(node.target) for node in exported.graph.nodes if node.op == "call_function"] == ["kvfold.gqa_decode.default"]
    assert triton_decode._mistake.cache_info().currsize == 1


@pytest.mark.parametrize("off", [0.5, float("nan")])
def test_torch_steps_in_for_a_kernel_that_is_wrong_here(off: float, served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_fresh_gpu(monkeypatch)
    tried: list[Shape] = []
    monkeypatch.setattr(trial, "deviation", lambda shape, _: tried.append(shape) or off)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: not tried)
    call = *grouped(3, 6, 2, 20, 16, 16), ragged(3, 20)
    decode_grouped(*call, SCALE)  # captured
    assert (served, tried) == (["triton"], [])
    tried.append(Shape(0, 0, 0, None, torch.float32, None))  # no more
    with pytest.warns(RuntimeWarning, match=r"on a trial it was (50|nan) % away from what torch computes"):
        decode_grouped(*call, SCALE)
    decode_grouped(*call, SCALE)
    assert served == ["triton", "torch", "torch"]
    assert tried[1:] == [Shape(3, 16, 16, 2, torch.float32, torch.bool)]
