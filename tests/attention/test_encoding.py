"""Encoded values decode to what they were, within what their format promises."""

from __future__ import annotations

import pytest
import torch

from attention.encoding import Encoded, decode, encode
from attention.formats import FORMATS, Format

INTEGERS = [form for form in FORMATS.values() if form.group]
EVERY = list(FORMATS.values())


def named(form: Format) -> str:
    return form.name


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def back(values: torch.Tensor, form: Format, group: int = 32) -> torch.Tensor:
    return decode(encode(values, form, group), form, group, values.dtype)


@pytest.mark.parametrize("form", INTEGERS, ids=named)
@pytest.mark.parametrize(("size", "group"), [(64, 32), (64, 64), (80, 32), (8, 32), (160, 64)])
def test_integers_err_by_half_a_scale_and_their_own_rounding(form: Format, size: int, group: int) -> None:
    values = draw(2, 3, 50, size)
    read = back(values, form, group)
    for start in range(0, size, group):
        part, found = values[..., start : start + group], read[..., start : start + group]
        low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        half = (high - low) / (2**form.bits - 1) / 2
        rounding = 2**-11 * (low.abs() + 2 * (high - low))
        assert ((found - part).abs() <= half + rounding).all()
        assert (found.amin(-1, keepdim=True) - low).abs().le(rounding).all()  # the smallest value has code 0


@pytest.mark.parametrize("form", INTEGERS, ids=named)
def test_all_codes_are_used_and_survive_packing(form: Format) -> None:
    top = 2**form.bits - 1
    values = torch.arange(top + 1).repeat(8).float().reshape(1, -1)
    assert torch.equal(back(values, form, values.shape[-1]), values)
    shuffled = values[:, torch.randperm(values.shape[-1], generator=torch.Generator().manual_seed(1))]
    assert torch.equal(back(shuffled, form, values.shape[-1]), shuffled)


@pytest.mark.parametrize("form", EVERY, ids=named)
@pytest.mark.parametrize("size", [8, 64, 80, 160])
def test_bytes_are_those_of_the_format(form: Format, size: int) -> None:
    for group, latent in ((form.group, False), (form.latent_group, True)):
        stored = encode(draw(2, 3, 5, size), form, group)
        assert stored.nbytes == 2 * 3 * 5 * form.row_bytes(size, latent)


@pytest.mark.parametrize("form", EVERY, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_back_in_the_dtype_asked_for(form: Format, dtype: torch.dtype) -> None:
    values = draw(1, 2, 3, 16).to(dtype)
    read = back(values, form)
    assert read.dtype == dtype
    assert read.shape == values.shape
    assert (read - values).abs().max() < 4


@pytest.mark.parametrize("form", EVERY, ids=named)
def test_zeros_equal_values_and_nothing_at_all(form: Format) -> None:
    assert torch.equal(back(torch.zeros(2, 64), form), torch.zeros(2, 64))
    assert torch.equal(back(torch.full((2, 64), -1.5), form), torch.full((2, 64), -1.5))
    assert back(torch.zeros(2, 0, 64), form).shape == (2, 0, 64)


@pytest.mark.parametrize("form", EVERY, ids=named)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(form: Format, value: float) -> None:
    values = draw(4, 64)
    values[1, 3] = value
    read = back(values, form)
    assert not read[1, 3].isfinite()
    assert read[[0, 2, 3]].isfinite().all()
    assert read[1, 32:].isfinite().all()  # the other group of the same token


@pytest.mark.parametrize("form", INTEGERS, ids=named)
def test_one_huge_channel_spoils_its_group_alone(form: Format) -> None:
    values = draw(4, 64)
    values[:, 3] = 3000.0
    read = back(values, form)
    assert torch.equal(read[:, 32:], back(values[:, 32:], form))
    assert (read[:, 3] - 3000).abs().max() < 3


def test_fp8_saturates_as_engines_do() -> None:
    assert back(torch.tensor([[1e4, -1e4, 448.0, 0.0]]), FORMATS["fp8"]).tolist() == [[448.0, -448.0, 448.0, 0.0]]


@pytest.mark.parametrize("form", INTEGERS, ids=named)
def test_unseen_values_change_no_scale(form: Format) -> None:
    values, seen = draw(2, 3, 32), torch.ones(2, 1, 32, dtype=torch.bool)
    seen[0, :, :5] = False
    clean = values.clone()
    values[0, :, :5] = 1e5
    clean[0, :, :5] = clean[0, :, 5:6]
    stored = encode(values, form, 32, seen)
    plain = encode(clean, form, 32)
    assert torch.equal(stored.scales, plain.scales)
    assert torch.equal(stored.offsets, plain.offsets)
    assert torch.equal(decode(stored, form, 32, torch.float32)[:, :, 5:], decode(plain, form, 32, torch.float32)[:, :, 5:])
    nothing = encode(values, form, 32, torch.zeros_like(seen))
    assert decode(nothing, form, 32, torch.float32).isfinite().all()


@pytest.mark.parametrize("form", EVERY, ids=named)
def test_the_same_bytes_on_one_thread_and_on_two(form: Format) -> None:
    values, before, found = draw(1, 8, 512, 64), torch.get_num_threads(), list[Encoded]()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(encode(values, form, 32))
    finally:
        torch.set_num_threads(before)
    one, two = ([part.view(torch.uint8) for part in stored if part is not None] for stored in found)
    assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))
