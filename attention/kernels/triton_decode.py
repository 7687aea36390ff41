"""Triton as a backend: its kernels (`split_kv`) as torch operators, which calls they cannot serve, and whether they work here.

The first call that Triton serves imports it.
"""

import os
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from attention.cache import Stored
from attention.errors import one_line
from attention.kernels import torch_decode
from attention.kernels.tiling import Shape, Tiling, choose, machine
from attention.spec import RANK_STEP

_TRITON = find_spec("triton") is not None
# Triton reads its environment on import, in the same way.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of a trial: each program gets several tiles, and each sequence several programs.
_BATCH, _CACHED, _PROGRAMS = 3, 700, 4


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`attention.kernels.decode` for one query per request, without its checks: `split_kv.decode` on the tensors' device."""
    from attention.kernels import split_kv

    with torch.cuda.device_of(q_rope):
        return split_kv.decode(q_latent, q_rope, latent, k_rope, mask, scaling, tiling)


def gqa_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`attention.kernels.decode_grouped` without its checks. Each KV head is one request of H / G query heads, and read once.

    Keys and values have strides that let B and G be one dim, and 1 in the last; Dv is a multiple of 16; the mask is the same
    for all heads. The result is contiguous. A `tiling` is for H / G heads, rank Dv and rope D.
    """
    from attention.kernels import split_kv

    batch, groups, _, dim = keys.shape
    rows = query.reshape(batch * groups, -1, 1, dim)
    values, keys = (cached.view(-1, *cached.shape[2:]) for cached in (values, keys))
    with torch.cuda.device_of(query):
        out = split_kv.decode(None, rows, values, keys, mask, scaling, tiling, groups)
    return out.view(batch, query.shape[1], 1, -1)


# Custom operators: compiled code calls them as they are and does not trace Triton's launches.
mla = torch.library.custom_op(
    "kvfold::mla_decode",
    mla_decode,
    mutates_args=(),
    schema="(Tensor q_latent, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor? mask, float scaling) -> Tensor",
)
gqa = torch.library.custom_op(
    "kvfold::gqa_decode",
    gqa_decode,
    mutates_args=(),
    schema="(Tensor query, Tensor keys, Tensor values, Tensor? mask, float scaling) -> Tensor",
)
mla.register_fake(lambda q_latent, *_: q_latent.new_empty(q_latent.shape))
gqa.register_fake(lambda query, keys, values, *_: query.new_empty((*query.shape[:3], values.shape[3])))


def on_gpu(tensor: torch.Tensor) -> bool:
    """A function of its own, so that tests can replace it."""
    return tensor.is_cuda


def latent_objection(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
) -> str | None:
    """Why Triton cannot serve `attention.kernels.decode` with one query and these tensors, or None."""
    heads, rank, rope = q_latent.shape[1], latent.shape[-1], k_rope.shape[-1]
    if reason := _objection((q_latent, q_rope, latent, k_rope), latent, k_rope, mask):
        return reason
    if rank % RANK_STEP or not rank or not rope:
        return f"it takes a latent rank that is a multiple of {RANK_STEP} and a rotary key, not {rank} + {rope}"
    return _machine_objection(on_gpu(latent), str(latent.device), *_constants(latent, mask, heads, rank, rope, None))


def grouped_objection(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> str | None:
    """Why Triton cannot serve `attention.kernels.decode_grouped` with these tensors, or None."""
    (batch, groups, _, dim), rank = keys.shape, values.shape[3]
    if reason := _objection((query, keys, values), values, keys, mask):
        return reason
    if rank % RANK_STEP or not rank or not dim:
        return f"it takes heads whose values are a multiple of {RANK_STEP}, not {rank}"
    if batch > 1 and groups > 1 and any(part.stride(0) != groups * part.stride(1) for part in (keys, values)):
        return "the KV heads of a sequence do not lie next to those of the one before"
    shape = _constants(values, mask, query.shape[1] // groups, rank, dim, groups)
    return _machine_objection(on_gpu(values), str(values.device), *shape)


def _objection(
    tensors: tuple[torch.Tensor, ...], values: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None
) -> str | None:
    """Why Triton cannot serve a call of either kind with these `tensors`, which include the cached `values` and `keys`."""
    if not _TRITON:
        return "Triton is not installed"
    if not on_gpu(values) and not (_INTERPRETED and values.device.type == "cpu"):
        return f"it needs tensors on a CUDA device, and these are on {values.device.type}"
    if any(tensor.device != values.device for tensor in (*tensors, *(() if mask is None else (mask,)))):
        devices = ", ".join(str(tensor.device) for tensor in tensors) + ("" if mask is None else f" and {mask.device}")
        return f"it takes tensors on one device, and these are on {devices}"
    if isinstance(values, Stored) or isinstance(keys, Stored):
        return "it reads no encoded cache"
    if values.dtype not in _DTYPES or any(tensor.dtype != values.dtype for tensor in tensors):
        return f"it takes float16, bfloat16 or float32, all alike, not {', '.join(str(t.dtype)[6:] for t in tensors)}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "it has no gradients, and some tensors require them (use torch.no_grad())"
    if values.stride(-1) != 1 or keys.stride(-1) != 1:
        return f"the cached values of a token do not lie side by side (strides {values.stride(-1)} and {keys.stride(-1)})"
    if mask is not None and mask.shape[:-1] not in ((1, 1, 1), (values.shape[0], 1, 1)):
        return f"it takes a mask [{values.shape[0]} or 1, 1, 1, S], not one of shape {list(mask.shape)}"
    if mask is not None and mask.dtype not in (torch.bool, *_DTYPES):
        return f"it takes masks of bool, float16, bfloat16 or float32, not {str(mask.dtype)[6:]}"
    return None


def _constants(cached: torch.Tensor, mask: torch.Tensor | None, *sizes: int | None) -> tuple[Any, ...]:
    """A `Shape`, as a plain tuple of constants for torch.compile, even in code compiled for any size: it has to know the length
    of a range.
    """
    known = (None if size is None else len(range(size)) for size in sizes)
    return *known, cached.dtype, None if mask is None else mask.dtype


# Facts about this machine: compiled code need not look them up again.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _machine_objection(cuda: bool, device: str, *constants: Any) -> str | None:
    shape = Shape(*constants)
    if cuda and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    heads, rank, rope, size = *shape[:3], shape.dtype.itemsize
    if choose(heads, rank, rope, size, machine(torch.device(device))) is None:
        return f"two tiles of rank {rank} + {rope}, {size} bytes a value, do not fit into the shared memory of this GPU"
    # No trial during the capture of a CUDA graph, where no value can be read: a capture follows an ordinary call.
    capturing = cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return None if _INTERPRETED or capturing else _mistake(shape, device)


@cache
def _mistake(shape: Shape, device: str) -> str | None:
    """Why the kernel does not serve calls of `shape` on `device`, or None: not every GPU and version of Triton was tested.

    A trial builds and launches it: a failing launch would end the whole model. Traces of torch.compile find it built already.
    """
    try:
        with torch.cuda.device(device):
            off = deviation(shape, device)
    except Exception as error:  # errors of Triton, its compilers and the driver have no common class
        # A full GPU says nothing about the kernel, and the next call may find room.
        if "out of memory" in str(error):
            raise
        return f"it fails here: {type(error).__name__}: {one_line(error)}"
    if off <= tolerance(shape.dtype):
        return None
    return f"on a trial it was {100 * off:.3g} % away from what torch computes"


@torch.no_grad()
def deviation(shape: Shape, device: str) -> float:
    """The relative error of the kernel for calls of `shape`, compared with torch in fp64 on the same numbers.

    The inputs are random but the same each time, and torch's generators stay untouched; of three sequences one is padded on the
    left and one on the right.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(shape.dtype)

    heads, rank, rope, groups = shape[:4]
    tiling = choose(heads, rank, rope, shape.dtype.itemsize, machine(torch.device(device)))
    assert tiling is not None
    tiling = replace(tiling, programs=_PROGRAMS)
    scaling = (rank + rope) ** -0.5
    # While a model is exported or traced, tensors have no values; here they need some. (Autocast leaves fp64 alone.)
    with _disable_current_modes():
        mask = None if shape.mask is None else _mask(shape.mask, device)
        wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
        if groups is None:
            q, r = draw(_BATCH, heads, 1, rank), draw(_BATCH, heads, 1, rope)
            c, k = draw(_BATCH, _CACHED, rank), draw(_BATCH, _CACHED, rope)
            found = mla_decode(q, r, c, k, mask, scaling, tiling)
            expected = torch_decode.decode(q.double(), r.double(), c.double(), k.double(), wide, scaling)
        else:
            q = draw(_BATCH, groups * heads, 1, rope)
            v, k = draw(_BATCH, groups, _CACHED, rank), draw(_BATCH, groups, _CACHED, rope)
            found = gqa_decode(q, k, v, mask, scaling, tiling)
            expected = torch_decode.decode_grouped(q.double(), k.double(), v.double(), wide, scaling)
        return float((found.double() - expected).norm() / expected.norm())


def _mask(kind: torch.dtype, device: str) -> torch.Tensor:
    first = torch.tensor([0, 70, 0], device=device)[:, None]
    end = torch.tensor([_CACHED, _CACHED, 470], device=device)[:, None]
    tokens = torch.arange(_CACHED, device=device)
    seen = ((tokens >= first) & (tokens < end))[:, None, None]
    return seen if kind == torch.bool else torch.zeros(seen.shape, dtype=kind, device=device).masked_fill(~seen, -torch.inf)


def tolerance(dtype: torch.dtype) -> float:
    """The relative error that rounding explains, with a margin: 0.4 % in fp16, 3 % in bf16, 0.01 % in fp32."""
    return max(4 * torch.finfo(dtype).eps, 1e-4)
