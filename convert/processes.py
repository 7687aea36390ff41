"""The processes that share a conversion on text: one, or those that torchrun or `accelerate launch` started.

Each runs models over its part of the text. The first one does everything else: it decides, changes layers and writes files, on
a disk that all of them see.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch

from attention.errors import Interrupted, Refusal
from eval.device import out_of_memory

_T = TypeVar("_T")
PATIENCE = timedelta(days=1)  # others wait while the first one changes a layer, or writes a text


@dataclass(frozen=True)
class Processes:
    """These processes, as one of them sees them. Every process has to call the same methods in the same order.

    Attributes:
        index: Which one this is.
        count: How many there are.
        device: Where it computes. Set only if there are several.
    """

    index: int = 0
    count: int = 1
    device: str = "cpu"

    @classmethod
    def launched(cls, device: torch.device) -> Processes:
        """Those that were launched together; they have met when this returns.

        Args:
            device: Where they compute. On GPUs, each process has its own.

        Raises:
            Refusal: They cannot all compute there.
        """
        if launched_count() == 1:
            return ALONE
        if ":" in str(device):
            raise Refusal(
                f"{launched_count()} processes cannot share {device}", hint="give --device cuda: each takes a GPU of its own"
            )
        from accelerate import PartialState

        state = PartialState(cpu=device.type == "cpu", timeout=PATIENCE)
        if state.device.type != device.type:  # accelerate keeps one state for a process
            raise Refusal(
                f"these processes share work on {state.device.type} already, not on {device.type}",
                hint="give the same --device to all of it, or launch a command for each",
            )
        state.wait_for_everyone()
        return cls(state.process_index, state.num_processes, str(state.device))

    @property
    def leads(self) -> bool:
        """Whether this is the first one."""
        return self.index == 0

    def part(self, count: int) -> range:
        """This process's part of so many things in order."""
        return range(count * self.index // self.count, count * (self.index + 1) // self.count)

    def wait(self) -> None:
        """Wait for the others."""
        if self.count > 1:
            with _together():
                torch.distributed.barrier()

    def add(self, *tensors: torch.Tensor) -> None:
        """Add the other processes' tensors to these, in place. They have the same shapes, and are on `device`."""
        if self.count > 1:
            with _together():
                for tensor in tensors:
                    torch.distributed.all_reduce(tensor)

    def first(self, make: Callable[[], _T]) -> _T:
        """What the first process makes. Tensors that are on its GPU are on that of each process."""
        if self.count == 1:
            return make()
        from accelerate.utils import broadcast_object_list

        written, made = io.BytesIO(), None
        if self.leads:
            made = make()
            torch.save(made, written)
        sent = [written.getvalue()]
        with _together():
            broadcast_object_list(sent)
        if not self.leads:
            made = torch.load(io.BytesIO(sent[0]), map_location={"cuda:0": self.device}, weights_only=False)
        return cast("_T", made)


ALONE = Processes()


def launched_count() -> int:
    """How many processes torchrun or `accelerate launch` started together."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """What all processes do at once; an error means that one has ended, and says why itself."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise Interrupted(
            f"another process has ended: {' '.join(str(error).split())[:120]}",
            hint="mend what that one says, then repeat the command with --resume",
        ) from error
