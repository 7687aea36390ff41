"""Which device a command may use, and where a loaded model takes its input."""

from __future__ import annotations

from typing import Any

from attention.errors import Failure, Refusal


def require_device(name: str) -> None:
    """Check a `--device` argument: "auto", "cpu", "cuda", "cuda:1", ….

    Raises:
        Refusal: It is no device name.
        Failure: This machine has no such device.
    """
    import torch

    if name == "auto":
        return
    try:
        kind, index = torch.device(name).type, torch.device(name).index
    except RuntimeError:
        raise Refusal(f"no device {name!r} (choose auto, cpu, cuda or cuda:N)") from None
    if kind not in ("cpu", "cuda") or (kind == "cpu" and index is not None):
        raise Refusal(f"device {name!r} is not supported (choose auto, cpu, cuda or cuda:N)")
    if kind == "cuda" and (index or 0) >= torch.cuda.device_count():
        raise Failure(f"this machine has no device {name!r}: torch sees {torch.cuda.device_count()} CUDA device(s)")


def compute_device(name: str) -> Any:
    """The `torch.device` of a `--device` argument that has been checked; "auto" is a GPU if there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def input_device(model: Any) -> Any:
    """Where the token ids of `model` go: to its device or, if its embedding is offloaded, to where its hooks compute."""
    return model.device if model.device.type != "meta" else model._hf_hook.execution_device
