"""Tensors of which every process may hold a part only, as FSDP makes them of parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def reshard(module: nn.Module) -> None:
    """Let every process hold its parts alone. After a forward pass without a backward pass, some modules are whole still.

    What is written into parts would not reach these.
    """
    for inside in module.modules():
        if isinstance(inside, FSDPModule):
            inside.reshard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Every process calls this, in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of it; they share memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A tensor that every process holds whole, in parts and on the device as `other` is."""
    if isinstance(tensor, DTensor):
        return tensor
    if not isinstance(other, DTensor):
        return tensor.to(other.device)
    # Without a source, no process sends anything: each takes its part of what it has.
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
