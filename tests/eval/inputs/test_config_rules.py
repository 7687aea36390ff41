"""Values of a config.json that are refused before anything is computed from them, and real ones, which never are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config
from tiny_mla import LONGROPE, SIZES

from attention.errors import Refusal
from convert.families import FAMILIES
from eval.inputs.source import Source

Read = Callable[..., Any]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LAYERS = "it must be an integer from 1 to 2,048"


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The config that `Source` makes of a config.json."""

    def run(values: dict[str, Any] | str | bytes) -> Any:
        text = json.dumps(values) if isinstance(values, dict) else values
        (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
        return Source.parse(str(tmp_path)).config

    return run


def values_of(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    return json.loads(tiny_config(model_type).to_json_string(use_diff=False)) | changes


def refusal(read: Read, values: dict[str, Any] | str | bytes) -> str:
    with pytest.raises(Refusal) as caught:
        read(values)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    assert caught.value.exit_code == 2
    return message


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", -1, f"num_hidden_layers is -1; {LAYERS}"),
        ("num_hidden_layers", 0, f"num_hidden_layers is 0; {LAYERS}"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; it must be at most 2,048"),
        ("num_hidden_layers", 10**60, "it must be at most 2,048"),
        ("num_hidden_layers", math.inf, "num_hidden_layers is inf; it must be at most 2,048"),
        ("num_hidden_layers", 3.0, f"num_hidden_layers is 3.0; {LAYERS}"),
        ("num_hidden_layers", "3", f"num_hidden_layers is '3'; {LAYERS}"),
        ("num_hidden_layers", [3], f"num_hidden_layers is [3]; {LAYERS}"),
        ("num_hidden_layers", {"a": 3}, f"num_hidden_layers is {{'a': 3}}; {LAYERS}"),
        ("num_hidden_layers", True, f"num_hidden_layers is true; {LAYERS}"),
        ("n_layer", 10**9, "n_layer is 1000000000; it must be at most 2,048"),
        ("num_labels", 10**9, "num_labels is 1000000000; it must be at most 1,000,000"),
        ("num_attention_heads", -8, "num_attention_heads is -8; it must be an integer from 1 to 65,536"),
        ("num_attention_heads", [8, True], "num_attention_heads is [8, True]; it must be"),
        ("num_key_value_heads", 0, "num_key_value_heads is 0; it must be"),
        ("hidden_size", 0, "hidden_size is 0; it must be an integer from 1 to 1,048,576"),
        ("hidden_size", 2**24, "hidden_size is 16777216; it must be"),
        ("intermediate_size", -32, "intermediate_size is -32; it must be"),
        ("vocab_size", 0, "vocab_size is 0; it must be"),
        ("head_dim", 0, "head_dim is 0; it must be"),
        ("rotary_dim", 2**40, "rotary_dim is 1099511627776; it must be an integer from 0 to 65,536"),
        ("max_position_embeddings", -1, "max_position_embeddings is -1; it must be"),
        ("max_position_embeddings", "128", "max_position_embeddings is '128'; it must be"),
        ("rms_norm_eps", math.nan, "rms_norm_eps is nan; it must be a number from 0 to 1"),
        ("rms_norm_eps", -1e-6, "rms_norm_eps is -1e-06; it must be"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6'; it must be"),
        ("initializer_range", -0.02, "initializer_range is -0.02; it must be"),
        ("attention_dropout", 2, "attention_dropout is 2; it must be a number from 0 to 1"),
        ("sliding_window", -1, "sliding_window is -1; it must be"),
        ("sliding_window", "none", "sliding_window is 'none'; it must be"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no'; it must be true or false"),
        ("tie_word_embeddings", 0, "tie_word_embeddings is 0; it must be true or false"),
        ("dtype", "int3", "dtype is 'int3'; it must be the name of a float dtype"),
        ("dtype", "nn", "dtype is 'nn'; it must be the name of a float dtype"),
        ("torch_dtype", 16, "torch_dtype is 16; it must be the name of a float dtype"),
        ("text_config", 5, "text_config is 5; it must be an object"),
        ("auto_map", 5, "auto_map is 5; it must be an object"),
        ("text_config", {"num_hidden_layers": -1}, f"text_config.num_hidden_layers is -1; {LAYERS}"),
        ("vision_config", {"num_hidden_layers": 10**9}, "vision_config.num_hidden_layers is 1000000000; it must be at most"),
        ("layer_types", 5, "layer_types is 5; it must be a list of strings, one for each layer"),
        ("layer_types", [1, 2, 3], "layer_types is [1, 2, 3]; it must be a list of strings"),
        ("layer_types", ["sliding_attention"] * 3, "it must be left out: LlamaConfig of transformers does not know it"),
        ("layer_types", ["linear_attention", *["full_attention"] * 2], "it must be left out: LlamaConfig of transformers"),
        ("sliding_window", 16, "sliding_window is 16; it must be left out: LlamaConfig of transformers does not know it"),
        ("attention_chunk_size", 16, "attention_chunk_size is 16; it must be left out"),
        ("return_dict", False, "return_dict is false; it must be true"),
        ("transformers_weights", "step.safetensors", "transformers_weights is 'step.safetensors'; it must be left out"),
        ("rope_theta", 0, "rope_theta is 0; it must be a number from 1 to 1e+30"),
        ("rope_theta", "10000", "rope_theta is '10000'; it must be"),
        ("rope_parameters", 5, "rope_parameters is 5; it must be an object"),
        ("rope_scaling", [], "rope_scaling is []; it must be an object"),
        ("rope_scaling", {"type": 5}, "rope_scaling.type is 5; it must be a string"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused(key: str, value: Any, said: str, read: Read) -> None:
    assert said in refusal(read, values_of(**{key: value}))


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"rope_theta": 0}, "rope_parameters.rope_theta is 0; it must be"),
        ({"rope_theta": -1}, "rope_parameters.rope_theta is -1; it must be"),
        ({"rope_theta": math.nan}, "rope_parameters.rope_theta is nan; it must be"),
        ({"rope_theta": None}, "rope_parameters.rope_theta is null; it must be"),
        ({"partial_rotary_factor": 2}, "rope_parameters.partial_rotary_factor is 2; it must be a number above 0 and up to 1"),
        ({"full_attention": {"rope_theta": "high"}}, "rope_parameters.full_attention.rope_theta is 'high'; it must be"),
        ({"rope_type": "ntk", "factor": 2.0}, "rope_parameters.rope_type is 'ntk'; it must be one of transformers' (default, "),
        ({"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_parameters.rope_type is 'mrope'; it must be one of"),
        (
            {"type": "su", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
            "type is 'su'; it must be longrope, as it is called now",
        ),
        ({"rope_type": "linear"}, "'factor'"),
        ({"rope_type": "linear", "factor": 0}, "rope_parameters.factor is 0; it must be a number above 0"),
        ({"rope_type": "linear", "factor": None}, "rope_parameters.factor is null; it must be a number above 0"),
        (dict.fromkeys(LLAMA3, 0) | {"rope_type": "llama3"}, "rope_parameters.factor is 0; it must be a number above 0"),
        (LLAMA3 | {"low_freq_factor": 0}, "rope_parameters.low_freq_factor is 0; it must be a number above 0"),
        (LLAMA3 | {"high_freq_factor": 1}, "high_freq_factor is 1; it must be above low_freq_factor, which is 1"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0; it must be"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}, "rope_theta is 1; it must be above 1 where rope_type is yarn"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}, "rope_parameters.beta_fast is -1; it must be"),
        (LONGROPE | {"short_factor": [1.0]}, "a list of 4 factors for 8 rotary dims, and has 1"),
        (LONGROPE | {"long_factor": [1.0] * 5}, "a list of 4 factors for 8 rotary dims, and has 5"),
        (LONGROPE | {"long_factor": [1.0, 0, 1, 1]}, "long_factor is [1.0, 0, 1, 1]; it must be a list of numbers above 0"),
        (LONGROPE | {"short_factor": "1, 2"}, "short_factor is '1, 2'; it must be a list of numbers above 0"),
    ],
    ids=str,
)
def test_rope_parameters_that_break_a_rule_are_refused(parameters: dict[str, Any], said: str, read: Read) -> None:
    assert said in refusal(read, values_of(rope_parameters={"rope_theta": 1e4} | parameters))


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("llama", {"pad_token_id": 331}, "pad_token_id is 331; it must be below vocab_size, which is 331"),
        ("llama", {"pad_token_id": -332}, "pad_token_id is -332; it must be below"),
        ("qwen2", {"head_dim": None, "num_attention_heads": 65}, "num_attention_heads is 65; it must be at most hidden_size"),
        ("llama", {"hidden_act": "swoosh"}, "hidden_act is 'swoosh'; it must be one of transformers' activations ("),
        ("gptj", {"activation_function": "swoosh"}, "activation_function is 'swoosh'; it must be one of"),
        ("falcon", {"activation": "swoosh"}, "activation is 'swoosh'; it must be one of"),
        ("gemma2", {"hidden_activation": "swoosh"}, "hidden_activation is 'swoosh'; it must be one of"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be an integer above 0, or null"),
        (
            "qwen2",
            {"layer_types": ["full_attention"] * 2},
            "`num_hidden_layers` (3) must be equal to the number of",
        ),
        ("qwen2", {"layer_types": ["nonsense"] * 3}, "The `layer_types` entries must be in"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is [1]; it must be a list of num_hidden_layers = 3 entries"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number above 0"),
        ("llama", {"kv_lora_rank": 4}, "kv_lora_rank is 4; it must be left out: model type 'llama' has no latent attention"),
        ("deepseek_v3", {"v_head_dim": None}, "v_head_dim is null; it must be above 0 where kv_lora_rank is "),
        ("deepseek_v3", {"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0; it must be above 0 where kv_lora_rank is "),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be an integer from 1 to 1,048,576"),
        ("deepseek_v3", {"kv_lora_rank": -1}, "kv_lora_rank is -1; it must be"),
        ("gpt2", {"n_embd": -1}, "hidden_size is -1"),
        ("llama", {"text_config": {"hidden_size": 4}}, "has a text config that model type 'llama' does not read"),
        ("llama", {"decoder": 5, "generator": 6}, "Multiple valid text configs were found"),
        (
            "llama",
            {"get_text_config": 5},
            "has a key 'get_text_config', which is not a setting: LlamaConfig of",
        ),
        ("falcon", {"num_attention_heads": None, "n_head": 8}, "says n_head, which FalconConfig of transformers calls num_att"),
        (
            "falcon",
            {"num_kv_heads": None, "n_head_kv": 4},
            "says n_head_kv, which FalconConfig of transformers calls num_kv_heads",
        ),
        ("llama", {"is_heterogeneous": 1}, "has a key 'is_heterogeneous', which is not a setting"),
        ("llama", {"attribute_map": {}}, "has a key 'attribute_map', which is not a setting"),
        ("llama", {"__dict__": {}}, "has a key '__dict__', which is not a setting"),
    ],
    ids=str,
)
def test_values_that_do_not_fit_each_other_or_their_class_are_refused(
    model_type: str, changes: dict[str, Any], said: str, read: Read
) -> None:
    values = values_of(model_type, **changes) if model_type != "gpt2" else {"model_type": "gpt2", **changes}
    assert said in refusal(read, values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a":' * 5000 + "1" + "}" * 5000, "maximum recursion depth exceeded"),
        ('{"model_type": "llama", "a": ' + "[" * 40 + "]" * 40 + "}", "nests values more than 32 deep"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"model_type": "llama", "hidden_size": 1e400}', "hidden_size is inf; it must be"),
        ('{"model_type": "llama", "a": "' + "x" * 2**26 + '"}', "a config has at most 67,108,864"),
        ('{"model_type": null}', "names no model_type"),
    ],
    ids=["5000 objects", "40 lists", "5000 digits", "1e400", "64 MiB", "null"],
)
def test_json_that_no_config_looks_like_is_refused(text: str, said: str, read: Read) -> None:
    assert said in refusal(read, text)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_accepted(name: str, read: Read) -> None:
    from transformers import AutoConfig

    for config in (tiny_config(name), AutoConfig.for_model(name)):
        for use_diff in (False, True):
            assert read(config.to_json_string(use_diff=use_diff)).model_type == name
            assert read(config.to_json_string(use_diff=use_diff)).num_hidden_layers == config.num_hidden_layers


@pytest.mark.parametrize(
    "changes",
    [
        {"pad_token_id": -1},  # the first Llama checkpoints
        {"pad_token_id": None},
        {"torch_dtype": "float16", "dtype": None},
        {"sliding_window": None, "rope_scaling": None},
        {"rope_parameters": None, "rope_theta": 5e5},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_parameters": LONGROPE},
        {"num_key_value_heads": None, "head_dim": None},
        {"kv_lora_rank": None, "qk_rope_head_dim": 0, "v_head_dim": 0},
        {"quantization_config": None, "vision_config": {"num_attention_heads": [1, 2], "hidden_size": 0}},
    ],
    ids=str,
)
def test_what_real_configs_say_is_accepted(changes: dict[str, Any], read: Read) -> None:
    assert read(values_of(**changes)).hidden_size == 64


@pytest.mark.parametrize("window", [0, None, 4096])
def test_a_window_that_is_switched_off_may_be_anything(window: int | None, read: Read) -> None:
    read(values_of("qwen2_moe", use_sliding_window=False, sliding_window=window))


def test_padding_beyond_the_vocabulary_matters_only_where_a_class_reads_it(read: Read) -> None:
    assert read({"model_type": "gpt2", "pad_token_id": 50257}).vocab_size == 50257


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": LONGROPE}], ids=["default", "longrope"])
def test_latent_attention_is_accepted(rope: dict[str, Any], read: Read) -> None:
    assert read(tiny_config("deepseek_v3", **SIZES, **rope).to_json_string()).kv_lora_rank == SIZES["kv_lora_rank"]


def test_infinity_is_read_as_transformers_writes_it(read: Read) -> None:
    from transformers import AutoConfig

    text = AutoConfig.for_model("mamba2").to_json_string(use_diff=False)
    assert '"__float__": "Infinity"' in text
    assert read(text).time_step_limit[1] == math.inf


def test_real_checkpoints_are_accepted(shared: Path) -> None:
    for path in sorted((shared / "checkpoints").glob("*/config.json")):
        assert Source.parse(str(path.parent)).config.num_hidden_layers
