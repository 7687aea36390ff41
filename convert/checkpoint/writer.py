"""Writes checkpoint files: shards are streamed, hashed, read back, synced. It knows tensors by name, and no attention.

safetensors' own `save_file` copies a whole shard into memory first. The format is a JSON header and the bytes; writing
them here keeps copied tensors out of memory.

A file gets its name only when its bytes are on disk, so that a file that exists after a power failure is complete.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from attention.errors import Failure
from eval.inputs.reader import DTYPES, SAFETENSORS, open_safetensors
from eval.inputs.sealed import checksum, give_name, write_whole

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 2**20  # values per chunk that is checked, cast and written; small enough for the CPU's cache
_FAILING = "the disk or the memory is failing"


def write_shard(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    progress: Callable[[int], object] = lambda written: None,
) -> str:
    """Write one safetensors file, read it back, compare every byte, then give it its name.

    Args:
        path: The final name; until the comparison has succeeded, the file is called `<name>.tmp`.
        tensors: The tensors by name, mapped or computed.
        dtypes: The dtype that each is stored in.
        progress: Called with the number of bytes newly written.

    Returns:
        The checksum, as from `checksum`.

    Raises:
        Failure: A value is not finite (before or after the cast), or the file does not read back as written.
        OSError: The disk is full or broken.
    """
    # Wide dtypes first, as safetensors itself orders them, so that every tensor is aligned for mapping.
    ordered = dict(sorted(tensors.items(), key=lambda item: -dtypes[item[0]].itemsize))
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file, ThreadPoolExecutor(2) as beside:
        header = _header(ordered, dtypes)
        file.write(struct.pack("<Q", len(header)) + header)
        for name, tensor in ordered.items():
            for chunk in _chunks(tensor, dtypes[name]):
                if not _finite(chunk):
                    raise _not_finite(name, tensor, dtypes[name])
                file.write(memoryview(chunk.view(torch.uint8).numpy()))  # type: ignore[arg-type]  # missing in numpy's stubs
                progress(chunk.nbytes)
        file.flush()
        # It is synced and hashed while it is compared.
        synced, summed = beside.submit(os.fsync, file.fileno()), beside.submit(checksum, temporary)
        _verify(temporary, ordered, dtypes)
        synced.result()
    give_name(temporary, path)
    return summed.result()


def _header(tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * dtypes[name].itemsize
        entries[name] = {"dtype": _NAMES[dtypes[name]], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8)


def _chunks(tensor: torch.Tensor, dtype: torch.dtype) -> Iterable[torch.Tensor]:
    """`tensor` flattened, in pieces, cast to `dtype`."""
    return (chunk.to(dtype) for chunk in tensor.contiguous().flatten().split(_CHUNK))


def _finite(chunk: torch.Tensor) -> bool:
    """Whether all values are finite. One vectorised pass: `isfinite` takes three, and 25 times as long in bfloat16."""
    if not chunk.is_floating_point() or chunk.dtype.itemsize == 1 or not chunk.numel():
        return True
    return all(math.isfinite(bound) for bound in torch.aminmax(chunk))  # NaN propagates to both bounds


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise a Failure that names the tensor if it holds NaN or infinities."""
    if not _finite(tensor):
        raise _not_finite(name, tensor, tensor.dtype)


def _not_finite(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Failure:
    if torch.isfinite(tensor).all():
        largest, kind = tensor.abs().max(), str(dtype).removeprefix("torch.")
        return Failure(
            f"tensor {name} overflows in {kind}: its largest value is {largest:g}", hint="use --dtype bfloat16 or float32"
        )
    return Failure(f"tensor {name} holds NaN or infinite values", hint="the source checkpoint is damaged; get it again")


def _verify(path: Path, tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    written = open_safetensors(path)
    if set(written.keys()) != set(tensors):
        raise Failure(f"{path.name} does not read back: its tensors are not the ones written", hint=_FAILING)
    for name, tensor in tensors.items():
        back = written.get_tensor(name)
        chunks = zip(back.flatten().split(_CHUNK), _chunks(tensor, dtypes[name]), strict=True)
        # numpy compares many bytes at once, and torch value by value.
        same = ((read.view(torch.uint8).numpy() == meant.view(torch.uint8).numpy()).all() for read, meant in chunks)
        if back.shape != tensor.shape or not all(same):
            raise Failure(f"{path.name} does not read back: {name} differs", hint=_FAILING)


def write_index(directory: Path, shards: Mapping[str, Iterable[str]], total_bytes: int) -> None:
    """Write `model.safetensors.index.json` for `shards`, which maps files to tensor names."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_whole(directory / f"{SAFETENSORS}.index.json", (json.dumps(index, indent=2) + "\n").encode())


def shard_names(count: int) -> list[str]:
    """File names of `count` shards, as transformers expects them."""
    if count == 1:
        return [SAFETENSORS]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
