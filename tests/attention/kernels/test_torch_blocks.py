"""Blocks of an encoded cache give what decoding it whole and attending gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from decoding import SCALE, added, ragged

from attention.cache import EncodedLayer
from attention.formats import FORMATS
from attention.kernels import torch_blocks, torch_decode
from attention.kernels.triton_decode import grouped_objection
from attention.stored import Stored

FORMS = [name for name, form in FORMATS.items() if form.bits < 64 and not form.classes]
CASES = [(form, latent) for form in FORMS for latent in (False, True)] + [("mixed", True)]
LONG = 75  # tokens
CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def stored(form: str, keys: torch.Tensor, values: torch.Tensor, latent: bool) -> tuple[Stored, Stored]:
    """Both as a cache has them after several passes, the last of one token."""
    layer = EncodedLayer(FORMATS[form], latent)
    for one, other in zip(keys.split([32, 32, 10, 1], 2), values.split([32, 32, 10, 1], 2), strict=True):
        read = layer.update(one, other)
    assert all(isinstance(part, Stored) for part in read)
    return read


def masks(batch: int, heads: int) -> dict[str, torch.Tensor | None]:
    seen = ragged(batch, LONG, holes=0.3).cpu()
    seen[..., -1] = True
    return {
        "none": None,
        "bool": seen,
        "one for all": seen[:1],
        "added": added(seen).cpu(),
        "per head": draw(batch, heads, 1, LONG, seed=5).masked_fill(~seen, -torch.inf),
    }


@pytest.fixture(params=[1, 2**18], ids=["short blocks", "one block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_blocks, "_VALUES", {"cpu": request.param})


@pytest.mark.parametrize("kind", ["none", "bool", "one for all", "added"])
@pytest.mark.parametrize("form", [*FORMS, "mixed"])
@pytest.mark.usefixtures("block")
def test_latents(form: str, kind: str) -> None:
    latent, k_rope = stored(form, draw(3, 1, LONG, 80), draw(3, 1, LONG, 16, seed=1), True)
    q_latent, q_rope, mask = draw(3, 5, 1, 80, seed=2), draw(3, 5, 1, 16, seed=3), masks(3, 5)[kind]
    found = torch_blocks.decode(q_latent, q_rope, latent, k_rope, mask, SCALE)
    expected = torch_decode.decode(q_latent, q_rope, latent[:, 0], k_rope[:, 0], mask, SCALE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["none", "bool", "one for all", "added", "per head"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("block")
def test_heads(form: str, kind: str) -> None:
    keys, values = stored(form, draw(3, 2, LONG, 16), draw(3, 2, LONG, 40, seed=1), False)
    query, mask = draw(3, 6, 1, 16, seed=2), masks(3, 6)[kind]
    found = torch_blocks.decode_grouped(query, keys, values, mask, SCALE)
    expected = torch_decode.decode_grouped(query, keys.whole(), values.whole(), mask, SCALE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("block")
def test_the_dtype_is_that_of_the_queries(dtype: torch.dtype) -> None:
    """Sums are in float32, whatever the model's dtype."""
    keys, values = stored("int4", draw(1, 2, LONG, 16, dtype=dtype), draw(1, 2, LONG, 16, seed=1, dtype=dtype), False)
    query = draw(1, 4, 1, 16, seed=2, dtype=dtype)
    found = torch_blocks.decode_grouped(query, keys, values, None, SCALE)
    wide = [part.cached.block(0, LONG, torch.float32).double() for part in (keys, values)]
    expected = torch_decode.decode_grouped(query.double(), *wide, None, SCALE)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("block")
def test_a_query_that_sees_nothing_is_zero_and_the_least_number_hides_nothing_alone() -> None:
    latent, k_rope = stored("int8", draw(2, 1, LONG, 16), draw(2, 1, LONG, 8, seed=1), True)
    q_latent, q_rope = draw(2, 3, 1, 16, seed=2), draw(2, 3, 1, 8, seed=3)
    least = torch.zeros(2, 1, 1, LONG).double()
    least[0], least[1, ..., :40] = torch.finfo(torch.float64).min, torch.finfo(torch.float64).min
    for mask in (torch.arange(2).bool()[:, None, None, None].expand(2, 1, 1, LONG), least):
        found = torch_blocks.decode(q_latent, q_rope, latent, k_rope, mask, SCALE)
        expected = torch_decode.decode(q_latent, q_rope, latent[:, 0], k_rope[:, 0], mask, SCALE)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert bool(found[0].any()) == (mask is least)


@pytest.mark.parametrize(("form", "latent"), CASES)
def test_no_copy_of_the_whole_cache_is_made(form: str, latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_blocks, "_VALUES", {"cpu": 1})
    first, second = stored(form, draw(1, 1, LONG, 16), draw(1, 1, LONG, 16, seed=1), latent)
    monkeypatch.setattr(Stored, "whole", None)
    query = draw(1, 4, 1, 16, seed=2)
    sizes: list[int] = []
    seen = Sizes(sizes.append)
    with seen:
        if latent:
            torch_blocks.decode(query, query, first, second, None, SCALE)
        else:
            torch_blocks.decode_grouped(query, first, second, None, SCALE)
    assert 32 * 16 <= max(sizes) < LONG * 16


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Tells how many floating values each operation makes."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg]
        made = func(*args, **(kwargs or {}))  # type: ignore[operator]
        if isinstance(made, torch.Tensor) and made.dtype in (torch.float32, torch.float64) and not made._is_view():
            self.tell(made.numel())
        return made


def test_blocks_fit_a_cache() -> None:
    for values in (1, 64, 160, 1024, 2**20):
        tokens = torch_blocks._tokens(values, CPU)
        assert tokens == 32 or tokens * values <= 2**18
    assert torch_blocks._tokens(160, torch.device("meta")) > torch_blocks._tokens(160, CPU)


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "float64"])
def test_what_triton_does_not_read_is_left_to_torch(form: str) -> None:
    layer = EncodedLayer(FORMATS[form], latent=False)
    layer.update(torch.randn(1, 1, 20, 64), torch.randn(1, 1, 20, 64))
    keys, values = layer.update(torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64))
    assert grouped_objection(torch.randn(1, 4, 1, 64), keys, values, None) == f"it does not read a cache in {form}"
