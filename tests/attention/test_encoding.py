"""Encoded values decode to what they were, within what their format promises."""

from itertools import product

import pytest
import torch

from attention.encoding import Encoded, decode, encode, rotated, rounded
from attention.formats import FORMATS, Format, Part

INTEGERS = [form for form in FORMATS.values() if form.group]
OFFSET = [form for form in INTEGERS if not form.steps]
SYMMETRIC = [form for form in INTEGERS if form.steps]
MIXED = FORMATS["mixed"]
OF_LATENTS = [form for form in FORMATS.values() if form.classes]
WHOLE = (*OF_LATENTS, MIXED.of("rope"), FORMATS["int4"].of("rope"), FORMATS["int4"].precise)
CENTRED = [Format(own.name, own.bits, classes=((1.0, own),)) for whole in WHOLE for _, own in whole.classes]
EVERY = [form for form in FORMATS.values() if form not in OF_LATENTS]


def named(form: Format) -> str:
    return form.name


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nbytes(stored: Encoded) -> int:
    return sum(part.nbytes for part in stored if part is not None)


def back(values: torch.Tensor, form: Format, group: int = 32) -> torch.Tensor:
    group = values.shape[-1] if form.classes else group
    return decode(encode(values, form, group), form, group, values.dtype)


@pytest.mark.parametrize("form", OFFSET, ids=named)
@pytest.mark.parametrize(("size", "group"), [(64, 32), (80, 32), (160, 64)])
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


def test_an_encoding_is_one_graph() -> None:
    for part in (MIXED, MIXED.of("rope")):
        compiled = torch.compile(lambda values, part=part: encode(values, part, 48), fullgraph=True, backend="eager")
        found, expected = compiled(values := draw(2, 48)), encode(values, part, 48)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("form", SYMMETRIC, ids=named)
@pytest.mark.parametrize("size", [32, 64, 160])
def test_integers_without_an_offset_err_by_half_a_scale_and_that_scale_s_rounding(form: Format, size: int) -> None:
    """Known bound: q4_0 has no code for 8, so that values there, of the other sign than the largest, become 7."""
    values = draw(2, 3, 50, size)
    read = back(values, form)
    for start in range(0, size, 32):
        part, found = values[..., start : start + 32], read[..., start : start + 32]
        largest = part.gather(-1, part.abs().argmax(-1, keepdim=True))
        step, rounding = (largest / form.steps).abs(), 2**-11 * part.abs() + 1e-6
        cut = (part / largest * form.steps).clamp(max=7) * largest / form.steps if form.name == "q4_0" else part
        assert ((found - part).abs() <= torch.maximum(step / 2, (cut - part).abs()) + rounding).all()
        assert ((found - part).abs() < step + rounding).all()
        assert (found.gather(-1, part.abs().argmax(-1, keepdim=True)) - largest).abs().le(2**-11 * largest.abs()).all()


@pytest.mark.parametrize("form", CENTRED, ids=named)
def test_classes_have_the_best_of_five_scales(form: Format) -> None:
    """Normal numbers lose no more than with the best even steps: Max, "Quantizing for minimum distortion" (1960)."""
    share, outermost = form.classes[0][1].outermost(256), 2 ** (form.bits - 1) - 0.5
    values = draw(3, 300, 256) * torch.tensor([3e-3, 1, 1e3]).view(3, 1, 1)
    read = back(values, form)
    every = (torch.arange(248, dtype=torch.int16) << 7).view(torch.float16).float()
    expected = torch.searchsorted(every, (values.abs().amax(-1, keepdim=True) * share / outermost).half().float())
    tried = torch.stack([every[expected + one] for one in range(-2, 3)])
    errors = (((values / tried).floor() + 0.5).clamp(-outermost, outermost) * tried - values).square().sum(-1)
    torch.testing.assert_close((read - values).square().sum(-1), errors.amin(0))
    least = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154}.get(form.bits, 0.0035)
    assert (errors.amin(0) / values.square().sum(-1)).mean() < least


@pytest.mark.parametrize("size", [24, 160, 159])
def test_a_latent_is_cut_into_classes_of_whole_bytes(size: int) -> None:
    cut = MIXED.cut(size)
    assert [form.bits for form, _ in cut] == [5, 3, 2]
    assert sum(count for _, count in cut) == size
    assert all(count % 8 == 0 for _, count in MIXED.cut(-(-size // 8) * 8))
    of_keys = [[count for _, count in MIXED.of("rope").cut(n)] for n in (0, 8, 16, 24)]
    assert of_keys == [[], [8], [8, 8], [8, 8, 8]]
    assert [count for _, count in MIXED.cut(159)] == [32, 80, 47], "a constant that is left out moves no other channel"


@pytest.mark.parametrize("form", OF_LATENTS, ids=named)
def test_each_class_of_a_latent_is_encoded_as_if_alone(form: Format) -> None:
    values, sizes = draw(2, 3, 160), {"mixed": [32, 80, 48], "mixed2": [16, 32, 32, 80]}[form.name]
    classes = zip(form.cut(160), values.split(sizes, -1), strict=True)
    apart = [back(part, Format("", own.bits, classes=((1.0, own),))) for (own, _), part in classes]
    assert torch.equal(back(values, form, 160), torch.cat(apart, -1))
    assert torch.equal(rounded(values, form, "latent"), torch.cat(apart, -1))
    rope, own = values[..., :32], form.of("rope")
    slow_first = [pair + half for pair in range(15, -1, -1) for half in (0, 16)]
    of_pairs = zip(own.classes, rope[..., slow_first].split([8, 8, 16], -1), strict=True)
    apart_rope = [back(part, Format("", one.bits, classes=((1.0, one),))) for (_, one), part in of_pairs]
    assert torch.equal(rounded(rope, form, "rope")[..., slow_first], torch.cat(apart_rope, -1))
    assert torch.equal(rounded(rope, form, "rope"), back(rope, own, 32))
    unpacked = rounded(values[..., :159], form, "latent")  # fits round latents without their constant channel
    assert torch.equal(unpacked[..., : -sizes[-1] + 1], torch.cat(apart[:-1], -1))


@pytest.mark.parametrize("sign", [1, -1])
def test_known_answers_of_blocks_without_an_offset(sign: int) -> None:
    """By hand, as llama.cpp's reference code: the scale is the signed largest value over −8; halves go up in codes."""
    values = torch.zeros(1, 32)
    values[0, :6] = sign * torch.tensor([-4, 3.9, 0.26, 0.24, 1, -1])
    stored = encode(values, FORMATS["q4_0"], 32)
    assert (stored.scales.tolist(), stored.offsets, stored.codes.shape) == ([[sign * 0.5]], None, (1, 16))
    pairs = stored.codes[0].tolist()  # two codes in a byte
    assert pairs == [0 | 15 << 4, 9 | 8 << 4, 10 | 6 << 4, *[8 | 8 << 4] * 13]
    read = decode(stored, FORMATS["q4_0"], 32, torch.float32)
    assert read[0, :7].tolist() == [sign * value for value in (-4, 3.5, 0.5, 0, 1, -1, 0)]
    assert back(torch.tensor([[-4, 0.25] + [0.0] * 30]), FORMATS["q4_0"])[0, 1] == 0.5
    assert back(torch.tensor([[4, 0.25] + [0.0] * 30]), FORMATS["q4_0"])[0, 1] == 0
    values[0, :6] = sign * torch.tensor([-254, 253.2, 1.1, 0.9, 3.1, 0])  # a scale of 2
    stored = encode(values, FORMATS["q8_0"], 32)
    assert (stored.codes.shape, nbytes(stored)) == ((1, 32), 34)
    expected = [sign * value for value in (-254, 254, 2, 0)]
    assert decode(stored, FORMATS["q8_0"], 32, torch.float32)[0, :4].tolist() == expected


@pytest.mark.parametrize(("dims", "size"), [(192, 64), (128, 128), (32, 1)])
def test_a_rotation_is_a_hadamard_matrix_and_its_own_inverse(dims: int, size: int) -> None:
    values, matrix = draw(2, 3, 5, dims), torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    expected = (values.unflatten(-1, (-1, size)) @ matrix / size**0.5).flatten(-2)
    torch.testing.assert_close(rotated(values, size), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotated(rotated(values, size), size), values, rtol=0, atol=1e-5)
    assert torch.equal(rotated(values, size)[:, :, 1:2], rotated(values[:, :, 1:2], size))  # whatever is beside it


@pytest.mark.parametrize("form", INTEGERS, ids=named)
def test_all_codes_are_used_and_survive_packing(form: Format) -> None:
    top = 2**form.bits - 1
    values = torch.arange(top + 1).repeat(8).float().reshape(1, -1)
    if form.steps:
        values = (values - 2 ** (form.bits - 1)).clamp(min=-abs(form.steps))
    assert torch.equal(back(values, form, values.shape[-1]), values)
    shuffled = values[:, torch.randperm(values.shape[-1], generator=torch.Generator().manual_seed(1))]
    assert torch.equal(back(shuffled, form, values.shape[-1]), shuffled)


@pytest.mark.parametrize("form", EVERY, ids=named)
def test_bytes_are_those_of_the_format_and_values_in_the_dtype_asked_for(form: Format) -> None:
    parts: tuple[Part, ...] = "values", "latent", "rope"
    for size, part in product((8, 80, 160), parts):
        own = form.of(part)
        group, _ = own.grouping(part, size)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            values = draw(2, 3, 5, size).to(dtype)
            stored = encode(values, own, group)
            assert nbytes(stored) == 2 * 3 * 5 * form.row_bytes(size, part)
            read = decode(stored, own, group, dtype)
            assert (read.dtype, read.shape) == (dtype, values.shape)
            assert (read - values).abs().max() < 4
        assert nbytes(encode(draw(2, 3, 5, size), MIXED, size)) == 2 * 3 * 5 * MIXED.row_bytes(size, "latent")


@pytest.mark.parametrize("form", EVERY, ids=named)
def test_zeros_equal_values_and_nothing_at_all(form: Format) -> None:
    assert torch.equal(back(torch.zeros(2, 64), form), torch.zeros(2, 64))
    rounding = 2**-11 if form.steps else 0  # of a scale that counts 127 times
    torch.testing.assert_close(back(torch.full((2, 64), -1.5), form), torch.full((2, 64), -1.5), rtol=rounding, atol=0)
    assert back(torch.zeros(2, 0, 64), form).shape == (2, 0, 64)


@pytest.mark.parametrize("form", [*CENTRED, *OF_LATENTS], ids=named)
def test_what_is_nearest_to_zero_becomes_zero_in_classes(form: Format) -> None:
    assert not any(back(torch.full((2, 64), value), form).any() for value in (0, 1e-7, -1e-30))


@pytest.mark.parametrize("form", [*EVERY, *OF_LATENTS], ids=named)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(form: Format, value: float) -> None:
    values = draw(4, 64)
    finite = back(values, form)
    values[1, 3] = value
    read = back(values, form)
    assert not read[1, 3].isfinite()
    assert torch.equal(read[[0, 2, 3]], finite[[0, 2, 3]])
    assert torch.equal(read[1, 32:], finite[1, 32:]), "of the same token, in another group"


def test_fp8_saturates_as_engines_do() -> None:
    assert back(torch.tensor([[1e4, -1e4, 448.0, 0.0]]), FORMATS["fp8"]).tolist() == [[448.0, -448.0, 448.0, 0.0]]
