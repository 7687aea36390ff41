"""Runs decoder layers one at a time over a text: a layer's inputs are on disk, and only its weights are in memory.

The model is built without weights and takes them from the checkpoint as transformers' own loading would. A probing pass
through its own forward, with recorders in place of the layers, shows the arguments of each layer (masks, rotary tables,
…), so that any class works, of a source or of a result.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from accelerate.utils import set_module_tensor_to_device
from transformers.cache_utils import Cache

from attention.padding import pad_values
from attention.versions import CACHE
from convert.checkpoint.loading import ClassTensors, Read, empty_model
from convert.checkpoint.writer import require_finite
from convert.methods.blocks import Blocks
from eval.inputs.reader import TensorInfo
from eval.machine.device import trim_memory

_TOKENS = 4096  # tokens per forward pass, unless one row is longer
_CHECKSUM = 4  # bytes at the end of a file of inputs
_CHUNK = 2**24  # bytes

Observe = Callable[[torch.Tensor], None]
Attended = Callable[[int, torch.Tensor, torch.Tensor], None]


class LayerStream:
    """Runs the decoder layers of one model over blocks of tokens, in order, in fp32.

    Args:
        config: The model's config.
        attentions: The module path of each layer's attention; its parent is the decoder layer.
        read: Maps the name of a tensor in the model's checkpoint to the tensor.
        infos: The infos of all tensors of that checkpoint.
        text: Token ids, `[n, T]`.
        spool: `{spool}-{layer}` holds the inputs `[n, T, E]` of the next layer, fp32, and a checksum of the rows' checksums. It
            appears when it is complete, and replaces the one before it, so that an interrupted run can continue there.
        device: The device on which layers run.
        cache: What layers read keys and values through, for one pass from the first token on; None for nothing.
    """

    def __init__(
        self,
        config: Any,
        attentions: Sequence[str],
        read: Read,
        infos: Mapping[str, TensorInfo],
        text: Blocks,
        spool: Path,
        device: torch.device,
        cache: Cache | None = None,
    ) -> None:
        self._cache = cache
        model = pad_values(empty_model(config))
        self._model, self._read, self.text, self._spool, self.device = model, read, text, spool, device
        self._tensors = ClassTensors(model, infos)
        self._attentions = list(attentions)
        self.width = int(config.get_text_config(decoder=True).hidden_size)
        self._batches = text.batches(min(_TOKENS, text.rows.numel()))
        self._arguments: dict[tuple[int, int], list[_Call]] = {}  # by blocks and their length
        self._trusted: set[int] = set()  # layers whose inputs this object has written or checked
        embeddings = model.get_input_embeddings()
        embeddings.padding_idx = None  # matters to gradients alone, and `embed` leaves out the rows of tokens that are not read
        self._embedding = next(f"{name}.weight" for name, module in model.named_modules() if module is embeddings)
        for module in model.modules():  # buffers that no checkpoint holds, such as rotary tables
            if module is embeddings:  # its weights stay mapped
                continue
            module._buffers.update({name: buffer.to(device) for name, buffer in module._buffers.items() if buffer is not None})

    @property
    def num_layers(self) -> int:
        return len(self._attentions)

    @property
    def ready(self) -> set[int]:
        """The layers whose inputs exist: none before `embed`, then the next layer, and the one before it if it was kept."""
        return {layer for layer in range(len(self._attentions) + 1) if self._whole(layer)}

    @torch.no_grad()
    def embed(self) -> None:
        """Compute the inputs of the first layer."""
        embeddings = self._model.get_input_embeddings()
        mapped = self._tensors.tensor(self._embedding, self._read)
        tokens, ids = self.text.rows.unique(return_inverse=True)  # no others are read
        embeddings.weight = torch.nn.Parameter(mapped[tokens].float(), requires_grad=False)
        require_finite(self._embedding, embeddings.weight)
        try:
            with self._loaded(self._around()), self._writing(0) as write:
                for rows in self._batches:
                    embedded = embeddings(self.text.shaped(rows, ids[rows])).to(self.device)
                    write(self._calls(embedded, first_only=True)[0].hidden)
        finally:
            embeddings.weight = torch.nn.Parameter(mapped.to("meta"), requires_grad=False)

    @torch.no_grad()
    def observe(self, layer: int, see: Observe) -> None:
        """Call `see` with the inputs of the layer's attention, `[b, T, E]` at a time; the layer stops there."""

        def see_and_stop(x: torch.Tensor) -> None:
            see(x)
            raise _EnoughError

        with self._loaded(self._within(layer, attention=False)), self._watched(layer, see_and_stop):
            for batch in range(len(self._batches)):
                with contextlib.suppress(_EnoughError):
                    self._forward(layer, self.batch(layer, batch))

    @torch.no_grad()
    def advance(
        self,
        layer: int,
        see: Observe | None = None,
        then: Callable[[], None] | None = None,
        attended: Attended | None = None,
        output: str | None = None,
        keep: bool = False,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Run the layer, and replace all earlier inputs with its outputs.

        Args:
            layer: The index of the layer.
            see: As in `observe`.
            then: Called after the last batch, while the inputs still exist.
            attended: Called with each batch's number, the layer's input and its attention's output, both `[b, T, E]`.
            output: The path of the module whose output that is; None for the attention, to which some classes add the residual.
            keep: Whether the layer's inputs are kept until the next layer is run.
            weights: Tensors of the layer by their names in the checkpoint, used instead of those from `read`.
        """
        out: list[torch.Tensor] = []
        note = None if attended is None else out.append
        loaded = self._loaded(self._within(layer), weights)
        with loaded, self._watched(layer, see, note, output), self._writing(layer + 1) as write:
            for batch in range(len(self._batches)):
                inputs = self.batch(layer, batch)
                write(self._forward(layer, inputs))
                if attended:
                    attended(batch, inputs, out.pop())
            if then:
                then()
        for earlier in self.ready - {layer + 1, *([layer] if keep else [])}:
            self._inputs(earlier).unlink()
        trim_memory()

    @contextlib.contextmanager
    def opened(self, layer: int) -> Iterator[OpenLayer]:
        """The layer as a function of its attention's weights, during the block."""
        with self._loaded(self._within(layer, attention=False)):
            yield OpenLayer(self, layer)

    def batch(self, layer: int, batch: int) -> torch.Tensor:
        """The layer's inputs of one batch, `[b, t, E]`; for `num_layers`, the outputs of the last layer."""
        (found,) = self.select(layer, self._batches[batch])
        return found

    def select(self, layer: int, rows: Sequence[int]) -> list[torch.Tensor]:
        """The layer's inputs of some rows of the text, `[b, t, E]` for each length of blocks."""
        size, shape = self.text.rows.numel() * self.width, (*self.text.rows.shape, self.width)
        mapped = torch.from_file(str(self._inputs(layer)), size=size, dtype=torch.float32).view(shape)
        # Indexing copies, so the file does not stay mapped.
        return [self.text.shaped(part, mapped[part].to(self.device)) for part in self.text.alike(rows)]

    def discard(self) -> None:
        """Remove the spooled inputs."""
        for path in self._spool.parent.glob(f"{self._spool.name}-*"):
            path.unlink()

    # ---- files -----------------------------------------------------------------------------------------------------

    def _inputs(self, layer: int) -> Path:
        return self._spool.with_name(f"{self._spool.name}-{layer}")

    @contextlib.contextmanager
    def _writing(self, layer: int) -> Iterator[Callable[[torch.Tensor], None]]:
        temporary = self._spool.with_name(f"{self._spool.name}-{layer}-unfinished")  # which no other layer's file ever was
        checksums: list[int] = []
        with temporary.open("wb") as file:

            def write(hidden: torch.Tensor) -> None:
                for data in hidden.float().cpu().reshape(-1, self.text.context * self.width).numpy():
                    checksums.append(zlib.crc32(data.data))
                    file.write(data.data)

            yield write
            file.write(_combined(checksums))
        temporary.replace(self._inputs(layer))
        self._trusted.add(layer)

    @property
    def _row_bytes(self) -> int:
        """The bytes of a row in a file of inputs."""
        return self.text.context * self.width * 4

    def _whole(self, layer: int) -> bool:
        """Whether the layer's inputs exist. A file of an earlier run is compared with its checksum."""
        path = self._inputs(layer)
        if not path.is_file():
            return False
        if layer not in self._trusted:
            count = len(self.text.rows)
            if path.stat().st_size != count * self._row_bytes + _CHECKSUM:
                return False
            with path.open("rb") as file:
                checksums = [_checksum(file, self._row_bytes) for _ in range(count)]
                if file.read() != _combined(checksums):
                    return False
            self._trusted.add(layer)
        return True

    # ---- modules ---------------------------------------------------------------------------------------------------

    def _path(self, layer: int) -> str:
        """The path of the decoder layer."""
        return self._attentions[layer].rpartition(".")[0]

    @property
    def _layers(self) -> str:
        """The path of the list of layers."""
        return self._path(0).rpartition(".")[0]

    def _within(self, layer: int, attention: bool = True) -> list[str]:
        """The names of a layer's parameters, with or without those of its attention."""
        found = _below(self._path(layer), self._tensors.names)
        left_out = set() if attention else set(_below(self._attentions[layer], found))
        return [name for name in found if name not in left_out]

    def _around(self) -> list[str]:
        """The parameters of the decoder besides its layers and the embedding: learned positions, norms, …"""
        found = _below(self._layers.rpartition(".")[0], self._tensors.names)
        left_out = {self._embedding, *_below(self._layers, found)}
        return [name for name in found if name not in left_out]

    @contextlib.contextmanager
    def _loaded(self, names: Iterable[str], weights: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """Load these parameters and buffers into the model during the block; fails if one is not finite."""
        buffers = dict(self._model.named_buffers())
        # The class computes buffers that the checkpoint lacks.
        given = [name for name in names if name not in buffers or name not in self._tensors.missing]

        def read(name: str) -> torch.Tensor:
            tensor = weights[name] if weights and name in weights else self._read(name)
            require_finite(name, tensor)
            return tensor

        try:
            for name in given:
                dtype = buffers[name].dtype if name in buffers else torch.float32
                value = self._tensors.tensor(name, read).to(self.device, dtype)
                set_module_tensor_to_device(self._model, name, self.device, value=value)
            yield
        finally:
            for name in given:
                if name in buffers:
                    set_module_tensor_to_device(self._model, name, self.device, value=buffers[name])
                else:
                    set_module_tensor_to_device(self._model, name, "meta")

    @contextlib.contextmanager
    def _watched(
        self, layer: int, see: Observe | None, out: Observe | None = None, output: str | None = None
    ) -> Iterator[None]:
        """Call `see` with the inputs of the layer's attention, and `out` with its outputs or another module's, in the block."""

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if see is not None:
                see(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        def after(module: torch.nn.Module, args: tuple[Any, ...], result: Any) -> None:
            if out is not None:
                out(result[0] if isinstance(result, tuple) else result)

        attention = self._model.get_submodule(self._attentions[layer])
        last = self._model.get_submodule(output or self._attentions[layer])
        handles = attention.register_forward_pre_hook(before, with_kwargs=True), last.register_forward_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self, layer: int, hidden: torch.Tensor, weights: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        shape, module = (hidden.shape[0], hidden.shape[1]), self._model.get_submodule(self._path(layer))
        if shape not in self._arguments:  # they depend only on the shape
            width = self._model.get_parameter(self._embedding).shape[1]
            with torch.no_grad(), self._loaded(self._around()):
                self._arguments[shape] = self._calls(hidden.new_zeros(*shape, width))
        call = self._arguments[shape][layer]
        if weights is None:
            out = module(hidden, *call.args, **call.kwargs)
        else:
            out = torch.func.functional_call(module, weights, (hidden, *call.args), call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def _calls(self, embeddings: torch.Tensor, first_only: bool = False) -> list[_Call]:
        """The arguments with which the model calls each of its layers for these embeddings."""
        decoder, _, name = self._layers.rpartition(".")
        owner, whole = self._model.get_submodule(decoder), self._model.get_submodule(self._layers)
        calls: list[_Call] = []
        last = 0 if first_only else len(self._attentions) - 1
        setattr(owner, name, torch.nn.ModuleList(_Recorder(module, calls, i == last) for i, module in enumerate(whole)))
        try:
            through = {"use_cache": False} if self._cache is None else {"use_cache": True, CACHE: self._cache}
            owner(inputs_embeds=embeddings, **through)
        except _EnoughError:
            return calls
        finally:
            setattr(owner, name, whole)
        raise AssertionError(f"{type(owner).__name__} called {len(calls)} of {last + 1} layers")


class OpenLayer:
    """A layer that takes its attention's weights as an argument of each call.

    Args:
        stream: The model of the layer.
        layer: Its index.
    """

    def __init__(self, stream: LayerStream, layer: int) -> None:
        self._stream, self._layer, path = stream, layer, stream._attentions[layer]
        self._attention = [name for name, _ in stream._model.get_submodule(path).named_parameters(path)]
        # Conversions on loading would not pass gradients.
        fused = any(stream._tensors.is_converted(name) for name in self._attention)
        assert not fused, "an attention whose tensors are fused on loading"

    def __call__(self, hidden: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The layer's output `[b, T, E]`, differentiable in `weights`, which have their names in checkpoints."""
        stream, inside = self._stream, f"{self._stream._path(self._layer)}."
        given = {name.removeprefix(inside): stream._tensors.tensor(name, weights.__getitem__) for name in self._attention}
        return stream._forward(self._layer, hidden, given)

    def into(self, hidden: torch.Tensor, weights: Mapping[str, torch.Tensor], module: str) -> torch.Tensor:
        """The input of one of the layer's modules, given by its path in the model; the layer stops there."""
        seen: list[torch.Tensor] = []

        def look(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(args[0])
            raise _EnoughError

        handle = self._stream._model.get_submodule(module).register_forward_pre_hook(look)
        try:
            with contextlib.suppress(_EnoughError):
                self(hidden, weights)
        finally:
            handle.remove()
        return seen[0]


def _checksum(file: BinaryIO, size: int) -> int:
    """That of the next bytes of a file."""
    checksum = 0
    while size and (data := file.read(min(size, _CHUNK))):
        checksum, size = zlib.crc32(data, checksum), size - len(data)
    return checksum


def _combined(checksums: list[int]) -> bytes:
    """One checksum of all."""
    return zlib.crc32(b"".join(checksum.to_bytes(_CHECKSUM) for checksum in checksums)).to_bytes(_CHECKSUM)


def _below(path: str, names: Iterable[str]) -> list[str]:
    """The names within the module at `path`."""
    return [name for name in names if not path or name.startswith(f"{path}.")]


class _EnoughError(Exception):
    """Stops a forward pass that has given what is needed."""


class _Call:
    def __init__(self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.hidden, self.args, self.kwargs = hidden, args, kwargs


class _Recorder(torch.nn.Module):
    """Replaces a layer, looks like it to the model, and records the arguments of its calls."""

    def __init__(self, layer: torch.nn.Module, calls: list[_Call], last: bool) -> None:
        super().__init__()
        self.__dict__["_layer"], self._calls, self._last = layer, calls, last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._calls.append(_Call(hidden_states, args, kwargs))
        if self._last:
            raise _EnoughError
        return hidden_states.as_subclass(_Passed)


class _Passed(torch.Tensor):
    """The output of a recorder: some classes use what a layer returns as a tensor, others as a tuple's first item."""

    # Results computed from it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self if index == 0 else super().__getitem__(index)
