"""A model over an encoded cache: what each query reads, however the text is cut; what the cache holds; what is refused."""

import copy
import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tiny import random_model, tiny_config, tiny_model
from tiny_mla import logits, mla_model, tokens
from transformers import AutoModelForCausalLM, DynamicCache, OpenAIGPTConfig, RecurrentGemmaConfig, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from attention import absorb, pack, restore
from attention.cache import EncodedLayer
from attention.encoded_forward import rounding_cache, store_encoded
from attention.errors import Refusal
from attention.formats import FORMATS, SERVED, format_named
from attention.spec import AttentionSpec

LOSSY = ["fp8", "int8", "q8_0", "q4_0", "int4", "int3", "int2"]
KINDS = [(name, kind) for name, form in FORMATS.items() for kind in ("heads", "latent") if kind == "latent" or not form.classes]
KINDS += [(name, "heads") for name in SERVED] + [("fp4_mx_block16", "latent")]
LOSSY_KINDS = [
    *((form, kind) for form, kind in KINDS if form in (*LOSSY, "mixed", "mixed2")),
    ("mixed", "latent, one layer precise"),
]
LONG = 75  # tokens
# Sizes that all formats take.
SIZES = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 8, "v_head_dim": 8}


def grouped_model(dtype: torch.dtype = torch.float64, model_type: str = "llama") -> Any:
    """In float64, where no rounding of the model decides how a cached number is rounded."""
    model = tiny_model(tiny_config(model_type, num_key_value_heads=2, head_dim=64))
    model.set_attn_implementation("sdpa")
    return model.to(dtype)


def latent_model(dtype: torch.dtype = torch.float64, layers: int = 3) -> Any:
    depth = {"num_hidden_layers": layers, "first_k_dense_replace": layers}
    return mla_model(dtype=dtype, neutral=(8.0,), head_dim=32, **depth, **SIZES)


MODELS = {"heads": grouped_model, "latent": latent_model, "latent, one layer precise": partial(latent_model, layers=5)}


def filled(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=True).past_key_values


@pytest.mark.parametrize(("form", "kind"), LOSSY_KINDS)
def test_a_query_reads_the_same_however_the_text_is_cut(kind: str, form: str) -> None:
    plain, model, ids = MODELS[kind](), store_encoded(MODELS[kind](), form), tokens(2, LONG)
    whole = logits(model, ids, chunks=[LONG])
    for chunks in ([1, 30, 2, 33], [60]):
        torch.testing.assert_close(logits(model, ids, chunks=chunks), whole, rtol=0, atol=1e-9)
    assert 1e-6 < (whole - logits(plain, ids, chunks=[LONG])).abs().mean() < 3


@pytest.mark.parametrize(("form", "kind"), [kind for kind in KINDS if kind[0] in FORMATS])
def test_the_cache_holds_the_bytes_that_are_predicted(kind: str, form: str) -> None:
    model = store_encoded(MODELS[kind](torch.float32), form)
    for length in (1, LONG):
        held = sum(layer.nbytes for layer in filled(model, tokens(1, length)).layers)
        assert held == AttentionSpec.from_config(model.config).cache_bytes(form, length)


@pytest.mark.parametrize(("form", "kind"), [("int4", "heads"), ("q8_0", "heads"), ("fp8", "latent"), LOSSY_KINDS[-1]])
def test_generation_follows_what_teacher_forcing_predicts(kind: str, form: str) -> None:
    model, prompt = store_encoded(MODELS[kind](), form), tokens(2, 40)
    seen = torch.ones_like(prompt)
    made = model.generate(prompt, attention_mask=seen, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    with torch.no_grad():
        predicted = model(made).logits[:, 39:-1].argmax(-1)
    assert torch.equal(predicted, made[:, 40:])
    beams = model.generate(prompt, attention_mask=seen, max_new_tokens=8, num_beams=3, do_sample=False)
    assert beams.shape[1] <= 48


@pytest.mark.parametrize("form", ["fp8", "q4_0", "int3"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_sequence_reads_the_same_beside_others_and_behind_padding(kind: str, form: str) -> None:
    model, ids = store_encoded(MODELS[kind](), form), tokens(3, LONG)
    alone = torch.cat([logits(model, ids[i : i + 1], chunks=[LONG]) for i in range(3)])
    torch.testing.assert_close(logits(model, ids, chunks=[LONG]), alone, rtol=0, atol=1e-9)
    padded = torch.cat([torch.full((3, 7), 5), ids], 1)
    mask = torch.cat([torch.zeros(3, 7), torch.ones(3, LONG)], 1).long()
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(padded, attention_mask=mask, position_ids=places).logits[:, 7:]
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)


# Layers in turn, all, and every other one with sinks; the last sees chunks of tokens.
WINDOWED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 20, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 20},
    "gpt_oss": {"sliding_window": 20},
    "llama4_text": {"attention_chunk_size": 20, "no_rope_layers": [1, 1, 0]},
}


def windowed_model(model_type: str) -> Any:
    sizes = {"num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = random_model(tiny_config(model_type, **sizes | WINDOWED[model_type])).double()
    model.config._experts_implementation = "eager"  # others take no float64
    if model_type != "gpt_oss":  # whose sinks need eager attention; that of others has a softmax in float32
        model.set_attn_implementation("sdpa")
    return model


def in_steps(model: Any, ids: torch.Tensor, lengths: list[int], form: str) -> torch.Tensor:
    """The logits of a text that is read in pieces, behind each of which the cache has the bytes that are predicted."""
    spec, cache, found = AttentionSpec.from_config(model.config), None, []
    for piece in ids.split(lengths, 1):
        with torch.no_grad():
            output = model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
        held = sum(layer.nbytes for layer in cache.layers)
        assert held == len(ids) * spec.cache_bytes(form, cache.get_seq_length())
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("model_type", "form"), [*((name, "int4") for name in WINDOWED), ("mistral", "float64"), ("mistral", "q8_0")]
)
def test_a_layer_with_a_window_holds_no_more_and_reads_the_same(model_type: str, form: str) -> None:
    """As the whole text reads rounded values, with the class's own mask."""
    model, ids = windowed_model(model_type), tokens(2, LONG)
    spec = AttentionSpec.from_config(model.config)
    close = 1e-4 if model_type == "llama4_text" else 1e-9  # it rotates in float32
    with torch.no_grad():
        expected = model(ids, past_key_values=rounding_cache(FORMATS[form], spec), use_cache=True).logits
    store_encoded(model, form)
    for lengths in ([LONG], [18, 1, 1, 25, 30], [50, *[1] * 25]):
        torch.testing.assert_close(in_steps(model, ids, lengths, form), expected, rtol=0, atol=close)
    assert spec.cache_bytes(form, LONG) < replace(spec, windows=None).cache_bytes(form, LONG)


def test_room_that_a_long_text_took_is_given_back() -> None:
    model = store_encoded(windowed_model("mistral"), "int8")
    cache = filled(model, tokens(1, 600))
    (rows, _), spec = cache.layers[0].parts, AttentionSpec.from_config(model.config)
    assert rows._held[0].shape[2] == rows.length == 19
    assert sum(layer.nbytes for layer in cache.layers) == spec.cache_bytes("int8", 600)


def test_padding_before_a_window_changes_nothing() -> None:
    model, ids = store_encoded(windowed_model("gemma3_text"), "int4"), tokens(1, LONG)
    padded = torch.cat([torch.full((1, 32), 5), ids], 1)
    mask = torch.cat([torch.zeros(1, 32), torch.ones(1, LONG)], 1).long()
    places, cache, found = (mask.cumsum(-1) - 1).clamp(min=0), None, []
    for start, end in ((0, 60), (60, 61), (61, 32 + LONG)):
        with torch.no_grad():
            output = model(
                padded[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=places[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
        cache = output.past_key_values
        found.append(output.logits)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found, 1)[:, 32:], model(ids).logits, rtol=0, atol=1e-9)


def test_tokens_are_taken_back_where_windows_have_not_forgotten_them() -> None:
    model, ids = store_encoded(windowed_model("gemma3_text"), "int8"), tokens(1, LONG)
    early = filled(model, ids[:, :19])
    early.crop(-9)
    assert early.get_seq_length() == 10
    cache = filled(model, ids[:, :40])
    with pytest.raises(Refusal, match="sees 20 tokens has forgotten those before token 21, which the first 35 need"):
        cache.crop(-5)
    cache = filled(model, ids[:, :40])
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, 40:60], past_key_values=cache)
        cache.crop(-15)
        assert [layer.parts[0].length for layer in cache.layers] == [19, 45, 19]
        found = model(ids[:, 60:], past_key_values=cache).logits
        expected = model(torch.cat([ids[:, :45], ids[:, 60:]], 1)).logits[:, 45:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    draft, prompt = windowed_model("mistral"), ids[:, :40]
    plain = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(plain, model.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=draft))


def test_absorbed_and_packed_models_decode_from_it() -> None:
    for plain, prepared in ((latent_model(), absorb(latent_model())), (grouped_model(), pack(grouped_model()))):
        found, expected = (logits(store_encoded(one, "int4"), tokens(2, LONG), chunks=[40]) for one in (prepared, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_embeddings_tuples_and_calls_without_a_cache() -> None:
    model, ids = store_encoded(grouped_model(), "int4"), tokens(1, LONG)
    with torch.no_grad():
        whole = model(ids, use_cache=False)
        assert not {"cache", "past_key_values"} & whole.keys()  # generation asks for the key
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, whole.logits)
        assert torch.equal(model(ids, return_dict=False)[0], whole.logits)
        assert model(ids, labels=ids, output_hidden_states=True).loss.isfinite()


def test_flex_attention_which_compiles_reads_plain_tensors() -> None:
    model = store_encoded(grouped_model(), "int8")
    model.config._attn_implementation = "flex_attention"
    (layer, *_), new = model.forward._encoded(None).layers, torch.ones(1, 2, 1, 64)
    assert [type(part) for part in layer.update(new, new)] == [torch.Tensor, torch.Tensor]


def test_tokens_are_taken_back() -> None:
    ids = tokens(1, LONG)
    for model in (store_encoded(grouped_model(), "int4"), store_encoded(latent_model(), "int8")):
        cache, other = filled(model, ids), ids.flip(1)[:, :20]
        cache.crop(-20)
        assert cache.get_seq_length() == LONG - 20
        with torch.no_grad():
            found = model(other, past_key_values=cache).logits
            expected = model(torch.cat([ids[:, :-20], other], 1)).logits[:, -20:]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        cache.crop(40)  # as transformers before 5.23 means it
        assert cache.get_seq_length() == 40
        cache.crop(-100)
        assert cache.get_seq_length() == 0


def test_sequences_are_chosen_repeated_and_forgotten() -> None:
    model, ids = store_encoded(grouped_model(), "int3"), tokens(3, LONG)
    more = tokens(1, 9, seed=4)
    for chosen, change in (
        ([2, 0], lambda cache: cache.batch_select_indices(torch.tensor([2, 0]))),
        ([0, 0, 1, 1, 2, 2], lambda cache: cache.batch_repeat_interleave(2)),
        ([1, 1, 0], lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0]))),
    ):
        cache = filled(model, ids)
        change(cache)
        follow = more.expand(len(chosen), -1)
        with torch.no_grad():
            found = model(follow, past_key_values=cache).logits
            expected = model(torch.cat([ids[chosen], follow], 1)).logits[:, -9:]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    cache.reset()
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits, rtol=0, atol=1e-9)


def test_it_is_undone_and_copied() -> None:
    model, ids = grouped_model(), tokens(1, LONG)
    expected = logits(model, ids, chunks=[LONG])
    assert store_encoded(model, "int2") is model
    lossy = logits(model, ids, chunks=[LONG])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.forward.stock.__self__ is other
        assert torch.equal(logits(other, ids, chunks=[LONG]), lossy)
    assert torch.equal(logits(store_encoded(model, "float64"), ids, chunks=[LONG]), expected)  # the last format holds
    assert torch.equal(logits(restore(model), ids, chunks=[LONG]), expected)
    assert "forward" not in vars(model)


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(Refusal, match="no KV cache is kept in 'int5'"):
        store_encoded(grouped_model(), "int5")
    with pytest.raises(Refusal, match="a latent of 12 values cannot be cached in int4"):
        store_encoded(mla_model(kv_lora_rank=12, neutral=()), "int4")
    model, ids = store_encoded(grouped_model(), "int4"), tokens(1, LONG)
    static, foreign = StaticCache(config=model.config, max_cache_len=99), filled(grouped_model(), ids)
    for cache, kind in ((static, "a StaticCache"), (foreign, "a filled DynamicCache")):
        with pytest.raises(Refusal, match=f"is stored in int4, and cannot be {kind}"):
            model(ids, past_key_values=cache)
    with pytest.raises(Refusal, match="and cannot be a filled DynamicCache"):
        model(ids, past_key_values=filled(store_encoded(grouped_model(), "int8"), ids))
    with pytest.raises(Refusal, match="continuous batching has a cache of its own"):
        model(ids, cache=object())
    with pytest.raises(ValueError, match="input_ids"):
        model()
    with pytest.raises(Refusal, match="is for inference, and the model is in training mode"):
        model.train()(ids)


def test_an_empty_cache_of_the_caller_is_the_one_that_is_filled() -> None:
    model, ids, cache = store_encoded(grouped_model(), "int4"), tokens(1, 5), DynamicCache()
    with torch.no_grad():
        found: CausalLMOutputWithPast = model(ids, past_key_values=cache)
    assert found.past_key_values is cache
    assert cache.get_seq_length() == 5
    assert all(isinstance(layer, EncodedLayer) for layer in cache.layers)


def test_models_that_keep_something_else_are_refused() -> None:
    small = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
    for config in (
        OpenAIGPTConfig(vocab_size=99, n_embd=32, n_head=4, n_layer=2),
        tiny_config("lfm2", layer_types=["conv", "full_attention", "conv"]),
        RecurrentGemmaConfig(**small, intermediate_size=32, lru_width=32, num_key_value_heads=1),
    ):
        with pytest.raises(Refusal, match=r"int4|does not keep its keys and values in the cache that it is given"):  # noqa: PT012
            model = store_encoded(AutoModelForCausalLM.from_config(config).eval(), "int4")
            model(tokens(1, 5))


@pytest.mark.parametrize(("kind", "form"), [("heads", "bfloat16"), ("latent", "float32")])
def test_dtypes_may_differ_under_autocast(kind: str, form: str) -> None:
    """Of keys and values in two dtypes, one is stored as it is read: nothing then reads the other one encoded."""
    model, ids = MODELS[kind](torch.float32), tokens(1, 8)
    model = store_encoded(pack(model) if kind == "heads" else absorb(model, when="always"), form)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = model(ids, use_cache=True).past_key_values
        assert model(ids[:, :1], past_key_values=cache).logits.isfinite().all()


def test_a_cache_may_be_trained_through() -> None:
    """Nothing that autograd has saved is written over."""
    model, ids = store_encoded(grouped_model(torch.float32), "float32"), tokens(1, 8)
    model.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    first = model(ids, use_cache=True)
    (first.logits.sum() + model(ids[:, :1], past_key_values=first.past_key_values).logits.sum()).backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.isfinite().all()


# A cache that only rounds.


def through(model: Any, ids: torch.Tensor, form: str) -> torch.Tensor:
    cache = rounding_cache(format_named(form), AttentionSpec.from_config(model.config))
    return model(ids, past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize(("kind", "form"), [("heads", "int4"), ("heads", "fp8"), ("latent", "int2"), ("latent", "mixed")])
def test_a_text_is_read_as_from_an_encoded_cache(kind: str, form: str) -> None:
    model, ids = MODELS[kind](), tokens(2, 40)
    with torch.no_grad():
        found, plain = through(model, ids, form), model(ids).logits
        expected = store_encoded(model, form)(ids).logits
    assert torch.equal(found, expected)
    assert not torch.allclose(found, plain, atol=1e-4)


@pytest.mark.parametrize("make", [grouped_model, latent_model])
def test_gradients_pass_as_if_nothing_were_rounded(make: Any) -> None:
    """In float64 the rounding of int8 is small, and so is what it does to gradients; none of them is cut."""
    model, ids = make(), tokens(2, 40)
    gradients = []
    for found in (model(ids).logits, through(model, ids, "int8")):
        model.zero_grad()
        found.log_softmax(-1)[..., 5].sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    plain, through_rounding = gradients
    assert plain.keys() == through_rounding.keys()
    for name, expected in plain.items():
        assert float((through_rounding[name] - expected).norm()) < 0.05 * float(expected.norm()) + 1e-9, name
