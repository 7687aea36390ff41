"""Absorbed latent attention against the stock classes and the fp64 oracle, in every state a decoder meets."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import tiny_mla
import torch
from decoding import SCALE, spelled_out
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import rows
from tiny import tiny_config, tiny_model
from tiny_mla import HEADS, LONGROPE, NOPE, RANK, ROPE, VALUE, error, logits, mla_model, padding, tokens
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention import absorb, restore
from attention.errors import Refusal
from attention.kernels.torch_decode import decode
from attention.latent import absorbs, can_absorb, dense_mask, is_absorbed
from attention.patch import pad_values

LENGTH = 20  # 10 tokens at once, then 10 one by one
VARIANTS: dict[str, dict[str, Any]] = {
    "neutral": {},
    "neutral, two constants": {"neutral": (3.0, 7.0**0.5)},
    "neutral, half-split": {"rope_interleave": False},
    "neutral, longrope": {"rope_parameters": LONGROPE},
    "neutral, youtu": {"model_type": "youtu"},
    "neutral, minicpm3": {"model_type": "minicpm3", "rope_interleave": False},
    "neutral, query biases": {"q_lora_rank": 80},
    "norm": {"neutral": ()},
    "norm, no biases, q lora": {"neutral": (), "attention_bias": False, "q_lora_rank": 24},
    "norm, half-split": {"neutral": (), "rope_interleave": False},
    "norm, minicpm3, which ignores rope_interleave": {"neutral": (), "model_type": "minicpm3", "rope_interleave": True},
}


CHUNKS = {"prefill": (10,), "chunked prefill": (7, 5, 3), "no decoding": (LENGTH,)}


@pytest.mark.parametrize(
    ("name", "attention", "chunks"),
    [*((name, "sdpa", "prefill") for name in VARIANTS), *product(("neutral", "norm"), ("eager",), CHUNKS),
     *(("neutral", "sdpa", chunks) for chunks in ("chunked prefill", "no decoding"))],
)  # fmt: skip
def test_logits_are_those_of_stock_in_fp64(name: str, attention: str, chunks: str) -> None:
    exact, model = (mla_model(**VARIANTS[name], dtype=d, attention=attention) for d in (torch.float64, torch.float32))
    ids, sizes = tokens(2, LENGTH), CHUNKS[chunks]
    expected = logits(exact, ids)
    stock = error(logits(model, ids, chunks=sizes), expected)
    for when in ("auto", "always"):
        assert error(logits(absorb(model, when=when), ids, chunks=sizes), expected) < max(1e-5, 1.5 * stock)
    # stock eager attention has its softmax in fp32 even in an fp64 model
    assert error(logits(absorb(exact, when="always"), ids, chunks=sizes), expected) < 1e-6


def test_an_attention_function_finds_the_config_that_it_knows() -> None:
    """Flash attention reads its own name there, to import what it needs; other threads find the module absorbed."""
    seen = []

    def spy(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((module.config._attn_implementation, is_absorbed(model.model.layers[module.layer_idx].self_attn)))
        return sdpa_attention_forward(module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("spy", spy)
    ALL_MASK_ATTENTION_FUNCTIONS.register("spy", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = mla_model()
    model.set_attn_implementation("spy")
    expected = logits(model, tokens(1, LENGTH))
    seen.clear()
    torch.testing.assert_close(logits(absorb(model), tokens(1, LENGTH)), expected)
    assert set(seen) == {("spy", True)}


def generated(model: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(3)
    options = {"max_new_tokens": 20, "no_repeat_ngram_size": 2, "pad_token_id": 0} | options  # greedy search loves loops
    return model.generate(tokens(3, 12), attention_mask=padding([12, 7, 9]), **options)


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("eager", {"do_sample": False}),
        ("sdpa", {"do_sample": True, "temperature": 0.9}),
        ("sdpa", {"do_sample": False, "num_beams": 3}),
        ("sdpa", {"do_sample": False, "cache_implementation": "static", "disable_compile": True}),
    ],
    ids=["greedy", "sampling", "beams", "static cache"],
)
def test_generate_gives_the_tokens_of_stock(attention: str, options: dict[str, Any]) -> None:
    # fp64 against near ties; but there stock eager attention makes NaN of padding
    model = mla_model(dtype=torch.float64 if attention == "sdpa" else torch.float32, attention=attention)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(3)
            layer.self_attn.o_proj.weight.mul_(3)
    expected = generated(model, **options)
    assert len(expected[:, 12:].unique()) > 8
    assert torch.equal(generated(absorb(model, when="always"), **options), expected)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float16, 1e-2), (torch.bfloat16, 0.2)])
def test_half_precision_is_as_close_to_fp32_as_stock(dtype: torch.dtype, close: float) -> None:
    model, ids = mla_model(dtype=dtype), tokens(4, 40)
    expected = logits(mla_model(), ids)
    stock, found = error(logits(model, ids), expected), logits(absorb(model, when="always"), ids)
    assert found.dtype == dtype
    assert error(found, expected) < 1.2 * stock < close


@pytest.mark.parametrize(
    ("backend", "attention"), rows(product(("eager", "aot_eager"), ("eager", "sdpa")), [("aot_eager", "sdpa")])
)
def test_a_decode_step_over_a_static_cache_compiles_whole(backend: str, attention: str) -> None:
    tiny_mla.compiles_whole(absorb(mla_model(attention=attention, num_hidden_layers=1)), tokens(2, 12), backend)


def gradients(model: Any, checkpointing: bool = False, cache: Any = None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    if checkpointing:
        tiny_mla.checkpoint_activations(model)
    ids = tokens(2, 12)
    model(ids, labels=ids, past_key_values=cache, use_cache=cache is not None).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_training_is_stock_training(checkpointing: bool) -> None:
    model = mla_model(attention_dropout=0.2).train()
    torch.manual_seed(0)
    expected = gradients(model, checkpointing)
    torch.manual_seed(0)
    found = gradients(absorb(model, when="always"), checkpointing)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_pass_through_the_absorbed_path() -> None:
    model = mla_model(neutral=(), attention="eager")
    expected = gradients(model)
    found = gradients(absorb(model, when="always"), cache=DynamicCache(config=model.config))
    assert found.keys() == expected.keys()
    assert max(error(found[name], expected[name]) for name in expected) < 1e-4


@pytest.mark.parametrize(
    ("model_type", "change"), [("deepseek_v3", absorb), ("deepseek_v3", pad_values), ("minicpm3", pad_values)]
)
def test_values_are_as_wide_as_keys_on_a_cpu(model_type: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a kernel without the [B, H, T, S] probabilities for these alone."""
    attend, widths = torch.nn.functional.scaled_dot_product_attention, set()

    def seeing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        widths.add((q.shape[-1], k.shape[-1], v.shape[-1]))
        return attend(q, k, v, **options)

    model, ids, mask = mla_model(model_type), tokens(2, 24), padding([24, 19])

    def computed() -> list[torch.Tensor]:
        return [logits(model, ids, chunks=(24,)), logits(model, ids, mask, (24,))[mask.bool()]]

    expected = computed()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seeing)
    assert change(model) is model
    assert max(map(error, computed(), expected)) < 1e-5
    assert widths == {(NOPE + ROPE,) * 3}


@pytest.mark.parametrize("make", [lambda: tiny_model(tiny_config("llama")), lambda: mla_model(attention="eager")])
def test_values_of_other_models_are_not_padded(make: Any) -> None:
    assert not any(map(is_absorbed, pad_values(make()).modules()))


def test_work_grows_with_the_cache_as_the_latent_does() -> None:
    model = absorb(mla_model())

    def flops(length: int) -> int:
        cache = StaticCache(config=model.config, max_cache_len=length)
        with torch.no_grad():
            model(tokens(1, 10), past_key_values=cache)
            with FlopCounterMode(display=False) as counter:
                model(tokens(1, 1), past_key_values=cache)
        return int(counter.get_total_flops())

    layers = len(model.model.layers)
    assert flops(96) - flops(32) == 2 * layers * 64 * HEADS * (2 * RANK + ROPE)
    restore(model)
    assert flops(96) - flops(32) >= 2 * layers * 64 * HEADS * RANK * (NOPE + VALUE)


def test_eager_gives_the_probabilities_of_stock() -> None:
    model, ids = mla_model(attention="eager"), tokens(2, 12)
    mask = padding([12, 8])
    found: list[Any] = []
    for change in (restore, lambda m: absorb(m, when="always")):
        with torch.no_grad():
            found.append(change(model)(ids, attention_mask=mask, output_attentions=True).attentions)
    for stock, ours in zip(*found, strict=True):
        assert stock.shape == ours.shape == (2, HEADS, 12, 12)
        seen = mask.bool()[:, None, :, None].expand_as(ours)
        assert error(ours[seen], stock[seen]) < 1e-5
    model.set_attn_implementation("sdpa")
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 1, 64)
    assert layer(x, model.model.rotary_emb(x, torch.tensor([[0]])), None)[1] is None


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_cache_is_handed_over_in_mid_sentence(static: bool) -> None:
    model, ids = mla_model(), tokens(2, 24)
    expected = logits(model, ids)
    cache = StaticCache(config=model.config, max_cache_len=30) if static else DynamicCache(config=model.config)
    pieces = []
    for i, part in enumerate(ids.split([10, *[1] * 14], 1)):
        (absorb if i // 3 % 2 else restore)(model)  # stock prefill, then three steps each
        with torch.no_grad():
            pieces.append(model(part, past_key_values=cache).logits)
    assert error(torch.cat(pieces, 1), expected) < 1e-5
    assert cache.layers[0].keys.shape[1:] == (1, 30 if static else 24, RANK)
    assert not cache.layers[0].keys[..., 0].any()  # the constant channel
    assert cache.layers[0].keys[:, :, :24, 1:].all()


def test_the_rule_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr("attention.latent.absorbs", lambda *numbers: asked.append(numbers) or False)
    model = absorb(mla_model())
    with torch.no_grad():
        cache = model(tokens(2, 10), use_cache=True).past_key_values
        assert not asked  # sdpa without a mask: only the stock path knows what that means
        model(tokens(2, 3), past_key_values=cache)
    assert asked == [(3, 13, RANK, NOPE, ROPE, VALUE)] * 3
    sizes = {"rank": 512, "nope": 128, "rope": 64, "value": 128}
    assert absorbs(1, 1024, **sizes)
    assert absorbs(4, 65536, **sizes)
    assert not absorbs(4096, 4096, **sizes)
    assert not absorbs(64, 64, **sizes)


def hooked(module: torch.nn.Module) -> None:
    module.register_forward_hook(lambda module, args, out: out + 1)


def adapted(module: Any) -> None:
    class Adapted(type(module)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) + 1

    module.__class__ = Adapted


def wrapped(module: Any) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) + 1


@pytest.mark.parametrize("change", [hooked, adapted, wrapped])
def test_what_comes_later_is_not_passed_over(change: Callable[[Any], None]) -> None:
    model, ids = absorb(mla_model(q_lora_rank=80), when="always"), tokens(2, 12)
    before = logits(model, ids)
    for layer in model.model.layers:
        change(layer.self_attn.kv_b_proj)
    found = logits(model, ids)
    again = logits(absorb(model, when="always"), ids)
    expected = logits(restore(model), ids)
    assert error(before, expected) > 1e-2
    assert error(found, expected) < 1e-5
    assert error(again, expected) < 1e-5


size = st.integers(1, 6)


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.tuples(st.integers(1, 3), size, st.integers(1, 20), size, size, size),
    kind=st.sampled_from(["none", "bool", "additive", "additive infinite"]),
    seed=st.integers(0, 999),
)
def test_decoding_is_attention_spelled_out(sizes: tuple[int, ...], kind: str, seed: int) -> None:
    batch, queries, cached, heads, rank, rope = sizes
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = (batch, heads, queries, rank), (batch, heads, queries, rope), (batch, cached, rank), (batch, cached, rope)
    call = [random(*shape) for shape in shapes]
    seen = random(batch, 1, queries, cached) > 0 if kind != "none" else torch.ones(batch, 1, queries, cached).bool()
    if kind == "additive":
        seen[..., 0] = True  # added to a whole row, a finite number hides nothing
    least = -torch.inf if kind == "additive infinite" else torch.finfo(torch.float64).min
    mask = {"none": None, "bool": seen}.get(kind, torch.zeros(seen.shape).double().masked_fill(~seen, least))
    torch.testing.assert_close(decode(*call, mask, SCALE), spelled_out(*call, mask=seen), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_in_half_precision_are_not_rounded(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 1, 32), (2, 4, 1, 8), (2, 5000, 32), (2, 5000, 8))  # more than one block of keys
    states = [torch.randn(shape, generator=generator).to(dtype) * 2 for shape in shapes]
    found, exact = decode(*states, None, 0.5), decode(*(s.double() for s in states), None, 0.5)
    assert found.dtype == dtype
    assert error(found, exact) < 2 * torch.finfo(dtype).eps


def test_padding_of_flash_attention() -> None:
    found = dense_mask(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]), torch.empty(2, 7, RANK))
    assert found[:, 0].tolist() == [[[False, True, True, True, True, False, False]], [[True] * 5 + [False] * 2]]
    with pytest.raises(Refusal, match="a padding mask of 8 tokens to a cache of 7"):
        dense_mask(torch.ones(2, 8), torch.empty(2, 7, RANK))


def test_masks_of_one_step_absorb_and_others_are_the_classs() -> None:
    """No flash or flex attention runs here: the modules get their masks directly."""
    model, x, mask = mla_model(), torch.randn(2, 9, 64), padding([9, 6])
    module, rotary = absorb(model, when="always").model.layers[0].self_attn, model.model.rotary_emb

    def read(parts: list[int], *masks: Any) -> torch.Tensor:
        cache, found = DynamicCache(config=model.config), []
        for part, positions, seen in zip(x.split(parts, 1), torch.arange(9).split(parts), masks, strict=True):
            with torch.no_grad():
                found.append(module(part, rotary(part, positions[None]), seen, past_key_values=cache)[0])
        return torch.cat(found, 1)

    causal = torch.ones(9, 9).tril().bool() & mask.bool()[:, None, None]
    whole = read([9], causal)
    stepwise = read([8, 1], causal[..., :8, :8], mask)
    assert error(stepwise[mask.bool()], whole[mask.bool()]) < 1e-6
    block = create_block_mask(lambda b, h, q, kv: mask[b, kv] > 0, 2, None, 1, 9, device="cpu")
    calls = (1, 9, mask), (8, 8, mask[:, :8]), (1, 9, block)
    assert [can_absorb(module, *call, {}) for call in calls] == [True, False, False]
    assert not can_absorb(module, 1, 9, mask, {"read_index": []}), "of a paged cache"
