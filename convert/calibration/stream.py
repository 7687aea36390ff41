"""Runs decoder layers one at a time over a text: a layer's inputs are on disk, and only its weights are in memory.

The model is built without weights and takes them from the checkpoint as transformers' own loading would. A probing pass
through its own forward, whose layers only record, shows the arguments of each layer (masks, rotary tables, …), so that any
class works, of a source or of a result.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.func import functional_call
from transformers.cache_utils import Cache

from attention.patch import pad_values
from attention.versions import CACHE
from convert.checkpoint.loading import ClassTensors
from convert.checkpoint.writer import require_finite
from convert.methods.blocks import Blocks
from eval.inputs.reader import TensorInfo
from eval.machine.device import trim_memory

_TOKENS = 4096  # tokens per forward pass, unless one row is longer
_KNOWN = 16  # batches whose arguments are kept: masks and rotary tables take memory
_CHECKSUM = 4  # bytes at the end of a file of inputs
_CHUNK = 2**24  # bytes

Observe = Callable[[torch.Tensor], None]
Attended = Callable[[int, torch.Tensor, torch.Tensor], None]


class Weights(Protocol):
    """Tensors by their names in a checkpoint, and the infos of all of them."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]: ...

    def __getitem__(self, name: str, /) -> torch.Tensor: ...


class Paths(Protocol):
    """The paths of modules in a model, as families know them. The parent of an attention is its decoder layer."""

    def module(self, layer: int) -> str:
        """The layer's attention."""

    def output(self, layer: int) -> str:
        """Its output projection."""


class LayerStream:
    """Runs the decoder layers of one model over blocks of tokens, in order, in fp32.

    Args:
        model: The model without weights, as `empty_model` makes it.
        paths: Where its attentions are.
        weights: The tensors of its checkpoint.
        text: Token ids, `[n, T]`.
        spool: `{spool}-{layer}` holds the inputs `[n, T, E]` of a layer, fp32, and their checksum. It appears when it is
            complete, so that an interrupted run can continue there.
        device: The device on which layers run.
        cache: What layers read keys and values through, for one pass from the first token on; None for nothing.
    """

    def __init__(
        self,
        model: Any,
        paths: Paths,
        weights: Weights,
        text: Blocks,
        spool: Path,
        device: torch.device,
        cache: Cache | None = None,
    ) -> None:
        self._model, self._paths, self._weights, self._cache = pad_values(model), paths, weights, cache
        self.text, self._spool, self.device = text, spool, device
        self._tensors = ClassTensors(model, weights.infos)
        self._layers = self._path(0).rpartition(".")[0]  # the path of the list of layers
        self.num_layers = len(model.get_submodule(self._layers))
        self.width = int(model.config.get_text_config(decoder=True).hidden_size)
        self._batches = text.batches(min(_TOKENS, text.rows.numel()))
        self._arguments: dict[tuple[Any, ...], list[_Call]] = {}  # by the shape of blocks, and their positions
        self._trusted: set[int] = set()  # layers whose inputs this object has written or checked
        embeddings = model.get_input_embeddings()
        embeddings.padding_idx = None  # matters to gradients alone, and `embed` leaves out the rows of tokens that are not read
        self._embedding = next(f"{name}.weight" for name, module in model.named_modules() if module is embeddings)
        for module in model.modules():  # buffers that no checkpoint holds, such as rotary tables
            if module is embeddings:  # its weights stay mapped
                continue
            module._buffers.update({name: buffer.to(device) for name, buffer in module._buffers.items() if buffer is not None})

    @property
    def ready(self) -> set[int]:
        """The layers whose inputs exist: none before `embed`, then the next layer, and the one that was run last."""
        return {layer for layer in range(self.num_layers + 1) if self._complete(layer)}

    @torch.no_grad()
    def embed(self) -> None:
        """Compute the inputs of the first layer."""
        embeddings = self._model.get_input_embeddings()
        mapped = self._tensors.tensor(self._embedding, self._weights.__getitem__)
        tokens, ids = self.text.rows.unique(return_inverse=True)  # no others are read
        table = {"weight": mapped[tokens].float()}
        require_finite(self._embedding, table["weight"])
        around = self._around()
        with self._writing(0) as write:
            for rows in self._batches:
                embedded = functional_call(embeddings, table, ids[rows]).to(self.device)
                write(self._calls(embedded, self.text.positions[rows], around, first_only=True)[0].hidden)

    @torch.no_grad()
    def observe(self, layer: int, see: Observe) -> None:
        """Call `see` with the inputs of the layer's attention, `[b, T, E]` at a time; the layer stops there."""

        def see_and_stop(x: torch.Tensor) -> None:
            see(x)
            raise _EnoughError

        tensors = self.rest(layer)
        with self._watched(layer, see_and_stop):
            for batch in range(len(self._batches)):
                with contextlib.suppress(_EnoughError):
                    self._forward(layer, self.batch(layer, batch), tensors)

    @torch.no_grad()
    def advance(
        self,
        layer: int,
        see: Observe | None = None,
        attended: Attended | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Run the layer, whose outputs are the inputs of the next one. Its own inputs stay, earlier ones are removed.

        Args:
            layer: The index of the layer.
            see: As in `observe`.
            attended: Called with each batch's number, the layer's input and its output projection's output, both `[b, T, E]`.
            weights: Tensors of the layer by their names in the checkpoint, used instead of those of the checkpoint.
        """
        self.discard(but=layer)
        out: list[torch.Tensor] = []
        note = None if attended is None else out.append
        tensors = self._read(self._path(layer), weights=weights)
        with self._watched(layer, see, note), self._writing(layer + 1) as write:
            for batch in range(len(self._batches)):
                inputs = self.batch(layer, batch)
                write(self._forward(layer, inputs, tensors))
                if attended:
                    attended(batch, inputs.hidden, out.pop())
        del tensors
        trim_memory()

    def rest(self, layer: int) -> dict[str, torch.Tensor]:
        """The layer's tensors but those of its attention, for `read`."""
        return self._read(self._path(layer), [self._paths.module(layer)])

    @torch.no_grad()
    def read(
        self, layer: int, rest: Mapping[str, torch.Tensor], inputs: Inputs, weights: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """What the output projection reads, `[b, T, H D]`, with its attention's `weights`, by their names in checkpoints.

        The layer stops there.
        """
        path = self._paths.module(layer)
        names = [name for name, _ in self._model.get_submodule(path).named_parameters(path)]
        given = {name: self._tensors.tensor(name, weights.__getitem__) for name in names}
        seen: list[torch.Tensor] = []

        def look(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(args[0])
            raise _EnoughError

        output = self._model.get_submodule(self._paths.output(layer))
        with output.register_forward_pre_hook(look), contextlib.suppress(_EnoughError):
            self._forward(layer, inputs, {**rest, **given})
        return seen[0]

    def batch(self, layer: int, batch: int) -> Inputs:
        """The layer's inputs of one batch; for `num_layers`, the outputs of the last layer."""
        return self.select(layer, self._batches[batch])

    def select(self, layer: int, rows: Sequence[int]) -> Inputs:
        """The layer's inputs of some blocks of the text."""
        size, shape = self.text.rows.numel() * self.width, (*self.text.rows.shape, self.width)
        mapped = torch.from_file(str(self._inputs(layer)), size=size, dtype=torch.float32).view(shape)
        # Indexing copies, so the file does not stay mapped.
        return Inputs(mapped[list(rows)].to(self.device), self.text.positions[list(rows)])

    def discard(self, but: int | None = None) -> None:
        """Remove the spooled inputs, but those of one layer."""
        for path in self._spool.parent.glob(f"{self._spool.name}-*"):
            if but is None or path != self._inputs(but):
                path.unlink()

    def _inputs(self, layer: int) -> Path:
        return self._spool.with_name(f"{self._spool.name}-{layer}")

    @contextlib.contextmanager
    def _writing(self, layer: int) -> Iterator[Callable[[torch.Tensor], None]]:
        temporary = self._spool.with_name(f"{self._spool.name}-{layer}-unfinished")  # which no other layer's file ever was
        checksum = 0
        with temporary.open("wb") as file:

            def write(hidden: torch.Tensor) -> None:
                nonlocal checksum
                data = hidden.float().cpu().contiguous().numpy().data
                checksum = zlib.crc32(data, checksum)
                file.write(data)

            yield write
            file.write(checksum.to_bytes(_CHECKSUM))
        temporary.replace(self._inputs(layer))
        self._trusted.add(layer)

    def _complete(self, layer: int) -> bool:
        """Whether the layer's inputs exist. A file of an earlier run is compared with its checksum."""
        path = self._inputs(layer)
        if not path.is_file():
            return False
        if layer not in self._trusted:
            left, checksum = self.text.rows.numel() * self.width * 4, 0
            if path.stat().st_size != left + _CHECKSUM:
                return False
            with path.open("rb") as file:
                while data := file.read(min(left, _CHUNK)):
                    checksum, left = zlib.crc32(data, checksum), left - len(data)
                if file.read() != checksum.to_bytes(_CHECKSUM):
                    return False
            self._trusted.add(layer)
        return True

    def _path(self, layer: int) -> str:
        """The path of the decoder layer."""
        return self._paths.module(layer).rpartition(".")[0]

    def _around(self) -> dict[str, torch.Tensor]:
        """The tensors of the decoder besides its layers and the embedding: learned positions, norms, …"""
        return self._read(self._layers.rpartition(".")[0], [self._layers, self._embedding])

    def _read(
        self, path: str, others: Sequence[str] = (), weights: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Parameters and buffers inside a module but not inside others, by their names; fails if one is not finite."""

        def read(name: str) -> torch.Tensor:
            tensor = weights[name] if weights and name in weights else self._weights[name]
            require_finite(name, tensor)
            return tensor

        own, buffers = self._model.state_dict(), dict(self._model.named_buffers())
        # The class computes buffers that the checkpoint lacks.
        there = (name for name in self._tensors.names if name not in buffers or name not in self._tensors.missing)
        found = [name for name in there if _is_inside(name, path) and not any(_is_inside(name, other) for other in others)]
        return {name: self._tensors.tensor(name, read).to(self.device, own[name].dtype) for name in found}

    def _called(self, path: str, tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """What the module at that path gives with these of its tensors: the others have no values."""
        inside = {name.removeprefix(f"{path}."): tensor for name, tensor in tensors.items()}
        return functional_call(self._model.get_submodule(path), inside, args, kwargs)

    @contextlib.contextmanager
    def _watched(self, layer: int, see: Observe | None, out: Observe | None = None) -> Iterator[None]:
        """Call `see` with the inputs of the layer's attention, and `out` with its output projection's outputs, in the block."""

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert see is not None
            see(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        def after(module: torch.nn.Module, args: tuple[Any, ...], result: torch.Tensor) -> None:
            assert out is not None
            out(result)

        with contextlib.ExitStack() as hooks:
            if see is not None:
                attention = self._model.get_submodule(self._paths.module(layer))
                hooks.enter_context(attention.register_forward_pre_hook(before, with_kwargs=True))
            if out is not None:
                hooks.enter_context(self._model.get_submodule(self._paths.output(layer)).register_forward_hook(after))
            yield

    def _forward(self, layer: int, inputs: Inputs, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden, positions = inputs
        key = (*positions.shape, positions.numpy().tobytes())
        if key not in self._arguments:  # they depend only on the shape and on positions
            width = self._model.get_parameter(self._embedding).shape[1]
            calls = self._calls(hidden.new_zeros(*positions.shape, width), positions, self._around())
            if len(self._arguments) == _KNOWN:
                del self._arguments[next(iter(self._arguments))]
            self._arguments[key] = [call._replace(hidden=hidden.new_empty(0)) for call in calls]
        call = self._arguments[key][layer]
        out = self._called(self._path(layer), tensors, hidden, *call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def _calls(
        self, embeddings: torch.Tensor, positions: torch.Tensor, around: Mapping[str, torch.Tensor], first_only: bool = False
    ) -> list[_Call]:
        """The arguments with which the model calls each of its layers for these embeddings."""
        owner = self._layers.rpartition(".")[0]
        layers = list(self._model.get_submodule(self._layers))
        calls: list[_Call] = []

        def record(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(_Call(hidden_states, args, kwargs))
            if first_only or len(calls) == len(layers):
                raise _EnoughError
            return hidden_states.as_subclass(_Passed)

        try:
            for module in layers:
                module.forward = record
            through = {"use_cache": False} if self._cache is None else {"use_cache": True, CACHE: self._cache}
            self._called(owner, around, inputs_embeds=embeddings, **through, **positioned(positions.to(embeddings.device)))
        except _EnoughError:
            return calls
        finally:
            for module in layers:
                vars(module).pop("forward", None)
        raise AssertionError(f"{type(self._model).__name__} called {len(calls)} of {len(layers)} layers")


def positioned(positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The arguments of a model's forward for tokens at `positions [b, T]`; none where none skips.

    Without a mask, transformers would take a skip for the start of another packed text, and hide what is before it.
    """
    if positions is None or (positions == torch.arange(positions.shape[1], device=positions.device)).all():
        return {}
    return {"position_ids": positions, "attention_mask": torch.ones_like(positions)}


class Inputs(NamedTuple):
    """What a layer reads of some blocks.

    Attributes:
        hidden: `[b, t, E]`.
        positions: `[b, t]`, on the CPU.
    """

    hidden: torch.Tensor
    positions: torch.Tensor


def _is_inside(name: str, path: str) -> bool:
    """Whether a name is that of a module, or of something in it."""
    return not path or f"{name}.".startswith(f"{path}.")


class _EnoughError(Exception):
    """Stops a forward pass that has given what is needed."""


class _Call(NamedTuple):
    hidden: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Passed(torch.Tensor):
    """The output of a recorded layer: some classes use what a layer returns as a tensor, others as a tuple's first item."""

    # Results computed from it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self if index == 0 else super().__getitem__(index)
