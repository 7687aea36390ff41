"""The Triton kernel over latents and over heads against attention spelled out in fp64, and who is chosen when.

It runs in Triton's interpreter, on CPU tensors; with TRITON_INTERPRET=0 in the environment it is compiled and runs on a GPU.
"""

import contextlib
import functools
import os
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import decoding
import pytest
import torch
from decoding import DEVICE, INTERPRETER, KINDS, SCALE, SMALL, TOLERANCE, Kind, agree, grouped, latents, ragged, spelled_out
from forked import run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import rows
from tiny_mla import compiles_whole, error, logits, mla_model, padding, tokens
from transformers import StaticCache

pytest.importorskip("triton")  # there are no wheels for other systems than Linux

from triton import OutOfResources

import attention.kernels
from attention import absorb
from attention.errors import Refusal
from attention.kernels import decode, decode_grouped, split_kv, torch_decode, triton_decode
from attention.kernels.tiling import H200, INTERPRETED, Machine, Shape, Tiling, choose
from attention.kernels.triton_decode import gqa_decode, mla_decode

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETER and not torch.cuda.is_available(), reason="needs a GPU, or the interpreter"),
]


of_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated without a value is NaN, or a number that no index should be."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        out = empty(*shape, **options)
        return out.fill_(torch.nan if out.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rank", rows([16, 48, 64, 112, 320, 448, 512, 576, 704], [16, 112, 320]))
def test_every_rank_is_cut_into_powers_of_two(rank: int, dtype: torch.dtype) -> None:
    q, r, c, k = latents(1, 3, 70, rank, 16, dtype)
    assert agree(mla_decode(q, r, c, k, None, SCALE), spelled_out(q, r, c, k))


@pytest.mark.parametrize(
    ("heads", "rope"), rows([(1, 64), (3, 8), (8, 24), (16, 16), (32, 32), (64, 8), (96, 16)], [(1, 64), (8, 24), (32, 32)])
)
def test_every_number_of_heads_and_rotary_dims(heads: int, rope: int) -> None:
    q, r, c, k = latents(2, heads, 37, 48, rope)
    mask = ragged(2, 37, seed=heads)
    assert agree(mla_decode(q, r, c, k, mask, SCALE), spelled_out(q, r, c, k, mask=mask))


@pytest.mark.parametrize("dtype", rows(TOLERANCE, [torch.float32]), ids=str)
@pytest.mark.parametrize(("heads", "groups", "dim", "rank"), [(8, 4, 64, 64), (8, 1, 80, 80), (6, 2, 24, 48), (5, 5, 16, 32)])
def test_every_shape_of_groups_and_heads(heads: int, groups: int, dim: int, rank: int, dtype: torch.dtype) -> None:
    q, k, v = grouped(2, heads, groups, 70, dim, rank, dtype)
    for mask in (None, ragged(2, 70, seed=heads)):
        assert agree(gqa_decode(q, k, v, mask, SCALE), spelled_out(q, k, v, mask=mask))


@of_kinds
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mask_of", ["bool", "additive", "additive fp16"])
@pytest.mark.usefixtures("poison")
def test_ragged_batches_with_holes(kind: Kind, mask_of: str, dtype: torch.dtype) -> None:
    call, mask = kind.call(3, 70, dtype), ragged(3, 70, holes=0.4)
    if mask_of != "bool":
        mask = decoding.added(mask, torch.float16 if "fp16" in mask_of else torch.float32)
    expected = spelled_out(*call, mask=mask)
    for swap in (False, True):
        assert agree(kind.operator(*call, mask, SCALE, replace(SMALL, swap=swap)), expected)
    assert agree(kind.decode(*call, mask, SCALE, "triton"), expected)


@pytest.mark.parametrize(("batch", "cached"), [(1, 4500), (11, 300)])
@pytest.mark.usefixtures("poison")
def test_partials_are_merged_in_rounds(batch: int, cached: int) -> None:
    """Of few requests by columns, of many by rows; more of them than a round takes."""
    q, r, c, k = latents(batch, 2, cached, 80, 8)
    mask = ragged(batch, cached, seed=batch)
    mask[0] = True
    sizes = replace(SMALL, block_n=64 if batch == 1 else 16, programs=150)
    assert agree(mla_decode(q, r, c, k, mask, SCALE, sizes), spelled_out(q, r, c, k, mask=mask))


@of_kinds
@given(data=st.data())
@settings(max_examples=4, deadline=None, derandomize=True)
def test_any_deal_of_tiles_gives_the_same(kind: Kind, data: st.DataObject) -> None:
    """Fewer programs than requests, more than tiles, tiles of every length, requests that see nothing anywhere."""
    batch, cached = data.draw(st.sampled_from([1, 2, 3, 5, 11])), data.draw(st.integers(1, 70))
    block_n, least = data.draw(st.sampled_from([16, 32])), data.draw(st.integers(1, 3))
    sizes = Tiling(16, block_n, 2, 4, data.draw(st.integers(1, 9)), least, data.draw(st.booleans()))
    if kind.groups is None:
        call = latents(batch, 2, cached, 16, 8)
    else:
        groups = data.draw(st.integers(1, 3))
        call = grouped(batch, 2 * groups, groups, cached, 8, 16)
    mask = torch.zeros(batch, 1, 1, cached, dtype=torch.bool, device=DEVICE)
    for b in range(batch):
        first, end = sorted(data.draw(st.tuples(st.integers(0, cached), st.integers(0, cached))))
        mask[b, ..., first:end] = True
    for given_mask in (mask, None):
        assert agree(kind.operator(*call, given_mask, SCALE, sizes), spelled_out(*call, mask=given_mask))


@pytest.mark.usefixtures("poison")
def test_holes_may_be_wider_than_tiles_and_shares() -> None:
    q, r, c, k = latents(2, 3, 120, 32, 16)
    mask = torch.zeros(2, 1, 1, 120, dtype=torch.bool, device=DEVICE)
    mask[0, ..., 3], mask[0, ..., 90:] = True, True
    mask[1, ..., :2], mask[1, ..., 70], mask[1, ..., 119] = True, True, True
    for one in (mask, decoding.added(mask)):
        assert agree(mla_decode(q, r, c, k, one, SCALE, replace(SMALL, programs=4)), spelled_out(q, r, c, k, mask=one))


@pytest.mark.usefixtures("poison")
def test_tokens_outside_the_span_are_never_read() -> None:
    """Nor are values of other requests: what a static cache holds behind its tail may be anything. Within the span from the
    first token that is seen to the last, hidden tokens are multiplied by 0, so that they must be finite, as in torch."""
    q, r, c, k = latents(4, 3, 80, 48, 16)
    mask = ragged(4, 80, seed=3)
    expected = spelled_out(q, r, c, k, mask=mask)
    unseen = ~mask[:, 0, 0]
    c[unseen], k[unseen] = torch.nan, torch.inf
    assert agree(mla_decode(q, r, c, k, mask, SCALE, SMALL), expected)


def test_a_latent_is_read_where_it_lies() -> None:
    """Views of a static cache `[B, 1, C, R]`, of a wider tensor, of one with tokens before requests; a broadcast mask."""
    q, r, c, k = latents(3, 4, 45, 48, 16)
    mask = ragged(3, 45, seed=1)
    expected = spelled_out(q, r, c, k, mask=mask)
    static = [torch.full((3, 1, 64, t.shape[2]), torch.nan, device=DEVICE) for t in (c, k)]
    joined = torch.full((3, 45, 48 + 16 + 5), torch.nan, device=DEVICE)
    turned = [torch.full((45, 3, t.shape[2]), torch.nan, device=DEVICE) for t in (c, k)]
    for tensor, hall, swapped in zip((c, k), static, turned, strict=True):
        hall[:, 0, 7:52], swapped[:] = tensor, tensor.transpose(0, 1)
    joined[..., :48], joined[..., 50:66] = c, k
    pairs = [
        [hall[:, 0, 7:52] for hall in static],
        [joined[..., :48], joined[..., 50:66]],
        [swapped.transpose(0, 1) for swapped in turned],
    ]
    for latent, k_rope in pairs:
        assert not latent.is_contiguous()
        assert agree(mla_decode(q, r, latent, k_rope, mask, SCALE, SMALL), expected)
    wide = torch.zeros(3, 2, 1, 90, dtype=torch.bool, device=DEVICE)
    wide[:, 1:, :, ::2] = mask
    assert agree(mla_decode(q, r, c, k, wide[:, 1:, :, ::2], SCALE, SMALL), expected)
    one = mask[:1]
    for view in (one, one.expand(3, -1, -1, -1)):
        assert agree(mla_decode(q, r, c, k, view, SCALE, SMALL), spelled_out(q, r, c, k, mask=one))
    across = torch.randn(3, 1, 4, 48, device=DEVICE).transpose(1, 2)  # [B, H, 1, R] as a projection leaves it
    slanted = torch.randn(3, 4, 16, 2, device=DEVICE)[..., :1].transpose(2, 3)
    assert slanted.stride(3) == 2
    found = mla_decode(across, slanted, c, k, mask, SCALE, SMALL)
    assert agree(found, spelled_out(across, slanted, c, k, mask=mask))


def test_heads_are_read_where_they_lie() -> None:
    """A slice of a longer static cache, and one laid out token by token, as tensors that were never made contiguous."""
    q, k, v = grouped(3, 4, 2, 40, 24, 16)
    mask = ragged(3, 40, seed=5)
    wide = [torch.full((3, 2, 60, t.shape[3]), torch.nan, device=DEVICE) for t in (k, v)]
    for room, t in zip(wide, (k, v), strict=True):
        room[:, :, 10:50] = t
    expected = spelled_out(q, k, v, mask=mask)
    assert agree(gqa_decode(q, *(room[:, :, 10:50] for room in wide), mask, SCALE, SMALL), expected)
    lone = [t[:, :1].transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]  # one KV head: its stride means nothing
    assert agree(decode_grouped(q, *lone, mask, SCALE, "triton"), spelled_out(q, *lone, mask=mask))
    one = [t[:1].transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]  # [1, S, G, D] in memory
    assert agree(gqa_decode(q[:1], *one, mask[:1], SCALE, SMALL), expected[:1])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_large_scores_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    q, r, c, k = latents(2, 3, 60, 32, 16, dtype)
    for far, near in ((0, 59), (59, 0), (30, 31)):
        loud = c.clone()
        loud[:, far], loud[:, near] = q[:, 0, 0] * 40, q[:, 0, 0] * 50
        found = mla_decode(q, r, loud, k, None, SCALE, SMALL)
        assert float((q[:, 0, 0].float() * loud[:, near].float()).sum(-1).max()) * SCALE > 300  # exp overflows from 89 on
        assert agree(found, spelled_out(q, r, loud, k))
        quiet = mla_decode(-q, r, loud, k, None, SCALE, SMALL)
        assert agree(quiet, spelled_out(-q, r, loud, k))


def test_the_least_finite_number_hides_as_it_does_in_torch() -> None:
    q, r, c, k = latents(2, 3, 50, 32, 16)
    mask = torch.zeros(2, 1, 1, 50, device=DEVICE)
    mask[0, ..., :20] = torch.finfo(torch.float32).min
    mask[1] = torch.finfo(torch.float32).min  # sees all alike, rather than nothing
    expected = torch_decode.decode(q, r, c, k, mask, SCALE).double()
    assert expected[1].any()
    assert agree(mla_decode(q, r, c, k, mask, SCALE, SMALL), expected)


@of_kinds
def test_torch_agrees_with_the_same_oracle(kind: Kind) -> None:
    call = kind.call(5, 90)
    for mask in (None, ragged(5, 90, holes=0.4, seed=2), decoding.added(ragged(5, 90, holes=0.4, seed=2))):
        assert agree(kind.decode(*call, mask, SCALE, "torch"), spelled_out(*call, mask=mask))


# What is chosen


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends that served, in order; torch does the work of all."""
    names: list[str] = []
    for kind in KINDS.values():
        for name, module, function in zip(("torch", "triton"), (torch_decode, triton_decode), kind.served, strict=True):

            def run(*arguments: Any, name: str = name, kind: Kind = kind) -> torch.Tensor:
                names.append(name)
                return kind.by_torch(*arguments)

            monkeypatch.setattr(module, function, run)
    monkeypatch.setattr(attention.kernels, "_warned", set())
    return names


def as_on_a_fresh_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of the kernels there."""
    decoding.on_gpu(monkeypatch)
    monkeypatch.setattr(triton_decode, "_INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    # With a cache of its own, so that later tests do not hear of failures.
    monkeypatch.setattr(triton_decode, "_mistake", functools.cache(triton_decode._mistake.__wrapped__))


def tried(monkeypatch: pytest.MonkeyPatch, *found: float | Exception) -> list[Shape]:
    """Fresh trials find these, in turn; what is returned fills with what was tried."""
    as_on_a_fresh_gpu(monkeypatch)
    shapes, results = list[Shape](), iter(found)

    def deviation(shape: Shape, device: str) -> float:
        shapes.append(shape)
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(triton_decode, "deviation", deviation)
    return shapes


@of_kinds
def test_a_gpu_has_triton_and_a_cpu_torch(kind: Kind, served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kind.decode(*(t.cpu() for t in kind.call(1, 5)), None, SCALE)  # without a word: here warnings are errors
    decoding.on_gpu(monkeypatch)
    kind.decode(*kind.call(1, 5), ragged(1, 5), SCALE)
    assert served == ["torch", "triton"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v: (q, k, v[..., :8]), "it takes heads whose values are a multiple of 16, not 8"),
        (lambda q, k, v: (q, k.transpose(0, 1).contiguous().transpose(0, 1), v), "do not lie next to those"),
        (lambda q, k, v: (q, k.mT.contiguous().mT, v), r"do not lie side by side \(strides 1 and 20\)"),
    ],
    ids=["values", "sequences", "strides"],
)
def test_triton_objects_to_heads(change: Any, said: str) -> None:
    with pytest.raises(Refusal, match=f"the triton backend cannot decode here: .*{said}"):
        decode_grouped(*change(*grouped(3, 6, 2, 20, 16, 16)), None, SCALE, "triton")


def drawn(rank: int, rope: int) -> Any:
    return lambda *_: (*latents(2, 3, 20, rank, rope), None)


# What a call becomes, with its mask; what a trial finds; or what the machine lacks.
OBJECTIONS: list[tuple[Any, str]] = [
    (lambda *call: (*call, torch.ones(2, 1, 1, 20, device="meta")), "on one device, and these are on .* and meta"),
    (lambda *call: (*(part.double() for part in call), None), "float64"),
    (lambda q, *rest: (q.half(), *rest, None), "float16, float32, float32, float32"),
    (drawn(24, 8), r"multiple of 16 and a rotary key, not 24 \+ 8"),
    (drawn(16, 0), r"16 \+ 0"),
    (drawn(4096, 8), "shared memory"),
    (lambda q, r, c, k: (q, r, c.repeat_interleave(2, 2)[..., ::2], k, None), r"side by side \(strides 2 and 1\)"),
    (lambda q, r, c, k: (q, r, c.requires_grad_(), k, None), "no gradients"),
    (lambda *call: (*call, torch.ones(2, 3, 1, 20, dtype=torch.bool)), r"mask \[2 or 1, 1, 1, S\], not .* \[2, 3, 1, 20\]"),
    (lambda *call: (*call, torch.zeros(2, 1, 1, 20, dtype=torch.int64)), "masks of bool, .* not int64"),
    ("new", "compute capability 8.0"),
    ("triton", "not installed"),
    (OutOfResources(295920, 232448, "shared memory"), "it fails here: OutOfResources: out of resource: .*, Required: 295920"),
    (0.5, "on a trial it was 50 % away from what torch computes"),
    (torch.nan, "on a trial it was nan % away from what torch computes"),
]


@pytest.mark.parametrize(("change", "reason"), OBJECTIONS, ids=[reason for _, reason in OBJECTIONS])
def test_torch_steps_in_with_one_warning_a_reason(
    change: Any, reason: str, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding.on_gpu(monkeypatch, (7, 5) if change == "new" else (9, 0))
    monkeypatch.setattr(triton_decode, "_TRITON", change != "triton")
    if isinstance(change, float | Exception):
        tried(monkeypatch, change)
    *call, mask = (change if callable(change) else drawn(16, 8))(*latents(2, 3, 20, 16, 8))
    monkeypatch.setattr(torch_decode, "decode", lambda *_: served.append("torch") or call[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            decode(*call, mask, SCALE)
    assert served == ["torch"] * 3
    assert len(caught) == 1
    with pytest.raises(Refusal, match=f"triton backend cannot decode here: .*{reason}"):
        decode(*call, mask, SCALE, "triton")
    attention.kernels._warned.clear()
    with pytest.warns(RuntimeWarning, match=reason):
        decode(*call, mask, SCALE)


@of_kinds
def test_a_kernel_is_tried_once_before_it_first_serves(kind: Kind, served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for captures of CUDA graphs, during which nothing can be compared; a full GPU says nothing of the kernel."""
    shapes, capturing = tried(monkeypatch, RuntimeError("Triton Error [CUDA]: out of memory"), 0.0, 0.0), [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.pop() if capturing else False)
    calls = [(kind.call(batch, cached, torch.float16), batch, cached) for batch, cached in ((1, 5), (3, 9))]
    kind.decode(*calls[0][0], None, SCALE)
    assert (served, shapes) == (["triton"], [])
    with pytest.raises(RuntimeError, match="out of memory"):
        kind.decode(*calls[0][0], None, SCALE)
    for call, batch, cached in calls:
        kind.decode(*call, None, SCALE)
        kind.decode(*call, torch.ones(batch, 1, 1, cached, dtype=torch.bool, device=DEVICE), SCALE)
    expected = [Shape(3, 32, 24 if kind.groups else 16, kind.groups, torch.float16, mask) for mask in (None, None, torch.bool)]
    assert (served, shapes) == (["triton"] * 5, expected)


@pytest.mark.parametrize("dtype", rows(TOLERANCE, [torch.float16]), ids=str)
@pytest.mark.parametrize(("groups", "mask"), [(None, torch.bool), (2, torch.float32)], ids=str)
def test_a_trial_finds_the_kernel_right(dtype: torch.dtype, groups: int | None, mask: torch.dtype) -> None:
    before, shape = torch.get_rng_state(), Shape(3, 48, 24, groups, dtype, mask)
    assert 0 < triton_decode.deviation(shape, DEVICE) < triton_decode.tolerance(dtype)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("groups", [None, 2])
def test_a_trial_finds_a_kernel_wrong(groups: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = split_kv.decode
    monkeypatch.setattr(split_kv, "decode", lambda *arguments: kernel(*arguments).roll(1, 0))
    assert triton_decode.deviation(Shape(3, 48, 24, groups, torch.float32, torch.bool), DEVICE) > 0.5


@pytest.mark.skipif(not INTERPRETER, reason="as on a GPU")
def test_a_trial_is_no_part_of_what_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Step(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return decode_grouped(q, k, v, mask, SCALE)

    as_on_a_fresh_gpu(monkeypatch)
    call = *grouped(3, 6, 2, 20, 16, 16), ragged(3, 20)
    with torch.no_grad():
        exported = torch.export.export(Step(), call, strict=True)
        assert (exported.module()(*call) - Step()(*call)).abs().max() < 1e-6
    assert [str(node.target) for node in exported.graph.nodes if node.op == "call_function"] == ["kvfold.gqa_decode.default"]
    assert triton_decode._mistake.cache_info().currsize == 1


def test_who_served_can_be_watched(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call = latents(1, 2, 5, 16, 8)
    with attention.kernels.watched() as seen:
        decode(*call, None, SCALE, "triton")
        with attention.kernels.watched() as inner:
            decode(*call, None, SCALE, "torch")
    assert (seen, inner) == ({"triton": None, "torch": None}, {"torch": None})
    decoding.on_gpu(monkeypatch, (7, 5))
    with attention.kernels.watched() as seen, pytest.warns(RuntimeWarning, match="capability"):
        decode(*call, None, SCALE)
    decode(*call, None, SCALE, "torch")
    warned = "decoding without the triton backend: it needs an NVIDIA GPU of compute capability 8.0 or later"
    assert seen == {"torch": warned}


def test_several_queries_are_torchs_whatever_was_asked_for(served: list[str]) -> None:
    q, r, c, k = latents(2, 3, 9, 16, 8)
    q, r = q.expand(-1, -1, 4, -1), r.expand(-1, -1, 4, -1)
    mask = torch.ones(4, 9, dtype=torch.bool, device=DEVICE).tril(5)[None, None]
    expected = KINDS["latent"].by_torch(q, r, c, k, mask, SCALE)
    assert torch.equal(decode(q, r, c, k, mask, SCALE, "triton"), expected)
    assert served == ["torch"]


def test_backends_are_called_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    call = latents(1, 2, 5, 16, 8)
    with pytest.raises(Refusal, match="unknown backend 'cuda': it must be one of 'auto', 'triton', 'torch'"):
        decode(*call, None, SCALE, "cuda")  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="unknown backend 'cuda'"):
        absorb(mla_model(), backend="cuda")  # type: ignore[arg-type]
    monkeypatch.setattr(triton_decode, "_INTERPRETED", False)
    with pytest.raises(Refusal, match="needs tensors on a CUDA device, and these are on cpu"):
        decode(*(t.cpu() for t in call), None, SCALE, "triton")


@of_kinds
@pytest.mark.parametrize("length", [19, 21])
def test_a_mask_is_for_the_whole_cache(length: int, kind: Kind) -> None:
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool, device=DEVICE)
    for backend in ("auto", "triton", "torch"):
        with pytest.raises(Refusal, match=f"mask over {length} tokens to a cache of 20"):
            kind.decode(*kind.call(2, 20), mask, SCALE, backend)


# Whole models


def test_a_model_is_as_exact_as_stock() -> None:
    """Over a static cache, and with left padding."""
    short = {"num_hidden_layers": 1}
    ids, mask = tokens(2, 14).to(DEVICE), padding([14, 9]).to(DEVICE)
    expected = logits(mla_model(dtype=torch.float64, **short).to(DEVICE), ids, mask)[mask.bool()]
    model = mla_model(**short).to(DEVICE)
    stock = error(logits(model, ids, mask)[mask.bool()], expected)
    cache = StaticCache(config=model.config, max_cache_len=20)
    found = logits(absorb(model, when="always", backend="triton"), ids, mask, cache=cache)[mask.bool()]
    assert error(found, expected) < max(1e-5, 1.5 * stock)


def test_a_decode_step_compiles_whole_around_the_kernel() -> None:
    model = absorb(mla_model(num_hidden_layers=1), when="always", backend="triton").to(DEVICE)
    compiles_whole(model, tokens(2, 9).to(DEVICE), "aot_eager")


@pytest.mark.parametrize(("change", "said"), [("no triton", "not installed"), ("rank", "24"), ("no kernel", "OutOfResources")])
def test_compiled_code_warns_and_goes_on(change: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU where Triton cannot serve: one warning, no break in the graph, and torch."""
    torch._dynamo.reset()
    shapes = tried(monkeypatch, OutOfResources(295920, 232448, "shared memory"))
    monkeypatch.setattr(attention.kernels, "_warned", set())
    monkeypatch.setattr(triton_decode, "_TRITON", change != "no triton")
    q, r, c, k = latents(2, 3, 20, 24 if change == "rank" else 16, 8)
    compiled = torch.compile(decode, fullgraph=True, backend="eager")
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [compiled(q, r, c, k, None, SCALE) for _ in range(2)]
    assert [said in str(warning.message) for warning in caught] == [True]
    assert all(error(one, torch_decode.decode(q, r, c, k, None, SCALE)) < 1e-6 for one in found)
    assert len(shapes) == (change == "no kernel")


@of_kinds
def test_the_operator_keeps_its_promises(kind: Kind) -> None:
    """What torch.compile believes of it: shapes, strides, no hidden changes."""
    operator = torch.ops.kvfold.gqa_decode if kind.groups else torch.ops.kvfold.mla_decode
    torch.library.opcheck(operator, (*kind.call(2, 20), ragged(2, 20), SCALE), test_utils=("test_schema", "test_faketensor"))


# Sizes


MACHINES = {
    80: Machine(108, 163 * 1024, 8),
    89: Machine(128, 99 * 1024, 8),
    90: H200,
    100: Machine(148, 227 * 1024, 10),
    120: Machine(170, 99 * 1024, 12),
}


@pytest.mark.parametrize("device", [*MACHINES.values(), INTERPRETED], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_tilings_keep_their_rules(size: int, device: Machine) -> None:
    """Whether they fit is the compiler's to say, below."""
    for rank in (16, 48, 256, 320, 448, 512, 576, 704):
        for heads in (1, 8, 16, 17, 32, 33, 64, 96, 128):
            found = choose(heads, rank, 64, size, device)
            if found is None:
                assert (size, device.shared) == (4, 99 * 1024)
                assert rank > 256
                continue
            blocks = -(-heads // found.block_h)
            assert found.programs * blocks <= max(device.processors, blocks)
            assert found.least * found.block_n * (rank + 64) * size >= 4 * found.block_h * rank
            wgmma = size == 2 and device.major == 9
            assert found.block_h <= (64 if wgmma else 32)
            assert wgmma or not found.swap
            assert not found.swap or found.block_n >= 64  # rows of a product of wgmma
    assert choose(64, 512, 64, 2, H200) == Tiling(64, 64, 2, 8, 132, 2)
    assert choose(32, 512, 64, 2, H200) == Tiling(32, 64, 2, 4, 132, 1, swap=True)
    assert choose(8, 256, 64, 2, H200) == Tiling(16, 128, 2, 4, 132, 1, swap=True)


COMPILE = """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from attention.kernels import split_kv
    from attention.kernels.tiling import Machine, Tiling, choose, padded, shared_bytes

    class Gpu:
        get_current_target = lambda self: GPUTarget("cuda", capability, 32)
        get_current_device = lambda self: capability  # compiled kernels are kept by device
        get_current_stream = lambda self, device: 0

    capability = 0
    triton.runtime.driver.set_active(Gpu())
    loaded, compiled = {}, []
    triton.knobs.runtime.jit_post_compile_hook = lambda **told: compiled.append(told["repr"])
    CompiledKernel.__getitem__ = lambda self, grid: loaded.__setitem__(self.name, self)
    split_kv.launch = lambda kernel, grid, *given, **options: kernel.warmup(*given, grid=grid, **options)[grid]
    for capability, machine, heads, rank, rope, mask, dtype, tiling, groups in CASES:
        size = dtype.itemsize
        tiling = tiling or choose(heads, rank, rope, size, machine)
        before = len(compiled)
        for batch, kept in (1, 256), (3, 33), (32, 256):
            seen = None if mask is None else torch.zeros(batch, 1, 1, kept, dtype=mask)
            rows = batch * (groups or 1)
            shapes = (rows, heads, 1, rank), (rows, heads, 1, rope), (rows, kept, rank), (rows, kept, rope)
            q_latent, q_rope, *cached = (torch.zeros(shape, dtype=dtype) for shape in shapes)
            split_kv.decode(None if groups else q_latent, q_rope, *cached, seen, 0.5, tiling, groups or 1)
        assert sum("_attend" in name for name in compiled[before:]) == 1, "one for every number of sequences up to 32"
        attend = loaded["_attend"]
        needed, code = attend.metadata.shared, attend.asm["ttgir"]
        told = heads, rank, rope, dtype, tiling, needed, shared_bytes(tiling, rank, rope, size)
        assert needed <= shared_bytes(tiling, rank, rope, size) <= machine.shared, told
        loop = code[code.index("scf.for"):]
        loop = loop[:loop.index("scf.yield")]
        # one asynchronous copy a chunk, one of the rotary key, one of numbers to add: nothing is fetched twice
        copies = padded(rank).bit_count() + 1 + (mask == torch.float32)
        assert loop.count("async_copy_global_to_local") == copies, loop
        wgmma = capability == 90 and size == 2
        assert ("wgmma" in attend.asm["ptx"]) == wgmma
        # wgmma reads tiles where they lie
        assert not wgmma or "ldmatrix" not in attend.asm["ptx"]
    print(len(compiled), *sorted(loaded))
"""


CASES = {
    "H200": {
        90: "(16, 512, 64, None, torch.bfloat16, None, None), (8, 128, 128, torch.bool, torch.bfloat16, None, 4)",
    },
    "others": {
        80: "(8, 512, 64, torch.float32, torch.float32, None, None),",
        # The first: after loops that hold little, sums need more.
        90: "(64, 512, 64, None, torch.bfloat16, Tiling(64, 16, 2, 8, 132, 1), None),"
            "(32, 80, 80, torch.bool, torch.float16, None, 1),",
        100: "(8, 128, 128, torch.bool, torch.bfloat16, None, 4),",
        120: "(16, 256, 256, torch.bool, torch.bfloat16, None, 2),",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", rows(CASES, ["H200"]))
def test_kernels_compile_and_fit(kind: str, tmp_path: Path) -> None:
    """By Triton's own path, but for the last steps: loading and launching. No GPU is needed."""
    cases = " + ".join(f"tuple(({gpu}, {MACHINES[gpu]}, *case) for case in ({each}))" for gpu, each in CASES[kind].items())
    script = tmp_path / "build.py"
    script.write_text(textwrap.dedent(COMPILE).replace("CASES", cases))
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[1:] == ["_attend", "_bounds", "_combine"], done.stderr[-3000:]
    assert int(done.stdout.split()[0]) >= 3 * len(CASES[kind])  # kernels were compiled, and each of them seen


def test_triton_is_not_imported_before_a_call_that_it_serves() -> None:
    code = """
        import sys, torch
        from attention.kernels import decode
        import attention.patch
        decode(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 8), torch.randn(1, 5, 16), torch.randn(1, 5, 8), None, 1.0)
        assert "attention.kernels.split_kv" not in sys.modules
    """
    done = run_forked(textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
