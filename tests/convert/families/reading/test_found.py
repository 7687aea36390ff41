"""Model types that have no row: experiments read them, or refuse them and say why."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from alike import comes_back, reads_its_cache
from found_types import FOUND, SHARING, SINKS, SIZES, small
from PIL import Image
from rows import rows
from tiny import VOCABULARY, duplicate_kv_heads, random_model, saved
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from written import Convert, Logits, damage, edit, is_a_copy, ok, refused, weights

from attention.errors import Refusal
from convert.families import FAMILIES, UNREAD, reading
from convert.families.reading.experiments import find
from convert.families.reading.found import Found
from convert.families.reading.twin import Twin, disproof
from convert.planning.allowed import convertible
from eval.inputs.loading import load
from eval.inputs.source import Source


@pytest.mark.parametrize("model_type", FOUND)
def test_the_types_that_are_listed_are_found_and_come_back(model_type: str) -> None:
    assert model_type not in FAMILIES
    config = small(model_type)
    family = find(config)
    assert family.model_type == config.model_type
    assert family.names is find(small(model_type)).names, "the experiments of a config are made once"
    comes_back(family, config, dtype=torch.bfloat16)


MERGED = ("ernie4_5_moe", "cohere2_moe", "nanochat", "dots1")


@pytest.mark.parametrize(
    ("fitted", "model_type"), rows(product([False, True], MERGED), [(False, "cohere2_moe"), (True, "nanochat")])
)
def test_equal_heads_merge_without_loss(
    fitted: bool, model_type: str, convert: Convert, logits: Logits, on: list[Any], tmp_path: Path
) -> None:
    """Pairs of dims stay where the class rotates them."""
    model = random_model(small(model_type))
    duplicate_kv_heads(model, 2)
    saved(model, tmp_path / "source")
    ways = on if fitted else ["--no-text"]
    ok(convert("gqa", tmp_path / "source", tmp_path / "out", "--groups", 2, "--class", "stock", *ways, "--heal", 0))
    torch.testing.assert_close(logits(tmp_path / "out"), logits(tmp_path / "source"), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_no_other_type_is_found() -> None:
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - FAMILIES.keys() - UNREAD.keys() - set(FOUND)):
        changes = {"layer_types": ["conv", "full_attention"] * 2} if model_type == "lfm2" else {}
        try:
            config = small(model_type, **changes)
        except Exception:
            continue
        if config.get_text_config(decoder=True) is not config:
            continue
        with pytest.raises(Refusal, match="cannot be read: "):
            find(config)


@pytest.mark.parametrize("model_type", rows(SHARING, ["gpt_oss", "phi4_multimodal"]))
def test_found_types_convert_in_their_own_class(model_type: str, convert: Convert, tmp_path: Path) -> None:
    source = saved(random_model(small(model_type)), tmp_path / "source")
    ok(convert("gqa", source, tmp_path / "same", "--groups", 4, "--no-text", "--force"))
    is_a_copy(tmp_path / "same", source)
    ok(convert("gqa", source, tmp_path / "half", "--groups", 2, "--no-text"))
    with load(Source.parse(str(tmp_path / "half"))) as model:
        assert type(model).__module__.startswith("transformers.")
        assert reads_its_cache(model) == 2


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("afmoe", "its attention has gate_proj besides projections of queries, keys, values and outputs"),
        ("falcon_h1", "something besides its attention mixes tokens"),
        ("trocr", "its layers also attend to the states of an encoder"),
        ("diffllama", "its attention has lambda_k1"),
        ("bert", "its first layer has no attention with projections of queries, keys, values and outputs"),
        ("mamba", "a small model of its class does not run"),
    ],
)
def test_a_refusal_says_what_is_in_the_way(model_type: str, why: str) -> None:
    with pytest.raises(Refusal) as refused:
        find(AutoConfig.for_model(model_type, num_hidden_layers=2))
    assert why in str(refused.value)
    assert "convert eval" not in str(refused.value.hint), "most of these cannot be measured either"


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_text"])
def test_layers_of_different_heads_are_the_reason(model_type: str) -> None:
    with pytest.raises(Refusal, match=r"model type 'gemma4_text' has layers that differ in head_dim\)$") as refused:
        find(AutoConfig.for_model(model_type))
    assert refused.value.hint == "`convert families` lists the types that can be read"


def test_far_queries_that_are_scaled_are_named() -> None:
    config = AutoConfig.for_model("ministral3", num_hidden_layers=2)
    also = find(config).describe()["also"]
    assert 1.1 < also["far queries times"] < 1.4
    plain = {key: value for key, value in config.rope_parameters.items() if key != "llama_4_scaling_beta"}
    without = AutoConfig.for_model("ministral3", num_hidden_layers=2, rope_parameters=plain | {"llama_4_scaling_beta": 0.0})
    assert find(without).describe()["also"] == {}


TEXT = {key: SIZES[key] for key in (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "bos_token_id",
    "eos_token_id", "pad_token_id",
)} | {"num_hidden_layers": 3, "max_position_embeddings": 512}  # fmt: skip
SIGHT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
         "patch_size": 8, "projection_dim": 32}  # fmt: skip
QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 64, "patch_size": 4}
PICTURE = 90  # the token that stands for a part of a picture
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
QWEN_TOKENS = {"image_token_id": PICTURE, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93}
GRID = {"image_grid_pinpoints": [[32, 64], [64, 32]]}
# By type: the type of its decoder, what that has besides, its vision model, what the whole has besides.
INSIDE: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ("llama", {}, {"model_type": "clip_vision_model", **SIGHT}, {"image_token_index": PICTURE}),
    "llava_next": ("llama", {}, {"model_type": "clip_vision_model", **SIGHT}, {"image_token_index": PICTURE, **GRID}),
    "llava_onevision": ("qwen2", {}, {"model_type": "siglip_vision_model", **SIGHT}, {"image_token_index": PICTURE, **GRID}),
    "vipllava": ("llama", {}, {"model_type": "clip_vision_model", **SIGHT}, {"image_token_index": PICTURE}),
    "mistral3": ("mistral", {}, {"model_type": "pixtral", **SIGHT, "head_dim": 8}, {"image_token_index": PICTURE}),
    "internvl": ("qwen2", {}, {"model_type": "internvl_vision", **SIGHT, "image_size": [32, 32], "patch_size": [8, 8]},
                 {"image_token_id": PICTURE}),
    "aya_vision": ("cohere2", {}, {"model_type": "siglip_vision_model", **SIGHT}, {"image_token_index": PICTURE}),
    "emu3": ("emu3_text_model", {}, {}, {"vq_config": {"embed_dim": 8, "base_channels": 32, "channel_multiplier": [1, 1],
             "num_res_blocks": 1, "codebook_size": 32}, "vocabulary_map": {"<image>": PICTURE}}),
    "got_ocr2": ("qwen2", {}, {"model_type": "got_ocr2_vision", **SIGHT, "window_size": 2, "global_attn_indexes": [1]},
                 {"image_token_index": PICTURE}),
    "smolvlm": ("llama", {}, {"model_type": "smolvlm_vision", **SIGHT}, {"image_token_id": PICTURE, "scale_factor": 2}),
    "paligemma": ("gemma", {}, {"model_type": "siglip_vision_model", **SIGHT}, {"image_token_index": PICTURE}),
    "gemma3": ("gemma3_text", {"sliding_window": 16, "query_pre_attn_scalar": 8},
               {"model_type": "siglip_vision_model", **SIGHT}, {"image_token_index": PICTURE, "mm_tokens_per_image": 4}),
    "qwen2_vl": ("qwen2_vl_text", MROPE, {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 4},
                 QWEN_TOKENS),
    "qwen2_5_vl": ("qwen2_5_vl_text", MROPE, QWEN | {"window_size": 16, "fullatt_block_indexes": [1]}, QWEN_TOKENS),
    "qwen3_vl": ("qwen3_vl_text", MROPE, QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}, QWEN_TOKENS),
}  # fmt: skip


def test_all_that_are_listed_are_tested() -> None:
    assert sorted(INSIDE) == list(reading.INSIDE)


def seeing(model_type: str) -> Any:
    decoder, besides, vision, whole = INSIDE[model_type]
    text = {"model_type": decoder, **TEXT, **besides}
    return AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **whole)


def saved_seeing(model_type: str, path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(seeing(model_type), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    saved(model, path)
    (path / "processor_config.json").write_text("{}")
    return path


@pytest.mark.parametrize("model_type", rows(INSIDE, ["emu3", "gemma3"]))
def test_a_decoder_inside_another_model_is_converted(model_type: str, convert: Convert, tmp_path: Path) -> None:
    source = saved_seeing(model_type, tmp_path / "source")
    ok(convert("gqa", source, tmp_path / "same", "--groups", 4, "--no-text", "--force"))
    ok(convert("gqa", source, tmp_path / "half", "--groups", 2, "--no-text"))
    assert (tmp_path / "half" / "processor_config.json").read_text() == "{}"
    models = [AutoModelForImageTextToText.from_pretrained(tmp_path / name).eval() for name in ("source", "same", "half")]
    before, same, half = (model.state_dict() for model in models)
    assert before.keys() == same.keys() == half.keys()
    assert all(torch.equal(before[name], same[name]) for name in before)
    changed = {name for name in before if before[name].shape != half[name].shape or not torch.equal(before[name], half[name])}
    assert changed
    assert all(".self_attn." in name and "vision" not in name for name in changed)
    both_ways = model_type == "paligemma"  # it reads a prompt that it caches both ways, and other text forwards
    assert reads_its_cache(models[2], torch.inf if both_ways else 1e-4) == 2


def pictured(model_type: str) -> dict[str, torch.Tensor]:
    """A prompt with a picture of random pixels, behind the preprocessing of the type's own processor."""
    pixels = numpy.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype="uint8")
    words = torch.randint(4, 89, (10,), generator=torch.Generator().manual_seed(0)).tolist()
    if model_type == "llava":
        processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        seen, parts = processor(Image.fromarray(pixels), return_tensors="pt"), 16
    else:
        sizes: dict[str, Any] = {"min_pixels": 64, "max_pixels": 1024}
        seen = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, **sizes)(
            Image.fromarray(pixels), return_tensors="pt"
        )
        parts = int(seen["image_grid_thw"].prod()) // 4
    ids = torch.tensor([[*words[:3], 91, *[PICTURE] * parts, 92, *words[3:]]])
    kinds = {} if model_type == "llava" else {"mm_token_type_ids": (ids == PICTURE).long()}
    return {"input_ids": ids, **kinds, **seen}


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl"])
def test_pictures_are_seen_as_before(model_type: str, convert: Convert, tmp_path: Path) -> None:
    source, given = saved_seeing(model_type, tmp_path / "source"), pictured(model_type)
    for name, groups in (("same", 4), ("half", 2)):
        ok(convert("gqa", source, tmp_path / name, "--groups", groups, "--no-text", "--force"))
    models = [AutoModelForImageTextToText.from_pretrained(tmp_path / name).eval() for name in ("source", "same", "half")]
    with torch.inference_mode():
        before, same, half = (model(**given).logits for model in models)
        assert torch.equal(before, same)
        assert not torch.equal(before, half)
        without = {name: value for name, value in given.items() if name in ("input_ids", "mm_token_type_ids")}
        blind = without | {"input_ids": given["input_ids"].masked_fill(given["input_ids"] == PICTURE, 5)}
        assert not torch.allclose(models[2](**blind).logits, half), "the picture says something"
        how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [PICTURE]}
        said = [models[2].generate(**given, **how, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*said)


@pytest.mark.parametrize("model_type", rows(["qwen2_5_vl", "gemma3"], ["qwen2_5_vl"]))
def test_text_calibrates_evaluates_and_heals_such_a_decoder(
    model_type: str, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source = saved_seeing(model_type, tmp_path / "source")
    on = ("--text", words, "--calibration-tokens", 512, "--calibration-context", 64)
    ok(convert("mqa", source, tmp_path / "out", *on))
    ok(convert("mqa", source, tmp_path / "plain", "--no-text", "--method", "mean"))
    ok(convert("heal", tmp_path / "out", tmp_path / "healed", "--text", words, "--tokens", 256, "--context", 64))
    compared = [source, *(tmp_path / name for name in ("out", "plain", "healed"))]
    found = ok(convert("eval", *compared, "--text", words, "--context", 64, "--json"))
    losses = [entry["loss_nats"] for entry in json.loads(found.stdout)["models"]]
    assert max(losses[1], losses[3]) < losses[2]


# Classes that build their decoder by its type, here one that is like Llama.
OPEN = ("got_ocr2", "internvl", "llava", "llava_next", "llava_onevision", "mistral3", "vipllava")


@pytest.mark.parametrize("model_type", rows(OPEN, ["llava"]))
def test_such_a_decoder_becomes_one_with_a_latent(model_type: str, convert: Convert, words: Path, tmp_path: Path) -> None:
    source = saved_seeing(model_type, tmp_path / "source")
    on = ("--text", words, "--calibration-tokens", 512, "--calibration-context", 64, "--heal", 0)
    ok(convert("mla", source, tmp_path / "out", "--kv-lora-rank", 40, "--qk-rope-head-dim", 8, *on))
    found = ok(convert("eval", source, tmp_path / "out", "--text", words, "--context", 64, "--json"))
    _, entry = json.loads(found.stdout)["models"]
    assert entry["kind"] == "MLA-40+8"
    assert entry["kv_bytes_per_token"] == 3 * 48 * 4
    assert entry["kl_to_source"] < 0.02
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    before = AutoModelForImageTextToText.from_pretrained(source).state_dict()
    assert model.config.text_config.model_type == "deepseek_v3"
    for name, tensor in model.state_dict().items():
        assert (".language_model.layers." in name and ".self_attn." in name) or torch.equal(tensor, before[name])


def test_what_a_decoder_inside_says_of_itself_is_read_as_at_the_top(tmp_path: Path) -> None:
    source = saved_seeing("llava", tmp_path)
    text = json.loads((source / "config.json").read_text())["text_config"]
    edit(source, text_config=text | {"_attn_implementation": "flash_attention_2"})
    with load(Source.parse(str(source)), device="cpu") as model:
        assert model.config.text_config._attn_implementation == "sdpa"
    edit(source, text_config=text | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    stale = Source.parse(str(source))
    for refuse in (lambda: convertible(stale), lambda: load(stale).__enter__()):
        with pytest.raises(Refusal, match=r"says in text_config\.quantization_config that it is quantised \(gptq\)"):
            refuse()
    damage(source, lambda tensors: tensors.update({min(tensors): tensors[min(tensors)].to(torch.int8)}))
    with pytest.raises(Refusal, match=r"is quantised \(gptq\)$"):
        convertible(Source.parse(str(source)))


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("qwen2_5_vl", "the class is for decoders inside other models, of types that are also read alone"),
        ("gemma3", "gemma3_text does not have Llama's decoder blocks"),
        ("aya_vision", "cohere2 does not have Llama's decoder blocks"),
    ],
)
def test_a_latent_that_no_class_holds_is_refused(model_type: str, why: str, convert: Convert, tmp_path: Path) -> None:
    source = saved_seeing(model_type, tmp_path / "source")
    refused(convert("mla", source, tmp_path / "out", "--kv-lora-rank", 24, "--qk-rope-head-dim", 8, "--no-text"), 2, why)


@pytest.mark.parametrize("model_type", SINKS)
def test_sinks_are_found_and_come_back(model_type: str) -> None:
    config = small(model_type)
    family = find(config)
    assert isinstance(family, Found)
    assert family.sinks == ("softmax_offset" if model_type == "flint" else "sinks"), "as checkpoints have it"
    assert family.describe()["sinks"]
    assert comes_back(family, config, dtype=torch.bfloat16).sinks.shape == (8,)
    twin = Twin(config)
    assert disproof(family, twin) is None
    assert "computes something else than its config says" in str(disproof(replace(family, sinks=None), twin))


def test_only_layers_that_rotate_are_counted_as_such() -> None:
    config = small("exaone_moe", sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
    family = find(config)
    assert [family.rotary(layer) is not None for layer in range(4)] == [True, False, True, False]
    assert family.describe()["layers_with_rotary"] == 2


def test_text_and_every_fit_of_heads_with_sinks(convert: Convert, logits: Logits, tmp_path: Path, words: Path) -> None:
    source = saved(random_model(small("gpt_oss", sliding_window=8)), tmp_path / "source")
    ok(convert("gqa", source, tmp_path / "mean", "--groups", 2, "--method", "mean", "--no-text"))
    text = ("--text", words, "--calibration-tokens", 1024, "--calibration-context", 64)
    ok(convert("gqa", source, tmp_path / "fitted", "--groups", 2, *text, "--heal", 0))
    ok(convert("gqa", source, tmp_path / "all", "--groups", 2, *text, "--cache-dtype", "int8", "--heal", 1024))
    expected = logits(source)
    lost = {name: float((logits(tmp_path / name) - expected).norm()) for name in ("mean", "fitted", "all")}
    assert lost["fitted"] < 0.9 * lost["mean"]
    assert lost["all"] < 0.9 * lost["mean"]
    before, fitted = weights(source), weights(tmp_path / "fitted")
    assert all(torch.equal(tensor, fitted[name]) for name, tensor in before.items() if name.endswith("sinks"))


@pytest.mark.parametrize("command", [["mla", "--kv-lora-rank", 16], ["gqa", "--groups", 2, "--class", "kvfold"]])
def test_classes_without_sinks_are_refused(command: list[Any], convert: Convert, tmp_path: Path) -> None:
    source = saved(random_model(small("gpt_oss")), tmp_path / "source")
    said = "kvfold: its heads have sinks (logits of their own in every softmax), and those of the class have none"
    refused(convert(command[0], source, tmp_path / "out", *command[1:], "--no-text"), 2, said)


def test_no_other_engine_is_said_to_run_sinks(convert: Convert, tmp_path: Path) -> None:
    source = saved(random_model(small("granite_swa")), tmp_path / "source")
    refused(convert("mqa", source, tmp_path / "out", "--engine", "vllm", "--no-text"), 2, "vllm does not run it")


class OddConfig(PretrainedConfig):
    model_type = "odd"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self, width: int = 48, heads: int = 4, groups: int = 2, size: int = 12, depth: int = 3, words: int = VOCABULARY,
        sliding_window: int | None = 5, gate: bool = False, shift: float = 0.0, scale: float = 0.37, drain: str = "",
        quirk: str = "", near_layers: tuple[int, ...] = (), **kwargs: Any,
    ) -> None:  # fmt: skip
        self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim = width, heads, groups, size
        self.num_hidden_layers, self.vocab_size, self.max_position_embeddings = depth, words, 512
        self.sliding_window, self.gate, self.shift, self.scale, self.norm_eps = sliding_window, gate, shift, scale, 1e-5
        self.rope_parameters, self.drain = {"rope_type": "default", "rope_theta": 500.0}, drain
        self.quirk, self.near_layers = quirk, list(near_layers)
        super().__init__(**kwargs)


class OddMixing(nn.Module):
    """Queries and keys rotate in neighbouring pairs and are normalised then; queries are scaled; a window."""

    def __init__(self, config: OddConfig, number: int) -> None:
        super().__init__()
        self.config, width, size = config, config.hidden_size, config.head_dim
        self.number, self.near = number, number in config.near_layers
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
        short = 2 if self.near or (c.quirk == "layers" and self.number % 6 == 5) else 64 if c.quirk == "window" else 1 << 30
        hidden = (distance < 0) | (distance >= min(short, c.sliding_window or 1 << 30))
        q = q * c.hidden_size**0.5 if c.quirk == "width" else q
        v = v.clamp(-8, 8) if c.quirk == "clamp" else v
        logits = (q @ k.mT).masked_fill(hidden, -torch.inf) + c.shift * distance.clamp_min(0).sqrt()
        if c.drain == "factor":
            logits = logits * self.drains[:, None, None]
        if c.drain == "sink":
            logits = torch.cat((logits, self.drains[None, :, None, None].expand(*logits.shape[:-1], 1)), -1)
        mixed = (logits.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2).flatten(2)
        return self.leave(mixed * self.valve(states).sigmoid() if c.gate else mixed)


class OddLayer(nn.Module):
    def __init__(self, config: OddConfig, number: int) -> None:
        super().__init__()
        self.ahead, self.mixing = nn.RMSNorm(config.hidden_size, eps=config.norm_eps), OddMixing(config, number)
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
        self.floors = nn.ModuleList(OddLayer(config, number) for number in range(config.num_hidden_layers))
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
    del CONFIG_MAPPING._extra_content["odd"], MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[OddConfig]


def test_a_type_that_nobody_has_seen_is_read() -> None:
    config = OddConfig()
    family = find(config)
    assert isinstance(family, Found)
    assert family.projections == ("look", "lock", "load", "leave")
    assert family.module(2) == "floors.2.mixing"
    assert (family.norm.q, family.norm.k, family.norm.after_rotary, family.norm.eps) == ("of_look", "of_lock", True, "norm_eps")
    assert family.rotary(0).pairing == "interleaved"  # type: ignore[union-attr]
    assert family.scale == pytest.approx(0.37, rel=1e-5)
    assert family.window(1) == 5
    norm = family.input_norm(1)
    assert (norm.name, norm.offset) == ("floors.1.ahead.weight", 0.0)
    assert family.adds_output
    assert family.without_latent


def test_its_sinks_are_found_whatever_their_name() -> None:
    family = find(OddConfig(drain="sink"))
    assert isinstance(family, Found)
    assert family.sinks == "drains"
    assert "floors.1.mixing.drains" in family.shapes(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"quirk": "width"},
        {"quirk": "window", "sliding_window": None},
        {"quirk": "layers", "depth": 12, "sliding_window": None},
        {"quirk": "clamp"},
        {"near_layers": (20,), "depth": 24, "sliding_window": None},
    ],
    ids=lambda changes: changes.get("quirk", "near layers"),
)
def test_what_a_small_twin_hides_is_found(changes: dict[str, Any]) -> None:
    with pytest.raises(
        Refusal, match=r"cannot be read: layer \d+ (computes something else than its config says|has another near)"
    ):
        find(OddConfig(**changes))
    assert find(OddConfig(depth=changes.get("depth", 3), sliding_window=changes.get("sliding_window", 5)))


@pytest.mark.parametrize("scale", [0.21, 0.83, 1.7])
def test_a_scale_that_is_fitted_is_the_same_in_all_layers(scale: float) -> None:
    config = OddConfig(scale=scale, sliding_window=None)
    assert find(config).scale == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize(("depth", "others"), [(8, [0, 0, 1, 1]), (6, [1, 2, 3, 4, 5, 1])])
def test_lists_that_only_look_as_if_they_were_of_layers_do_no_harm(depth: int, others: list[int]) -> None:
    config = OddConfig(depth=depth)
    config.others = others
    assert find(config).rotary(depth - 1) is not None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shift": 0.3}, "do not explain what layer 0 computes"),
        ({"drain": "factor"}, "RoPE, windows and scales, with drains as sinks, do not explain what layer 0 computes"),
        ({"gate": True}, "its attention has valve besides projections"),
    ],
)
def test_what_no_reading_explains_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(Refusal, match=why) as refused:
        find(OddConfig(**changes))
    assert ("`convert eval` measures it all the same" in str(refused.value.hint)) is ("explain" in why)
