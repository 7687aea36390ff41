"""The kernel over grouped keys and values against attention spelled out in fp64, and who is chosen when."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding import DEVICE, INTERPRETER, SCALE, SMALL, TOLERANCE, added, agree, on_gpu, ragged
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import rows

pytest.importorskip("triton")  # there are no wheels for other systems than Linux

import attention.kernels
from attention.errors import Refusal
from attention.kernels import GROUPED, decode_grouped, split_kv, torch_decode, trial, triton_decode
from attention.kernels.operators import gqa_decode
from attention.kernels.tiling import Shape, Tiling, choose, machine

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETER and not torch.cuda.is_available(), reason="needs a GPU, or the interpreter"),
]


def inputs(
    batch: int, heads: int, groups: int, cached: int, dim: int, rank: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, heads, 1, dim), (batch, groups, cached, dim), (batch, groups, cached, rank)
    q, k, v = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return q, k, v


def spelled_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """One head of one sequence at a time, over the tokens it sees and no others, in fp64; zero where it sees none."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    for b in range(len(q)):
        row = None if mask is None else mask.expand(len(q), -1, -1, -1)[b, 0, 0]
        seen = torch.arange(k.shape[2], device=q.device)
        if row is not None:
            seen = (row if row.dtype == torch.bool else row > -torch.inf).nonzero()[:, 0]
        for h in range(q.shape[1]) if len(seen) else ():
            group = h // (q.shape[1] // k.shape[1])
            scores = SCALE * (k[b, group, seen].double() @ q[b, h, 0].double())
            if row is not None and row.dtype != torch.bool:
                scores = scores + row[seen].double()
            out[b, h, 0] = scores.softmax(0) @ v[b, group, seen].double()
    return out


# The kernel


@pytest.mark.parametrize("dtype", rows(TOLERANCE, [torch.float32]), ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "rank"), [(8, 4, 64, 64), (8, 1, 80, 80), (6, 2, 24, 48), (32, 2, 128, 128), (5, 5, 16, 32)]
)
def test_every_shape_of_groups_and_heads(heads: int, groups: int, dim: int, rank: int, dtype: torch.dtype) -> None:
    q, k, v = inputs(2, heads, groups, 70, dim, rank, dtype)
    for mask in (None, ragged(2, 70, seed=heads)):
        assert agree(gqa_decode(q, k, v, mask, SCALE), spelled_out(q, k, v, mask))


@pytest.mark.parametrize("kind", ["bool", "additive", "additive fp16"])
@pytest.mark.usefixtures("poison")
def test_ragged_batches_with_holes(kind: str) -> None:
    q, k, v = inputs(3, 6, 3, 70, 24, 32)
    mask = ragged(3, 70, holes=0.4)
    if kind != "bool":
        mask = added(mask, torch.float16 if "fp16" in kind else torch.float32)
    for sizes in (None, SMALL, replace(SMALL, swap=True)):
        assert agree(gqa_decode(q, k, v, mask, SCALE, sizes), spelled_out(q, k, v, mask))


@given(data=st.data())
@settings(max_examples=6, deadline=None, derandomize=True)
def test_any_deal_of_tiles_gives_the_same(data: st.DataObject) -> None:
    """Fewer programs than KV heads, more than tiles; sequences that see nothing; shares that end within a sequence's heads."""
    batch, groups, cached = (data.draw(st.integers(1, most)) for most in (4, 5, 70))
    programs, least, swap = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3)), data.draw(st.booleans())
    sizes = Tiling(16, data.draw(st.sampled_from([16, 32])), 2, 4, programs, least, swap)
    q, k, v = inputs(batch, 2 * groups, groups, cached, 8, 16)
    mask = torch.zeros(batch, 1, 1, cached, dtype=torch.bool, device=DEVICE)
    for b in range(batch):
        first, end = sorted(data.draw(st.tuples(st.integers(0, cached), st.integers(0, cached))))
        mask[b, ..., first:end] = True
    for given_mask in (mask, None):
        assert agree(gqa_decode(q, k, v, given_mask, SCALE, sizes), spelled_out(q, k, v, given_mask))


@pytest.mark.parametrize("programs", rows([1, 4, 30], [4, 30]))
@pytest.mark.usefixtures("poison")
def test_sequences_that_see_nothing_are_zero(programs: int) -> None:
    q, k, v = inputs(4, 6, 3, 40, 16, 16)
    mask = ragged(4, 40)
    mask[0] = mask[2] = False
    found = gqa_decode(q, k, v, mask, SCALE, replace(SMALL, programs=programs))
    assert agree(found, spelled_out(q, k, v, mask))
    assert not found[0].any()


def test_the_cache_is_read_where_it_lies() -> None:
    """A slice of a longer static cache, and one laid out token by token, as tensors that were never made contiguous."""
    q, k, v = inputs(3, 4, 2, 40, 24, 16)
    mask = ragged(3, 40, seed=5)
    wide = [torch.full((3, 2, 60, t.shape[3]), torch.nan, device=DEVICE) for t in (k, v)]
    for room, t in zip(wide, (k, v), strict=True):
        room[:, :, 10:50] = t
    expected = spelled_out(q, k, v, mask)
    assert agree(gqa_decode(q, *(room[:, :, 10:50] for room in wide), mask, SCALE, SMALL), expected)
    lone = [t[:, :1].transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]  # one KV head: its stride means nothing
    assert agree(decode_grouped(q, *lone, mask, SCALE, "triton"), spelled_out(q, *lone, mask))
    one = [t[:1].transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]  # [1, S, G, D] in memory
    assert agree(gqa_decode(q[:1], *one, mask[:1], SCALE, SMALL), expected[:1])


def test_torch_agrees_with_the_same_oracle() -> None:
    q, k, v = inputs(5, 6, 3, 90, 24, 32)
    for mask in (None, ragged(5, 90, holes=0.4, seed=2), added(ragged(5, 90, holes=0.4, seed=2))):
        assert mask is None or bool((mask > -torch.inf if mask.dtype != torch.bool else mask).any(-1).all())
        assert agree(decode_grouped(q, k, v, mask, SCALE, "torch"), spelled_out(q, k, v, mask))


# Who serves


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v, m: (q, k, v[..., :8], m), "it takes heads whose values are a multiple of 16, not 8"),
        (lambda q, k, v, m: (q, k.transpose(0, 1).contiguous().transpose(0, 1), v, m), "do not lie next to those"),
        (lambda q, k, v, m: (q, k.mT.contiguous().mT, v, m), r"do not lie side by side \(strides 1 and 20\)"),
        (lambda q, k, v, m: (q.double(), k.double(), v.double(), m), "not float64, float64, float64"),
        (lambda q, k, v, m: (q, k, v, m.expand(3, 6, 1, 20)), r"not one of shape \[3, 6, 1, 20\]"),
        (lambda q, k, v, m: (q.clone().requires_grad_(), k, v, m), "it has no gradients"),
    ],
    ids=["values", "sequences", "strides", "dtype", "mask", "gradients"],
)  # fmt: skip
def test_torch_steps_in_with_one_warning(change: Any, said: str, served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **_: q.new_zeros(*q.shape[:3], v.shape[3])
    )
    call = change(*inputs(3, 6, 2, 20, 16, 16), torch.ones(3, 1, 1, 20, dtype=torch.bool, device=DEVICE))
    on_gpu(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"decoding without the triton backend: .*{said}"):
        decode_grouped(*call, SCALE)
    decode_grouped(*call, SCALE)  # without a word: here warnings are errors
    assert served == ["torch", "torch"]
    with pytest.raises(Refusal, match=f"the triton backend cannot decode here: .*{said}"):
        decode_grouped(*call, SCALE, "triton")


def test_a_gpu_has_triton_and_a_cpu_torch(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call = inputs(3, 6, 2, 20, 16, 16)
    decode_grouped(*call, None, SCALE)
    on_gpu(monkeypatch)
    with attention.kernels.watched() as seen:
        decode_grouped(*call, ragged(3, 20), SCALE)
    assert served == (["torch", "triton"] if INTERPRETER else ["triton", "triton"])
    assert seen == {"triton": None}


def test_a_kernel_is_built_before_it_is_first_launched(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(triton_decode, "_INTERPRETED", False)
    monkeypatch.setattr(triton_decode, "_failure", functools.cache(triton_decode._failure.__wrapped__))
    monkeypatch.setattr(split_kv, "build", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    for batch, cached in ((1, 5), (3, 9)):
        q, k, v = inputs(batch, 6, 2, cached, 24, 32, torch.float16)
        decode_grouped(q, k, v, ragged(batch, cached), SCALE)
    tiling = choose(3, 32, 24, 2, machine(torch.device(DEVICE)))
    assert asked == [(Shape(3, 32, 24, 2, torch.float16, torch.bool), tiling)]
    assert served == ["triton", "triton"]


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
    call = *inputs(3, 6, 2, 20, 16, 16), ragged(3, 20)
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
    call = *inputs(3, 6, 2, 20, 16, 16), ragged(3, 20)
    decode_grouped(*call, SCALE)  # captured
    assert (served, tried) == (["triton"], [])
    tried.append(Shape(0, 0, 0, None, torch.float32, None))  # no more
    with pytest.warns(RuntimeWarning, match=r"on a trial it was (50|nan) % away from what torch computes"):
        decode_grouped(*call, SCALE)
    decode_grouped(*call, SCALE)
    assert served == ["triton", "torch", "torch"]
    assert tried[1:] == [Shape(3, 16, 16, 2, torch.float32, torch.bool)]


def test_a_mask_is_for_the_whole_cache() -> None:
    q, k, v = inputs(1, 4, 2, 20, 16, 16)
    with pytest.raises(Refusal, match="a mask over 19 tokens to a cache of 20"):
        decode_grouped(q, k, v, ragged(1, 19), SCALE)


def test_the_operator_keeps_its_promises() -> None:
    q, k, v = inputs(2, 4, 2, 20, 16, 32)
    torch.library.opcheck(
        torch.ops.kvfold.gqa_decode, (q, k, v, ragged(2, 20), SCALE), test_utils=("test_schema", "test_faketensor")
    )
