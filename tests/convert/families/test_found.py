"""Model types that have no row: experiments read them, or refuse them and say why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import comes_back
from tiny import VOCABULARY, random_model, save_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from written import Convert, Logits, ok, refused, weights

import attention
from attention.errors import Refusal
from convert.families import FAMILIES
from convert.families.found import Found, find
from convert.families.reading import FOUND
from convert.families.twin import Twin, disproof
from eval.inputs.loading import load
from eval.inputs.source import Source

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": VOCABULARY - 1, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "moe_topk": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "num_key_value_heads": 8,
}  # fmt: skip
LATENTS = ("axk1", "glm4_moe_lite", "youtu")
UNSHARED = ("gpt-sw3", "modernbert-decoder")  # their classes ignore the number of KV heads
SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "flint")  # whose heads have sinks
SHARING = [name for name in FOUND if name not in (*LATENTS, *UNSHARED)]


def small(model_type: str, **changes: Any) -> Any:
    sizes = SIZES | (LATENT if model_type in LATENTS else {}) | changes
    if model_type in UNSHARED:
        sizes = {name: value for name, value in sizes.items() if name not in ("num_key_value_heads", "head_dim")}
    return AutoConfig.for_model(model_type, **sizes)


def saved(config: Any, path: Path) -> Path:
    random_model(config).save_pretrained(path)
    save_tokenizer(path)
    return path


# ---- types of transformers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FOUND)
def test_the_types_that_are_listed_are_found(model_type: str) -> None:
    assert model_type not in FAMILIES
    config = small(model_type)
    family = find(config)
    assert family.model_type == config.model_type
    assert family is find(small(model_type)), "the experiments of a config are made once"


@pytest.mark.slow
def test_no_other_type_is_found() -> None:
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - FAMILIES.keys() - set(FOUND)):
        changes = {"layer_types": ["conv", "full_attention"] * 2} if model_type == "lfm2" else {}
        try:
            config = small(model_type, **changes)
        except Exception:
            continue
        with pytest.raises(Refusal, match="cannot be read: "):
            find(config)


@pytest.mark.parametrize("model_type", SHARING)
def test_found_types_convert_in_their_own_class(model_type: str, convert: Convert, tmp_path: Path) -> None:
    source = saved(small(model_type), tmp_path / "source")
    ok(convert("gqa", source, tmp_path / "same", "--groups", 4, "--no-text"))
    before, same = weights(source), weights(tmp_path / "same")
    assert before.keys() == same.keys()
    assert all(torch.equal(before[name], same[name]) for name in before)
    ok(convert("gqa", source, tmp_path / "half", "--groups", 2, "--no-text"))
    with load(Source.parse(str(tmp_path / "half"))) as model:
        assert type(model).__module__.startswith("transformers.")
        ids = torch.randint(4, 90, (1, 12), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            whole = model(ids).logits
            cached = model(ids[:, :-1], use_cache=True).past_key_values
            last = model(ids[:, -1:], past_key_values=cached).logits
        assert cached.layers[-1].keys.shape[1] == 2
        torch.testing.assert_close(last[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("afmoe", "its attention has gate_proj besides projections of queries, keys, values and outputs"),
        ("falcon_h1", "something besides its attention mixes tokens"),
        ("trocr", "its layers also attend to the states of an encoder"),
        ("diffllama", "its attention has lambda_k1"),
        ("nanochat", "RoPE, windows and scales do not explain what layer 0 computes"),
        ("bert", "its first layer has no attention of four projections"),
        ("mamba", "a small model of its class does not run"),
    ],
)
def test_a_refusal_says_what_is_in_the_way(model_type: str, why: str) -> None:
    with pytest.raises(Refusal) as refused:
        find(AutoConfig.for_model(model_type))
    assert why in str(refused.value)


def test_far_queries_that_are_scaled_are_named() -> None:
    config = AutoConfig.for_model("ministral3")
    also = find(config).describe(config)["also"]
    assert 1.1 < also["far queries times"] < 1.4
    plain = {key: value for key, value in config.rope_parameters.items() if key != "llama_4_scaling_beta"}
    without = AutoConfig.for_model("ministral3", rope_parameters=plain | {"llama_4_scaling_beta": 0.0})
    assert find(without).describe(without)["also"] == {}


# ---- sinks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", SINKS)
def test_sinks_are_found_and_come_back(model_type: str) -> None:
    config = small(model_type)
    family = find(config)
    assert isinstance(family, Found)
    assert family.sinks == ("softmax_offset" if model_type == "flint" else "sinks"), "as checkpoints have it"
    assert family.describe(config)["sinks"]
    assert comes_back(family, config, dtype=torch.bfloat16).sinks.shape == (8,)
    twin = Twin(config)
    assert disproof(family, twin) is None
    assert "computes something else than its config says" in str(disproof(replace(family, sinks=None), twin))


def test_only_layers_that_rotate_are_counted_as_such() -> None:
    config = small("flint", layer_types=["sliding_attention", "full_attention"] * 2)
    family = find(config)
    assert [family.rotary(config, layer) is not None for layer in range(4)] == [True, False, True, False]
    assert family.traits(config).layers_with_rotary == 2


def with_copies(config: Any, path: Path) -> Path:
    """Every other KV head is the same, and sinks are large and different."""
    model, generator = random_model(config), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.sinks.copy_(1.5 * torch.randn(8, generator=generator))
            for projection in (attention.k_proj, attention.v_proj):
                for parameter in projection.parameters():
                    heads = parameter.unflatten(0, (4, -1))
                    heads[2:] = heads[:2]
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.mark.parametrize("model_type", SINKS[:2])
def test_sinks_follow_query_heads_that_change_places(
    model_type: str, convert: Convert, logits: Logits, tmp_path: Path, on: list[Any]
) -> None:
    """Heads 0 and 2 are copies, and so are 1 and 3: only a grouping of similar heads merges them without loss."""
    source = with_copies(small(model_type), tmp_path / "source")
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--grouping", "similar", *on, "--heal", 0))
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=1e-4, atol=1e-4)
    before, after = weights(source), weights(tmp_path / "out")
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn.sinks"
        assert torch.equal(after[name], before[name][[0, 1, 4, 5, 2, 3, 6, 7]])


def test_text_and_every_fit_of_heads_with_sinks(convert: Convert, logits: Logits, tmp_path: Path, words: Path) -> None:
    source = saved(small("gpt_oss", sliding_window=8), tmp_path / "source")
    ok(convert("gqa", source, tmp_path / "mean", "--groups", 2, "--method", "mean", "--no-text"))
    text = ("--text", words, "--calibration-tokens", 2048, "--calibration-context", 64)
    ok(convert("gqa", source, tmp_path / "fitted", "--groups", 2, *text, "--heal", 0))
    ok(convert("gqa", source, tmp_path / "all", "--groups", 2, *text, "--cache-dtype", "int8", "--refine", 2, "--heal", 1024))
    expected = logits(source)
    lost = {name: float((logits(tmp_path / name) - expected).norm()) for name in ("mean", "fitted", "all")}
    assert lost["fitted"] < 0.9 * lost["mean"]
    assert lost["all"] < 0.9 * lost["mean"]
    before, fitted = weights(source), weights(tmp_path / "fitted")
    assert all(torch.equal(tensor, fitted[name]) for name, tensor in before.items() if name.endswith("sinks"))


@pytest.mark.parametrize("command", [["mla", "--kv-lora-rank", 16], ["gqa", "--groups", 2, "--class", "kvfold"]])
def test_classes_without_sinks_are_refused(command: list[Any], convert: Convert, tmp_path: Path) -> None:
    source = saved(small("gpt_oss"), tmp_path / "source")
    said = "kvfold: its heads have sinks (logits of their own in every softmax), and those of the class have none"
    kind, *options = command
    result = convert(kind, source, tmp_path / "out", *options, "--no-text")
    assert result.exit_code == 2
    assert said in result.stderr


def test_no_other_engine_is_said_to_run_sinks(convert: Convert, tmp_path: Path) -> None:
    source = saved(small("granite_swa"), tmp_path / "source")
    refused(convert("mqa", source, tmp_path / "out", "--engine", "vllm", "--no-text"), 2, "vllm does not run it")


@pytest.mark.parametrize("model_type", SINKS)
def test_sinks_are_kept_where_models_are_packed_or_their_cache_is_encoded(model_type: str, tmp_path: Path) -> None:
    source = saved(small(model_type, sliding_window=8, head_dim=32), tmp_path)
    ids, cut = torch.randint(4, 90, (2, 40), generator=torch.Generator().manual_seed(0)), 33

    def said(model: Any, **options: Any) -> torch.Tensor:
        with torch.inference_mode():
            first = model(ids[:, :cut], **options)
            rest = [model(ids[:, t : t + 1], past_key_values=first.past_key_values).logits for t in range(cut, 40)]
        return torch.cat((first.logits, *rest), 1)

    stock = said(AutoModelForCausalLM.from_pretrained(source), use_cache=True)
    assert torch.equal(said(attention.load(source), use_cache=True), stock)
    torch.testing.assert_close(said(attention.load(source, cache_dtype="float32")), stock, rtol=1e-4, atol=1e-4)
    for form in ("int8", "int4"):
        with torch.inference_mode():
            whole = attention.load(source, cache_dtype=form)(ids).logits
        lost = (whole - stock).norm()
        # A number between two codes is rounded to either: the class computes in fp32.
        assert (said(attention.load(source, cache_dtype=form)) - whole).norm() < 0.1 * lost
        assert 0 < lost < 0.5 * stock.norm()
    with pytest.raises(Refusal, match="it attends through 'eager', and must attend through 'sdpa'"):
        attention.pack(AutoModelForCausalLM.from_pretrained(source))


# ---- a type that nobody has seen -------------------------------------------------------------------------------------------


class OddConfig(PretrainedConfig):
    model_type = "odd"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self, width: int = 48, heads: int = 4, groups: int = 2, size: int = 12, depth: int = 3, words: int = VOCABULARY,
        sliding_window: int | None = 5, gate: bool = False, shift: float = 0.0, scale: float = 0.37, drain: str = "",
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim = width, heads, groups, size
        self.num_hidden_layers, self.vocab_size, self.max_position_embeddings = depth, words, 512
        self.sliding_window, self.gate, self.shift, self.scale, self.norm_eps = sliding_window, gate, shift, scale, 1e-5
        self.rope_parameters, self.drain = {"rope_type": "default", "rope_theta": 500.0}, drain
        super().__init__(**kwargs)


class OddMixing(nn.Module):
    """Queries and keys rotate in neighbouring pairs and are normalised then; queries are scaled; a window."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.config, width, size = config, config.hidden_size, config.head_dim
        self.look = nn.Linear(width, config.num_attention_heads * size, bias=False)
        self.lock = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.load = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.leave = nn.Linear(config.num_attention_heads * size, width, bias=False)
        self.of_look, self.of_lock = (nn.RMSNorm(size, eps=config.norm_eps) for _ in range(2))
        if config.gate:
            self.valve = nn.Linear(width, config.num_attention_heads * size, bias=False)
        if config.drain:
            self.drains = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        c = self.config
        q, k, v = (part(states).unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for part in (self.look, self.lock, self.load))
        angles = positions[0, :, None] * 500.0 ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        cos, sin = angles.cos(), angles.sin()

        def rotated(x: torch.Tensor) -> torch.Tensor:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

        q, k = self.of_look(rotated(q)) * c.scale, self.of_lock(rotated(k))
        k, v = (x.repeat_interleave(c.num_attention_heads // c.num_key_value_heads, 1) for x in (k, v))
        distance = positions[0, :, None] - positions[0]
        hidden = (distance < 0) | (distance >= (c.sliding_window or 1 << 30))
        logits = (q @ k.mT).masked_fill(hidden, -torch.inf) + c.shift * distance.clamp_min(0).sqrt()
        if c.drain == "factor":
            logits = logits * self.drains[:, None, None]
        if c.drain == "sink":
            logits = torch.cat((logits, self.drains[None, :, None, None].expand(*logits.shape[:-1], 1)), -1)
        mixed = (logits.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2).flatten(2)
        return self.leave(mixed * self.valve(states).sigmoid() if c.gate else mixed)


class OddLayer(nn.Module):
    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.ahead, self.mixing = nn.RMSNorm(config.hidden_size, eps=config.norm_eps), OddMixing(config)
        self.beyond, self.thinking = (
            nn.RMSNorm(config.hidden_size, eps=config.norm_eps),
            nn.Linear(config.hidden_size, config.hidden_size),
        )

    def forward(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        states = states + self.mixing(self.ahead(states), positions)
        return states + self.thinking(self.beyond(states)).tanh()


class OddForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.floors = nn.ModuleList(OddLayer(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        states = self.words(input_ids)
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        for floor in self.floors:
            states = floor(states, positions)
        return CausalLMOutputWithPast(logits=self.head(states))


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    AutoConfig.register("odd", OddConfig)
    AutoModelForCausalLM.register(OddConfig, OddForCausalLM)
    yield
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    del CONFIG_MAPPING._extra_content["odd"], MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[OddConfig]


def test_a_type_that_nobody_has_seen_is_read() -> None:
    config = OddConfig()
    family = find(config)
    assert isinstance(family, Found)
    assert family.projections == ("look", "lock", "load", "leave")
    assert family.module(2) == "floors.2.mixing"
    assert family.norm is not None
    assert (family.norm.q, family.norm.k, family.norm.after_rotary, family.norm.eps) == ("of_look", "of_lock", True, "norm_eps")
    assert family.rotary(config, 0).pairing == "interleaved"  # type: ignore[union-attr]
    assert family.scale(config) == pytest.approx(0.37, rel=1e-5)
    assert family.window(config, 1) == 5
    norm = family.input_norm(1)
    assert norm is not None
    assert (norm.name, norm.gain_offset) == ("floors.1.ahead", 0.0)
    assert family.adds_output
    assert family.without_latent


def test_its_sinks_are_found_whatever_their_name() -> None:
    family = find(OddConfig(drain="sink"))
    assert isinstance(family, Found)
    assert family.sinks == "drains"
    assert "floors.1.mixing.drains" in family.shapes(OddConfig(), 1)


def test_another_number_for_each_head_is_named() -> None:
    with pytest.raises(Refusal, match="RoPE, windows and scales, with drains as sinks, do not explain what layer 0 computes"):
        find(OddConfig(drain="factor"))


def test_its_gate_is_named() -> None:
    with pytest.raises(Refusal, match="its attention has valve besides projections"):
        find(OddConfig(gate=True))


def test_the_field_that_makes_it_differ_is_named() -> None:
    with pytest.raises(Refusal, match=r"it would be read without shift 0.3 in config\.json"):
        find(OddConfig(shift=0.3))
