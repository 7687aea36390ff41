"""Grouped attention packed for one new token, against stock transformers."""

import copy
import pickle
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from decoding import INTERPRETER, Sizes, on_gpu
from rows import rows
from tiny import VOCABULARY, tiny_config, tiny_model
from tiny_mla import error, logits, mla_model, padding, tokens
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, ContinuousBatchingConfig, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import attention.kernels
from attention import absorb, load, pack, restore
from attention.errors import Refusal
from attention.grouped import NAME, STOCK, PackedConfig, grouped_attention, is_packed
from attention.kernels import triton_decode
from attention.latent import is_absorbed
from convert.families import FAMILIES


def grouped_model(model_type: str = "llama", **changes: Any) -> Any:
    model = tiny_model(tiny_config(model_type, **changes))
    model.set_attn_implementation("sdpa")
    return model


WITHOUT_SDPA = ("gemma2", "vaultgemma")  # whose scores are capped
LATENT = [name for name, family in FAMILIES.items() if "latent" in family.layout]  # absorbed, not packed
SHARING = rows([name for name, family in FAMILIES.items() if family.shares_heads and name not in (*WITHOUT_SDPA, *LATENT)])


@pytest.mark.parametrize("model_type", SHARING)
def test_packed_families_compute_what_stock_computes(model_type: str) -> None:
    model = grouped_model(model_type)
    ids, mask = tokens(3, 13), padding([13, 12, 11])
    expected, padded = logits(model, ids), logits(model, ids, mask)
    with attention.kernels.watched() as seen:
        assert error(logits(pack(model), ids), expected) < 1e-5
    assert seen == {"torch": None}
    assert error(logits(model, ids, mask), padded) < 1e-5


on_cpus = pytest.mark.skipif(not INTERPRETER, reason="on a CPU by the interpreter")


@on_cpus
@pytest.mark.parametrize(
    ("backend", "cache", "way"),
    [
        ("torch", "dynamic", {"do_sample": False}),
        ("torch", "static", {"do_sample": True}),
        ("torch", "dynamic", {"do_sample": False, "num_beams": 3}),
        ("triton", "static", {"do_sample": False}),
    ],
    ids=["greedy", "sampling", "beams", "triton"],
)
def test_a_model_generates_the_same_tokens(backend: Any, cache: str, way: dict[str, Any]) -> None:
    """Left padding, over a cache that grows and one that does not."""
    model, ids, mask = grouped_model(head_dim=16, num_hidden_layers=1, num_key_value_heads=2), tokens(2, 9), padding([9, 8])

    def generated(model: Any) -> torch.Tensor:
        torch.manual_seed(0)
        options = {"max_new_tokens": 3, "disable_compile": True, "cache_implementation": cache}
        return model.generate(ids, attention_mask=mask, **options, **way)

    expected = generated(model)
    with attention.kernels.watched() as seen:
        assert torch.equal(generated(pack(model, backend=backend)), expected)
    assert seen == {backend: None}


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma4_text"])
def test_windows_shared_caches_and_prefills_in_pieces(model_type: str) -> None:
    """Layers of a window of 6 beside whole ones; layers that read the cache of others (gemma4); pieces of 7 and 4 tokens."""
    half_shared = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 6}
    sizes = {"head_dim": 16, "global_head_dim": 16, "num_key_value_heads": 2} | kinds
    model = grouped_model(model_type, **sizes, **(half_shared if model_type == "gemma4_text" else {}))
    ids = tokens(2, 12)
    for make in (lambda: None, lambda: StaticCache(config=model.config, max_cache_len=24)):
        expected = logits(restore(model), ids, chunks=[7, 4], cache=make())
        assert error(logits(pack(model), ids, chunks=[7, 4], cache=make()), expected) < 1e-5


def test_compiled_steps_do_not_repeat_the_cache() -> None:
    sizes, cached = {"num_key_value_heads": 1, "vocab_size": 96}, 64  # whose head is no larger than what is repeated
    model = pack(grouped_model(**sizes))
    cache = StaticCache(config=model.config, max_cache_len=cached)
    made: list[int] = []

    def watching(graph: Any, examples: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with Sizes(made.append):
                return graph.forward(*arguments)

        return run

    torch.compiler.reset()
    step = torch.compile(model, backend=watching, fullgraph=True)
    with torch.no_grad():
        expected = logits(grouped_model(**sizes), tokens(2, 11), chunks=[10])
        model(tokens(2, 11)[:, :10], past_key_values=cache)
        found = step(tokens(2, 11)[:, 10:], past_key_values=cache).logits
    assert error(found, expected[:, -1:]) < 1e-5
    assert max(made) < 2 * model.config.num_attention_heads * cached * model.config.head_dim


# What is left to sdpa


def sharing(count: int = 3, backend: str = "auto") -> SimpleNamespace:
    """A module of which so many query heads share a KV head."""
    return SimpleNamespace(num_key_value_groups=count, training=True, config=SimpleNamespace(backend=backend))


def call(heads: int = 6, groups: int = 2, queries: int = 1, batch: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, heads, queries, 16), (3, groups, 20, 16), (3, groups, 20, 16)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


MASK = (torch.rand(3, 1, 1, 20, generator=torch.Generator().manual_seed(3)) > 0.3) | (torch.arange(20) == 0)
CALLS: dict[str, tuple[Any, Any, dict[str, Any], bool]] = {
    # tensors, mask, other arguments, whether it is packed
    "mask": (call(), MASK, {"scaling": 0.3}, True),
    "no mask, no scaling": (call(), None, {}, True),
    "added": (call(), torch.where(MASK, 0.5, -torch.inf), {}, True),
    "mask a head": (call(), MASK & (torch.arange(6)[:, None, None] < torch.arange(20) + 1), {}, True),
    "unknown": (call(), MASK, {"position_ids": torch.zeros(3, 1)}, True),
    "queries": (call(queries=4), MASK, {}, False),
    "as many heads": (call(groups=6), MASK, {}, False),
    "one query for all": (call(batch=1), MASK, {}, False),
    "dropout": (call(), MASK, {"dropout": 0.5}, False),
    "biases": (call(), MASK, {"position_bias": torch.randn(1, 6, 1, 20)}, False),
    "a mask for all tokens": (call(), torch.ones(3, 1, 1, 1, dtype=torch.bool), {}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_computes_what_sdpa_computes(name: str) -> None:
    (q, k, v), mask, options, packed = CALLS[name]
    module = sharing(q.shape[1] // k.shape[1])
    torch.manual_seed(0)
    expected, _ = sdpa_attention_forward(module, q, k, v, mask, **options)
    torch.manual_seed(0)
    with attention.kernels.watched() as seen:
        found, probabilities = grouped_attention(module, q, k, v, mask, **options)
    assert probabilities is None
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-6
    assert seen == ({"torch": None} if packed else {})


@pytest.mark.parametrize("given", [{"softcap": 30.0}, {"s_aux": torch.zeros(6)}], ids=["caps", "sinks"])
def test_what_sdpa_leaves_out_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=f"sdpa does not support `{next(iter(given))}`"):
        grouped_attention(sharing(), *call(), None, **given)


@pytest.mark.parametrize(
    ("dtype", "dim", "width", "masked", "backend", "packed"),
    [
        (torch.float16, 16, 16, False, "auto", False),
        (torch.bfloat16, 16, 16, True, "auto", True),
        (torch.bfloat16, 16, 16, False, "torch", True),
        (torch.float32, 16, 16, False, "auto", True),
        (torch.float16, 16, 32, False, "auto", True),
        (torch.float16, 272, 272, False, "auto", True),
    ],
)
def test_flash_attention_is_left_what_it_takes(
    dtype: torch.dtype, dim: int, width: int, masked: bool, backend: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; who serves does not matter here."""
    on_gpu(monkeypatch)
    monkeypatch.setattr(triton_decode, "grouped_objection", lambda *_: "not here")
    monkeypatch.setattr(attention.kernels, "_warn", lambda _: None)
    shapes = (3, 6, 1, dim), (3, 2, 20, dim), (3, 2, 20, width)
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    with attention.kernels.watched() as seen:
        grouped_attention(sharing(3, backend), q, k, v, MASK if masked else None)
    assert bool(seen) is packed


@pytest.mark.parametrize("name", ["one query for all", "dropout", "biases", "a mask for all tokens"])
def test_a_backend_by_name_is_not_passed_over(name: str) -> None:
    tensors, mask, options, _ = CALLS[name]
    with pytest.raises(Refusal, match=r"the torch backend cannot decode here: it (does not support|takes)"):
        grouped_attention(sharing(3, "torch"), *tensors, mask, **options)


# What changes, and what does not


@pytest.mark.parametrize(("make", "change", "is_changed"), [(grouped_model, pack, is_packed), (mla_model, absorb, is_absorbed)])
def test_save_pretrained_writes_the_stock_checkpoint(make: Any, change: Any, is_changed: Any, tmp_path: Path) -> None:
    model, ids = make(), tokens(2, 20)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "stock")
    change(model).save_pretrained(tmp_path / "changed")
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "changed").iterdir())
    assert all((tmp_path / "stock" / name).read_bytes() == (tmp_path / "changed" / name).read_bytes() for name in names)
    again = load(tmp_path / "changed", dtype=torch.float32, attn_implementation="sdpa", backend="torch")
    assert {module.config.backend for module in again.modules() if is_changed(module)} == {"torch"}
    assert error(logits(again.eval(), ids), expected) < 1e-5
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "changed", dtype=torch.float32)
    assert not any(map(is_changed, stock.modules()))
    assert error(logits(stock.eval(), ids), expected) < 1e-5


def test_what_shares_no_heads_or_attends_otherwise_is_loaded_as_it_is(tmp_path: Path) -> None:
    grouped_model().save_pretrained(tmp_path / "eager")
    assert not any(map(is_packed, load(tmp_path / "eager", attn_implementation="eager").modules()))
    tiny_model(tiny_config("llama", num_key_value_heads=8)).save_pretrained(tmp_path / "mha")
    assert not any(map(is_packed, load(tmp_path / "mha").modules()))


def test_only_the_lookup_changes_and_comes_back() -> None:
    model, other = grouped_model(), grouped_model()
    configs = [layer.self_attn.config for layer in model.model.layers]
    for backend in ("auto", "torch"):
        for module in (layer.self_attn for layer in pack(model, backend=backend).model.layers):
            assert (module.config._attn_implementation, module.config.backend) == (NAME, backend)
            assert module.config.num_key_value_heads == 4
    assert model.config._attn_implementation == STOCK
    assert ALL_ATTENTION_FUNCTIONS[STOCK] is sdpa_attention_forward
    assert not any(map(is_packed, other.modules()))
    packed = model.model.layers[0].self_attn.config
    packed.told = 7
    assert configs[0].told == 7
    with pytest.raises(AttributeError, match="backend of a packed attention module is chosen by attention"):
        packed.backend = "torch"
    assert not {"backend", "stock"} & set(model.config.to_dict())
    assert not any(map(is_packed, restore(torch.nn.ModuleList([model])).modules()))  # the list has no config
    assert [layer.self_attn.config for layer in restore(model).model.layers] == configs


def test_a_packed_model_can_be_switched_to_another_implementation() -> None:
    model, ids = pack(grouped_model()), tokens(2, 12)
    expected = logits(model, ids)
    model.set_attn_implementation("eager")
    assert error(logits(model, ids), expected) < 1e-5
    assert model(ids, output_attentions=True).attentions[0].shape == (2, 8, 12, 12)
    model.set_attn_implementation(STOCK)
    with attention.kernels.watched() as seen:
        logits(model, ids)
    assert seen == {"torch": None}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make", [lambda: pack(grouped_model()), lambda: absorb(mla_model())], ids=["packed", "absorbed"])
def test_copies_are_packed_or_absorbed_too(make: Any, copied: Any) -> None:
    model, ids = make(), tokens(2, 12)
    twin = copied(model)
    module = twin.model.layers[1].self_attn
    assert isinstance(module.config, PackedConfig)
    assert module.config.stock is twin.config
    assert error(logits(twin, ids), logits(model, ids)) < 1e-6


def test_continuous_batching_finds_sdpa() -> None:
    model = grouped_model(head_dim=16)
    small = ContinuousBatchingConfig(page_size=32, num_blocks=4, max_batch_tokens=32)  # else it takes what memory there is

    def generated() -> list[list[int]]:
        outs = model.generate_batch([[5, 6, 7, 8], [9, 10, 11]], continuous_batching_config=small, max_new_tokens=3)
        return sorted(out.generated_tokens for out in outs.values())

    expected = generated()
    assert [len(tokens) for tokens in expected] == [3, 3]
    pack(model)
    assert generated() == expected


def composite(**chosen: str) -> Any:
    """A picture model: CLIP without groups, and a text model with them."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8}
    text = {"model_type": "llama", "num_key_value_heads": 4, "vocab_size": VOCABULARY} | sizes
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14} | sizes
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision)
    return AutoModelForImageTextToText.from_config(config, attn_implementation={"": STOCK, **chosen})


def test_of_a_composite_model_only_what_shares_heads_is_packed() -> None:
    model = composite(text_config=STOCK, vision_config="eager")
    assert {type(module).__name__ for module in pack(model).modules() if is_packed(module)} == {"LlamaAttention"}
    assert model.config.vision_config._attn_implementation == "eager"
    assert not any(map(is_packed, restore(model).modules()))
    with pytest.raises(Refusal, match=r"cannot pack .*self_attn of LlavaForConditionalGeneration: it attends through 'eager'"):
        pack(composite(text_config="eager", vision_config=STOCK))


def capped_model() -> Any:
    """As transformers before 5.23 makes it."""
    model = tiny_model(tiny_config("gemma2"))
    model.config._attn_implementation = STOCK
    return model


@pytest.mark.parametrize(
    ("make", "backend", "said"),
    [
        (lambda: grouped_model(num_key_value_heads=8), "auto", "LlamaForCausalLM has no attention that declares shared KV"),
        (mla_model, "auto", "DeepseekV3ForCausalLM has no attention that declares shared KV heads"),
        (lambda: tiny_model(tiny_config("llama")), "auto", "self_attn of LlamaForCausalLM: it attends through 'eager'"),
        (lambda: tiny_model(tiny_config("gemma2")), "auto", "Gemma2ForCausalLM: it attends through 'eager'"),
        (capped_model, "auto", "Gemma2ForCausalLM: it caps its logits, which sdpa does not"),
        (grouped_model, "cuda", "unknown backend 'cuda': it must be one of 'auto', 'triton', 'torch'"),
    ],
    ids=["mha", "mla", "eager", "gemma2", "capped", "backend"],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(make: Any, backend: Any, said: str) -> None:
    model = make()
    with pytest.raises(Refusal, match=said):
        pack(model, backend=backend)
    assert not any(map(is_packed, model.modules()))


class Helped(LlamaAttention):
    """Asks for sdpa by its name outside of its forward."""

    def masked(self) -> bool:
        return self.config._attn_implementation == STOCK


class Biased(LlamaAttention):
    """Adds what sdpa alone takes."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)(position_bias=None)


class Sunk(LlamaAttention):
    """Gives sinks to its attention function."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)(s_aux=self.sinks)


class Elsewhere(LlamaAttention):
    """Looks nothing up itself."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return super().forward(*arguments, **options)


def replaced(module: Any) -> None:
    module.forward = MethodType(lambda self, *_, **__: None, module)


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (replaced, "something else has replaced its forward by"),
        (Helped, "it does more with the name of its attention function than look it up"),
        (Biased, "it adds biases of positions, which sdpa alone takes"),
        (Sunk, "its heads have sinks, which sdpa leaves out"),
        (Elsewhere, "its forward does not look an attention function up"),
        (type("Unseen", (LlamaAttention,), {"forward": eval("lambda self: None")}), "the source of its methods, which has"),
    ],
)
def test_classes_that_might_compute_something_else_are_refused(cls: Any, said: str) -> None:
    model = grouped_model(num_hidden_layers=1)
    if cls is replaced:
        replaced(model.model.layers[0].self_attn)
    else:
        model.model.layers[0].self_attn.__class__ = cls
    with pytest.raises(Refusal, match=said):
        pack(model)


def test_hooks_of_accelerate_stay() -> None:
    model, ids = grouped_model(), tokens(2, 12)
    expected = logits(model, ids)
    cpu_offload(model, torch.device("cpu"))
    with attention.kernels.watched() as seen:
        assert error(logits(pack(model), ids), expected) < 1e-5
    assert seen == {"torch": None}
