"""The stand-in for a GPU refuses what a GPU refuses; what it allows, tests/test_devices.py does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_gpu import GPU, REFUSED, fake_gpu

Operation = Callable[[torch.Tensor, torch.Tensor], object]


def assigned(target: torch.Tensor, index: object, value: object) -> torch.Tensor:
    target[index] = value  # type: ignore[index]
    return target


MIXED: dict[str, Operation] = {
    "add": lambda gpu, cpu: gpu + cpu,
    "products": lambda gpu, cpu: torch.linalg.multi_dot([gpu, cpu, gpu]),
    "einsum": lambda gpu, cpu: torch.einsum("ij,jk->ik", gpu, cpu),
    "cat": lambda gpu, cpu: torch.cat((gpu, cpu)),
    "gather": lambda gpu, cpu: gpu.gather(0, cpu.long()),
    "index": lambda gpu, cpu: cpu[gpu[0].long()],
    "index assigned": lambda gpu, cpu: assigned(gpu, [0, 1], cpu[:2]),
    "solve": lambda gpu, cpu: torch.linalg.solve(gpu, cpu),
    "attention": lambda gpu, cpu: torch.nn.functional.scaled_dot_product_attention(gpu[None], cpu[None], gpu[None]),
    "compared": lambda gpu, cpu: torch.equal(gpu, cpu),
    "generator": lambda gpu, cpu: torch.randn(3, device=gpu.device, generator=torch.Generator()),
}


@pytest.mark.parametrize("operation", MIXED.values(), ids=MIXED)
def test_a_meeting_of_devices_is_refused(operation: Operation) -> None:
    with fake_gpu(), pytest.raises(RuntimeError, match=REFUSED):
        operation(torch.ones(4, 4).to(GPU), torch.ones(4, 4))


def test_values_are_made_up_on_the_gpu_alone() -> None:
    with fake_gpu([True, False]):
        gpu, cpu = torch.ones(3).to(GPU), torch.tensor([0.25, 0.5])
        assert (float(cpu[0]), cpu.tolist(), bool((cpu > 0).all())) == (0.25, [0.25, 0.5], True)
        assert (bool((gpu > 0).all()), bool(gpu.any()), int(gpu.argmax())) == (True, False, 1)
        first, second = float(gpu[1]), float(gpu.sum())
        assert 0 < second < first
        assert torch.equal(gpu.double().cpu(), torch.zeros(3).double())
