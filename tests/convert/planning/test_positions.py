"""A result that is calibrated for fewer positions than its source has says so in config.json, and its RoPE stays the same."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from plans import Sources, factored, grouped
from transformers import AutoConfig, AutoModelForCausalLM

from attention.calibrated import Calibrated
from attention.models.configuration_kvfold import KvfoldConfig
from convert.output.destination import Output
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationOptions
from convert.planning.positions import limited
from convert.planning.texts import texts_of
from eval.inputs.source import Source

TEXT = CalibrationOptions(texts_of("some.txt", None), tokens=512, context=32, max_context=32)
OF = 128  # positions of the source
LENGTHS = (1, 31, 32, 33, 63, 64, 65, OF, OF + 1, 300)
LONG: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn without the original": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "llama3 without the original": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": LONG | {"original_max_position_embeddings": 64},
    "longrope, early": LONG | {"original_max_position_embeddings": 16},
    "longrope without the original": LONG,
    "longrope with its factor": LONG | {"original_max_position_embeddings": 64, "attention_factor": 1.5},
}  # fmt: skip


def planned(source: Source, output: Output, text: CalibrationOptions = TEXT, method: str = "weighted", **size: Any) -> Plan:
    return factored(source, output, method, text, **({"kv_lora_rank": 16, "qk_rope_head_dim": 4} | size))


def configs(plan: Plan, pairs: tuple[int, ...] = (0, 2)) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config.json of a result without its positions, and as it is."""
    return plan.plain_config(pairs), plan.config(pairs)


def rotations(config: dict[str, Any]) -> list[torch.Tensor]:
    """Frequencies, cosines and sines of its class, of sequences of several lengths in turn, and what the model computes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)), dtype=torch.float32).eval()
    inner = model.model.model if isinstance(model.config, KvfoldConfig) else model.model
    found = []
    for length in LENGTHS:
        where = torch.arange(length)[None]
        found += inner.rotary_emb(torch.zeros(1, length, 1), where)
        found.append(inner.rotary_emb.inv_freq.clone())
    with torch.no_grad():
        found.append(model(torch.arange(3, 43)[None], use_cache=False).logits)
    return found


CLASSES: dict[str, tuple[str, dict[str, Any]]] = {  # the source, and what its result is held by
    "kvfold, built around it": ("qwen3", {}), "kvfold": ("llama", {"keep_layers": (1,)}), "deepseek_v3": ("llama", {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("host", CLASSES)
def test_rope_is_the_same_bit_for_bit(kind: str, host: str, source: Sources, output: Output) -> None:
    model_type, size = CLASSES[host]
    given = TYPES[kind] | {"rope_theta": 10_000.0}
    plan = planned(source(model_type, rope_parameters=given, max_position_embeddings=OF), output, **size)
    before, after = configs(plan)
    assert all(map(torch.equal, rotations(after), rotations(before)))
    inner, around = after.get("text_config", after), before.get("text_config", before)
    assert ("text_config" in after) == (host != "deepseek_v3" or kind == "dynamic")
    assert (inner["calibrated_positions"], inner["source_positions"]) == (32, OF)
    # What dynamic RoPE computes of it is not in any other field.
    assert (inner["max_position_embeddings"], around["max_position_embeddings"]) == (OF if kind == "dynamic" else 32, OF)


def test_engines_take_the_positions_of_yarn_from_elsewhere(source: Sources, output: Output) -> None:
    """vLLM and SGLang multiply `original_max_position_embeddings` by the factor, which is 1 in a portable result."""
    plan = planned(source(max_position_embeddings=OF), output, portable=True)
    before, after = configs(plan, (0, 1))
    assert after["rope_parameters"]["original_max_position_embeddings"] == after["max_position_embeddings"] == 32
    assert all(map(torch.equal, rotations(after), rotations(before)))


def test_a_config_of_old_keys_is_written_with_the_new_ones_where_it_has_to_be(source: Sources, output: Output) -> None:
    made = source("qwen3", max_position_embeddings=OF)
    plan = planned(made, output)
    rope = {"type": "yarn", "factor": 4.0}
    before = copy.deepcopy(configs(plan)[0])
    del before["text_config"]["rope_parameters"]
    before["text_config"] |= {"rope_theta": 10_000.0, "rope_scaling": rope}
    after = limited(before, 32, OF)
    assert "rope_scaling" not in after["text_config"]
    assert after["text_config"]["max_position_embeddings"] == 32
    assert all(map(torch.equal, rotations(after), rotations(before)))


SPLIT = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 16}
EVERYWHERE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # a source, its result's size
    "as many positions": ("llama", {"max_position_embeddings": 32}, {}),
    "the whole RoPE": ("llama", {}, {"qk_rope_head_dim": 32}),
    "the whole RoPE of a part": ("phi", {"partial_rotary_factor": 0.5}, {"qk_rope_head_dim": 16}),
    "no RoPE": ("gpt2", {}, {"qk_rope_head_dim": 0}),
    "no layer sees more": ("mistral", {"sliding_window": 32}, {}),
}
BEYOND: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "less RoPE": ("llama", {}, {}),
    "less RoPE of a part": ("phi", {"partial_rotary_factor": 0.5}, {"qk_rope_head_dim": 8}),
    "a layer sees one more": ("mistral", {"sliding_window": 33}, {}),
    "RoPE of each kind of layer": ("gemma3_text", SPLIT, {}),
}


@pytest.mark.parametrize("case", [*EVERYWHERE, *BEYOND])
def test_a_result_says_where_it_is_calibrated_for_less(case: str, source: Sources, output: Output) -> None:
    model_type, changes, size = (EVERYWHERE | BEYOND)[case]
    plan = planned(source(model_type, **changes), output, TEXT, **size)
    assert plan.calibrated == (None if case in EVERYWHERE else Calibrated(32, OF, 32))
    assert plan.as_dict()["calibrated_positions"] == (32 if case in BEYOND else None)
    if plan.calibrated:
        assert str(plan.calibrated).startswith("calibrated for 32 of its source's 128 positions: ")
    kept = Calibrated(32, OF, OF)
    assert str(kept).endswith("RoPE depends on max_position_embeddings, which stays 128: give engines 32")
    assert Calibrated.read(kept.as_dict()) == kept


def test_heads_and_models_around_a_decoder(source: Sources, output: Output) -> None:
    """Fewer heads keep all of their RoPE; a decoder inside another model has the number."""
    heads = grouped(source(), output, method="aligned", text=TEXT)
    assert heads.calibrated is None
    assert heads.config(None) == heads.plain_config(None)
    inner, limited_inner = configs(planned(source(max_position_embeddings=OF), output))
    around = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    assert limited({**around, "text_config": inner}, 32, OF) == {**around, "text_config": limited_inner}


def test_the_longest_context_counts_and_without_text_the_assumed_one(source: Sources, output: Output) -> None:
    made = source(max_position_embeddings=4096)
    assert planned(made, output, replace(TEXT, max_context=100)).calibrated == Calibrated(100, 4096, 100)
    skipping = replace(TEXT, max_context=None)
    assert planned(made, output, skipping).calibrated is None, "positions skip up to all that there are"
    assert planned(made, output, CalibrationOptions(texts_of("self", None))).calibrated is None
    assert planned(made, output, CalibrationOptions(no_text=True)).calibrated == Calibrated(2048, 4096, 2048)
    assert planned(made, output, skipping, "pca", qk_rope_head_dim=8).calibrated == Calibrated(32, 4096, 32)
