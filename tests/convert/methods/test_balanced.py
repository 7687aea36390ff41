"""Balanced coordinates: the same function, in the basis in which rounding costs least, of latents and of heads."""

from dataclasses import replace

import pytest
import torch
from records import block_of, blocks_of, factored, inputs, loss, measured, record

from attention.encoding import decode, encode
from attention.formats import FORMATS
from attention.forward import attention_output, heads_of, output_error, values_of
from attention.record import Attention, FactoredAttention
from attention.rope import Pairing
from convert.methods import balanced as balancing
from convert.methods.balanced import balanced, balanced_heads
from convert.methods.blocks import Blocks
from convert.methods.statistics import Statistics


def uneven(biased: bool = False) -> tuple[FactoredAttention, torch.Tensor, Statistics]:
    """A latent whose channels differ much in size, as methods leave them; inputs, and their statistics."""
    a, x = factored(biased=biased, rank=16), inputs(20)
    scale = torch.exp(torch.linspace(-8, 8, len(a.down)))
    return replace(a, down=scale[:, None] * a.down, up_k=a.up_k / scale, up_v=a.up_v / scale), x, measured(x)


def moments(a: FactoredAttention, statistics: Statistics) -> tuple[torch.Tensor, torch.Tensor]:
    assert statistics.sample is not None
    second, of_keys, of_values = balancing._moments(a, statistics, balancing._Errors.measured(a, statistics.sample))
    return second, of_keys + of_values


@pytest.mark.parametrize("part", ["kept_nope", "kept_rope", "values"])
def test_errors_of_tokens_cost_what_they_do_to_the_output(part: str) -> None:
    """Against noise: drawn for each token of each head's keys, or values."""
    a, block, size = factored(biased=True, rank=16, pairs=2), block_of(inputs(20)[0]), 1e-4
    heads, columns = heads_of(a, block), a.o.permute(1, 0, 2)
    errors = balancing._Errors.measured(a, Blocks.whole(block.x[None]))
    generator, tokens = torch.Generator().manual_seed(0), torch.arange(len(block))
    values = values_of(a, heads)
    keys = replace(
        heads, kept_nope=heads.kept_nope @ heads.lift.mT, lift=None, kept_rope=heads.kept_rope.repeat(len(values), 1, 1)
    )
    expected, cost, rounds = keys.attention_of(tokens) @ values @ columns.mT, 0.0, 200
    for _ in range(rounds):
        held = {"values": values, "kept_nope": keys.kept_nope, "kept_rope": keys.kept_rope}
        held[part] = held[part] + size * torch.randn(held[part].shape, generator=generator)
        noisy = replace(keys, kept_nope=held["kept_nope"], kept_rope=held["kept_rope"])
        found = noisy.attention_of(tokens) @ held["values"] @ columns.mT
        cost += float((found - expected).double().square().sum()) / size**2 / len(block) / rounds
    by_formula = {
        "kept_nope": errors.nope.diagonal(dim1=1, dim2=2).sum(),
        "kept_rope": errors.rope.sum(),
        "values": (errors.values * columns.double().square().sum((1, 2))).sum(),
    }
    assert cost == pytest.approx(float(by_formula[part]), rel=0.05)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_balanced_latent_gives_the_same_outputs(biased: bool, sampled: bool) -> None:
    a, x, statistics = uneven(biased)
    statistics = replace(statistics, sample=Blocks.whole(x) if sampled else None)
    expected = attention_output(a, blocks_of(x))
    for size in (1, 1e-12, 1e12):
        found = balanced(replace(a, down=a.down * size, up_k=a.up_k / size, up_v=a.up_v / size), statistics)
        assert (attention_output(found, blocks_of(x)) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_channels_are_as_large_as_they_count() -> None:
    """In balanced coordinates the second moment of the latent is the weight of its errors; all channels are alike."""
    a, _, statistics = uneven()
    before, weight = moments(a, statistics)
    values, vectors = torch.linalg.eigh(weight)
    half = vectors * values.clamp_min(0).sqrt()
    least = torch.linalg.eigvalsh(half.T @ before @ half).clamp_min(0).sqrt().sum() ** 2  # over all bases
    found = balanced(a, statistics)
    second, read = moments(found, statistics)
    assert float(least) < float(second.trace() * read.trace()) < 1.1 * float(least)
    assert float(before.trace() * weight.trace()) > 10 * float(least)
    for matrix in (second, read):
        assert float(matrix.diagonal().max()) < 4 * float(matrix.diagonal().mean())


@pytest.mark.parametrize("form", ["int8", "q4_0"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rounding_a_balanced_rope_key_costs_less(form: str, pairing: Pairing) -> None:
    """Pairs of its dims differ in size, as the frequencies of a source do."""
    (_, x, statistics), a = uneven(), factored(biased=False, pairs=8, pairing="half")
    sizes = torch.exp(torch.linspace(-3, 3, 8)).repeat(2)[:, None]
    uneven_key = replace(a, k_rope=a.k_rope * sizes, q_rope=a.q_rope / sizes).paired(pairing)

    def cost(b: FactoredAttention) -> float:
        rows = x.flatten(0, 1)
        cached = rows @ b.k_rope.T
        error = decode(encode(cached, FORMATS[form], 32), FORMATS[form], 32, torch.float32) - cached
        return float((rows @ b.q_rope.mT @ error.T).square().mean())

    assert cost(balanced(uneven_key, statistics)) < cost(uneven_key) / 5


def test_a_pair_that_no_query_reads_does_not_set_the_range_of_a_rope_key() -> None:
    (_, x, statistics), a = uneven(), factored(biased=False, pairs=8, pairing="half")
    unread = torch.ones(16, 1)
    unread[[0, 8]] = 0
    found = balanced(replace(a, q_rope=a.q_rope * unread, o=a.o * 1e-3), statistics)
    sizes = (x.flatten(0, 1) @ found.k_rope.T).square().mean(0)
    assert float(sizes[[0, 8]].max()) < 2 * float(sizes.mean())


def test_channels_whose_bits_differ_come_in_the_order_of_their_energies() -> None:
    (a, x, statistics), form = uneven(), FORMATS["mixed"]
    alike, ordered = balanced(a, statistics), balanced(replace(a, rounding=form), statistics)
    assert (
        attention_output(replace(ordered, rounding=None), blocks_of(x)) - attention_output(a, blocks_of(x))
    ).abs().max() < 1e-5
    sizes = moments(ordered, statistics)[0].diagonal()
    assert [count for _, count in form.cut(len(sizes))] == [8, 8]
    assert float(sizes[:8].mean()) > 2 * float(sizes[8:].mean())
    for part in (sizes[:8], sizes[8:]):
        assert float(part.max()) < 4 * float(part.mean()), "those that share a scale are alike"
    expected = attention_output(a, blocks_of(x))
    costs = [
        float((attention_output(replace(b, rounding=form), blocks_of(x)) - expected).square().sum()) for b in (ordered, alike)
    ]
    assert costs[0] < costs[1]


def divided(biased: bool = False) -> tuple[FactoredAttention, torch.Tensor, Statistics]:
    """A latent that its norm divides, which one channel makes nearly constant. The others count more, the smaller they are."""
    a, x = factored(biased=biased, rank=16), inputs(20)
    x[..., 0] = 1 + x[..., 0] / 50
    sizes = torch.exp(torch.linspace(-6, -2, 16)) / 8
    down, (up_k, up_v) = a.down * sizes[:, None], (up / sizes for up in (a.up_k, a.up_v))
    down[0] = torch.nn.functional.one_hot(torch.tensor(0), 20)
    up_k[..., 0], up_v[..., 0] = 0, 0.1 * up_v[..., 0] * sizes[0]
    return replace(a, down=down, up_k=up_k, up_v=up_v, normalised=True), x, measured(x)


@pytest.mark.parametrize("biased", [False, True])
def test_a_latent_that_its_norm_divides_is_balanced_by_turns_and_gains(biased: bool) -> None:
    a, x, statistics = divided(biased)
    found, expected = balanced(a, statistics), attention_output(a, blocks_of(x))
    assert (attention_output(found, blocks_of(x)) - expected).abs().max() < 1e-5 * expected.abs().max()
    torch.testing.assert_close(found.down.T @ found.down, a.down.T @ a.down, rtol=0, atol=1e-6)  # of one size, for all x
    assert (attention_output(balanced(found, statistics), blocks_of(x)) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(found.gain.bfloat16().float(), found.gain)


@pytest.mark.parametrize("form", ["q8_0", "int4"])
def test_rounding_a_balanced_latent_behind_its_norm_costs_less(form: str) -> None:
    a, x, statistics = divided()
    _, weight = moments(a, statistics)

    def cost(b: FactoredAttention) -> float:
        cached = b.latent(x).flatten(0, 1)
        error = decode(encode(cached, FORMATS[form], 32), FORMATS[form], 32, torch.float32) - cached
        error = (error / (1 if b.gain is None else b.gain) @ (b.down @ torch.linalg.pinv(a.down))).double()
        return float(((error @ weight) * error).sum())

    assert cost(balanced(a, statistics)) < cost(a) / 5


def test_moments_that_rounding_made_negative_give_finite_coordinates() -> None:
    one = torch.ones(4, 1, dtype=torch.float64)
    rounding = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    second = one @ one.T + 1e-6 * rounding[:, None] * rounding
    read = (one @ one.T - torch.eye(4).double()) + 1e-3 * torch.eye(4).double()  # eigenvalues 3 and -1
    there, back = balancing._coordinates(second - 1e-5 * torch.eye(4).double(), read)
    assert (there @ back - torch.eye(4)).abs().max() < 1e-6


def test_channels_that_are_empty_stay() -> None:
    a, _, statistics = uneven()
    a.down[0], a.up_k[..., 1], a.up_v[..., 1] = 0, 0, 0
    found = balanced(a, statistics)
    assert torch.equal(found.down[:2], a.down[:2])
    assert torch.equal(found.up_v[..., :2], a.up_v[..., :2])
    a.down.zero_()
    found = balanced(a, statistics)
    for name in ("down", "up_k", "up_v", "q_nope"):
        assert torch.equal(getattr(found, name), getattr(a, name)), name


def lopsided(**kind: object) -> Attention:
    """Heads with one key pair, and one value channel, a hundred times larger than the others, as real models have them."""
    a = record(groups=2, share=2, pairs=3, nope=2, **kind)  # type: ignore[arg-type]
    size = torch.ones(8)
    size[[1, 4]] = 100.0  # a pair: dims 1 and 4 of half-split RoPE
    large = torch.ones(8)
    large[5] = 100.0
    keys = {"k": a.k * size[:, None], "q": a.q / size[:, None]}
    for name, by in (("k_bias", size), ("q_bias", 1 / size)):
        if (bias := getattr(a, name)) is not None:
            keys[name] = bias * by
    if a.k_norm is not None:
        gains = replace(a.k_norm, gain=a.k_norm.gain * size), replace(a.q_norm, gain=a.q_norm.gain / size)
        keys = {"k_norm": gains[0], "q_norm": gains[1]}  # type: ignore[dict-item]
    bias = None if a.v_bias is None else a.v_bias * large
    return replace(a, **keys, v=a.v * large[:, None], v_bias=bias, o=a.o / large)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [{}, {"biased": False}, {"pairing": "interleaved"}, {"norm": "shared"}, {"norm": "head"},
                                  {"norm": "all"}, {"norm": "after"}, {"norm": "layer"}, {"alibi": True}], ids=str)  # fmt: skip
def test_balanced_heads_are_the_same_function(kind: dict[str, object]) -> None:
    a, x = lopsided(**kind), inputs(20)
    found = balanced_heads(a, Blocks.whole(x))
    assert loss(a, found) < 1e-4
    assert not torch.equal(found.v, a.v)
    moved = (found.k, a.k) if a.k_norm is None else (found.k_norm.gain, a.k_norm.gain)  # type: ignore[union-attr]
    assert not torch.equal(*moved)


def test_factors_of_keys_are_powers_of_two_of_whole_pairs() -> None:
    a, x = lopsided(biased=False), inputs(20)
    found = balanced_heads(a, Blocks.whole(x))
    factors = (found.k / a.k).amax(-1)
    assert torch.equal(factors.log2(), factors.log2().round())
    assert torch.equal(factors[:, :3], factors[:, 3:6])
    assert torch.equal(found.q, a.q / factors.repeat_interleave(2, 0)[..., None])


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rounding_balanced_heads_costs_less(form: str) -> None:
    a, x = lopsided(), inputs(20)
    sample = Blocks.whole(x)
    plain, found = (replace(one, rounding=FORMATS[form]) for one in (a, balanced_heads(a, sample)))
    assert output_error(a, found, sample.blocks) < output_error(a, plain, sample.blocks) / 2


def test_cached_heads_have_a_size_of_about_one() -> None:
    a, x = lopsided(), inputs(20)
    a = replace(a, k=1e3 * a.k, k_bias=1e3 * a.k_bias, v=1e-3 * a.v)  # type: ignore[operator]
    found = heads_of(balanced := balanced_heads(a, Blocks.whole(x)), block_of(x[0]))
    for cached in (found.kept_rope, values_of(balanced, found)):
        assert 0.3 < float(cached.square().mean().sqrt()) < 3


def test_heads_and_value_dims_that_are_empty_stay() -> None:
    a, x = lopsided(biased=False), inputs(20)
    a.o[:, :2, 3], a.v[1, 6:], a.o[:, 2:, 6:], a.k[1], a.v[0] = 0, 0, 0, 0, 0
    found = balanced_heads(a, Blocks.whole(x))
    assert loss(a, found) < 1e-4
    assert not torch.equal(found.v[1], a.v[1])
    assert not any(part.any() for part in (found.v[0], found.v[1, 6:], found.k[1]))


def test_gains_that_are_stored_less_one_stay() -> None:
    a, x = lopsided(norm="shared"), inputs(20)
    norms = {name: getattr(a, name) for name in ("q_norm", "k_norm")}
    a = replace(a, **{name: replace(norm, form=replace(norm.form, gain_offset=1.0)) for name, norm in norms.items()})
    found = balanced_heads(a, Blocks.whole(x))
    assert found.k_norm is a.k_norm
    assert loss(a, found) < 1e-4
