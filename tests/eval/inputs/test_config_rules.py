"""Values of a config.json that are refused before anything is computed from them, and real ones, which never are."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import ROPES, tiny_config
from tiny_mla import LONGROPE, SIZES
from transformers import AutoConfig

from attention.errors import Refusal
from convert.families import FAMILIES
from eval.inputs.source import Source

Read = Callable[..., Any]
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


# What a message says, and a config that it is said of: its model type, and what is changed in it.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    f"num_hidden_layers is 0; {LAYERS}": ("llama", {"num_hidden_layers": 0}),
    f"num_hidden_layers is [3]; {LAYERS}": ("llama", {"num_hidden_layers": [3]}),
    f"num_hidden_layers is true; {LAYERS}": ("llama", {"num_hidden_layers": True}),
    f"text_config.num_hidden_layers is -1; {LAYERS}": ("llama", {"text_config": {"num_hidden_layers": -1}}),
    "num_hidden_layers is inf; it must be at most 2,048": ("llama", {"num_hidden_layers": math.inf}),
    "vision_config.num_hidden_layers is 1000000000; it must be at most": (
        "llama",
        {"vision_config": {"num_hidden_layers": 10**9}},
    ),
    "num_labels is 1000000000; it must be at most 1,000,000": ("llama", {"num_labels": 10**9}),
    "num_attention_heads is [8, True]; it must be an integer from 1 to 65,536": ("llama", {"num_attention_heads": [8, True]}),
    "num_attention_heads is 65; it must be at most hidden_size": ("qwen2", {"head_dim": None, "num_attention_heads": 65}),
    "hidden_size is 16777216; it must be an integer from 1 to 1,048,576": ("llama", {"hidden_size": 2**24}),
    "max_position_embeddings is '128'; it must be": ("llama", {"max_position_embeddings": "128"}),
    "sliding_window is 0; it must be an integer above 0, or null": ("mistral", {"sliding_window": 0}),
    "tie_word_embeddings is 'no'; it must be true or false": ("llama", {"tie_word_embeddings": "no"}),
    "dtype is 'int3'; it must be the name of a float dtype": ("llama", {"dtype": "int3"}),
    "rope_scaling is []; it must be an object": ("llama", {"rope_scaling": []}),
    "layer_types is [1, 2, 3]; it must be a list of strings": ("llama", {"layer_types": [1, 2, 3]}),
    "layer_types is ['sliding_attention', 'sliding_attention', 'sliding_attention']; it must be left out: LlamaConfig": (
        "llama",
        {"layer_types": ["sliding_attention"] * 3},
    ),
    "sliding_window is 16; it must be left out: LlamaConfig of transformers does not know": ("llama", {"sliding_window": 16}),
    "return_dict is false; it must be true": ("llama", {"return_dict": False}),
    "transformers_weights is 'step.safetensors'; it must be left out": ("llama", {"transformers_weights": "step.safetensors"}),
    "kv_lora_rank is 4; it must be left out: model type 'llama' has no latent": ("llama", {"kv_lora_rank": 4}),
    "v_head_dim is null; it must be above 0 where kv_lora_rank is ": ("deepseek_v3", {"v_head_dim": None}),
    "has a text config that model type 'llama' does not read": ("llama", {"text_config": {"hidden_size": 4}}),
    "Multiple valid text configs were found": ("llama", {"decoder": 5, "generator": 6}),
    "has a key 'get_text_config', which is not a setting: LlamaConfig of": ("llama", {"get_text_config": 5}),
    "has a key 'is_heterogeneous', which is not a setting": ("llama", {"is_heterogeneous": 1}),
    "says n_head, which FalconConfig of transformers calls num_att": ("falcon", {"num_attention_heads": None, "n_head": 8}),
    # Of these, the class says what is wrong.
    "`num_hidden_layers` (3) must be equal to the number of": ("qwen2", {"layer_types": ["full_attention"] * 2}),
    "'factor'": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_value_that_breaks_a_rule_is_refused(said: str, read: Read) -> None:
    model_type, changes = REFUSED[said]
    assert said in refusal(read, values_of(model_type, **changes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a":' * 5000 + "1" + "}" * 5000, "maximum recursion depth exceeded"),
        ('{"model_type": "llama", "a": ' + "[" * 40 + "]" * 40 + "}", "nests values more than 32 deep"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"model_type": "llama", "hidden_size": 1e400}', "hidden_size is inf; it must be"),
        ('{"model_type": null}', "names no model_type"),
    ],
    ids=["5000 objects", "40 lists", "5000 digits", "1e400", "null"],
)
def test_json_that_no_config_looks_like_is_refused(text: str, said: str, read: Read) -> None:
    assert said in refusal(read, text)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_accepted(name: str, read: Read) -> None:
    for config, use_diff in ((tiny_config(name), True), (AutoConfig.for_model(name), False)):
        found = read(config.to_json_string(use_diff=use_diff))
        assert (found.model_type, found.num_hidden_layers) == (name, config.num_hidden_layers)


REAL: list[dict[str, Any]] = [
    {"pad_token_id": -1},  # the first Llama checkpoints
    {"pad_token_id": None, "torch_dtype": "float16", "dtype": None, "sliding_window": None, "rope_scaling": None},
    {"rope_parameters": None, "rope_theta": 5e5, "num_key_value_heads": None, "head_dim": None},
    {"rope_parameters": ROPES["llama3"] | {"rope_theta": 5e5}},
    {"rope_parameters": LONGROPE},
    {"kv_lora_rank": None, "qk_rope_head_dim": 0, "v_head_dim": 0},
    {"quantization_config": None, "vision_config": {"num_attention_heads": [1, 2], "hidden_size": 0}},
]


def test_what_real_configs_say_is_accepted(read: Read) -> None:
    for changes in REAL:
        assert read(values_of(**changes)).hidden_size == 64
    for window in (0, None, 4096):  # which is switched off
        read(values_of("qwen2_moe", use_sliding_window=False, sliding_window=window))
    for rope in ({}, {"rope_parameters": LONGROPE}):
        assert read(tiny_config("deepseek_v3", **SIZES, **rope).to_json_string()).kv_lora_rank == SIZES["kv_lora_rank"]


def test_infinity_is_read_as_transformers_writes_it(read: Read) -> None:
    text = AutoConfig.for_model("mamba2").to_json_string(use_diff=False)
    assert '"__float__": "Infinity"' in text
    assert read(text).time_step_limit[1] == math.inf
