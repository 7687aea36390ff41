"""What output classes cannot hold of a source, each in one line that says why."""

from typing import Any

import pytest
from held import PLAIN, SLIDING
from tiny import ROPES, VOCABULARY, tiny_config

from convert.families import FAMILIES
from convert.hosts import Host, kvfold, source_class
from convert.hosts.latent import DEEPSEEK, PORTABLE
from convert.hosts.sharing import BIGCODE, PHI

DYNAMIC = ROPES["dynamic"]
SHARE = {"num_attention_heads": 4, "hidden_size": 4 * 47, "rotary_dim": 6}  # 47 · (6 / 47) is below 6
PADS = [
    (name, {"pad_token_id": pad}, f"pad_token_id is {pad}, and the class has no embedding")
    for name in sorted(PHI.families)
    for pad in (VOCABULARY, -VOCABULARY - 1)
]
SEED = {"seed_oss": {"attention_bias": False, "attention_out_bias": False}}
# Of latents, or of one KV head: a source, and what is said of it; None if it is held.
LATENTS: dict[Host, list[tuple[str, dict[str, Any], str | None]]] = {
    DEEPSEEK: [
        ("phi", {}, "phi does not have Llama's decoder blocks (the class can hold llama, "),
        ("llama", {"mlp_bias": True}, "the MLP has biases, which the class does not support"),
        ("seed_oss", {"mlp_bias": True, "attention_bias": False}, "the MLP has biases"),
        ("mistral", {"sliding_window": 127},
         "the sliding window of 127 tokens is shorter than the 128 positions, and the class has no window "
         "(for contexts up to 127, set max_position_embeddings to 127 in config.json)"),
        *(("mistral", {"sliding_window": window}, None) for window in (128, 4096, None)),
        ("ministral", {"sliding_window": 64, "layer_types": SLIDING}, "the sliding window of 64 tokens"),
        ("cwm", {"sliding_window": 64, "layer_types": SLIDING}, "the sliding window of 64 tokens"),
        ("phi3", {"original_max_position_embeddings": 32, "rope_parameters": ROPES["longrope"]},
         "its LongRoPE has other frequencies beyond 32 tokens, where its own class computes the cache anew"),
        ("llama", {"rope_parameters": DYNAMIC}, "RoPE of type 'dynamic' has no fixed list of frequencies"),
        ("smollm3", {"no_rope_layers": [0, 0, 0]}, "no layer has RoPE, and the class needs a RoPE key in every layer"),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True}, None),
        *((name, (PLAIN | SEED).get(name, {}), None) for name in DEEPSEEK.families),
    ],
    PORTABLE: [
        ("llama", {"attention_bias": True}, "queries and keys have biases, and the class has none"),
        ("llama", {"rope_parameters": ROPES["llama3"]}, "its RoPE frequencies are not a geometric ladder from 1"),
        ("qwen2", {}, "queries and keys have biases, and the class has none"),
        ("phi", {}, "phi does not have Llama's decoder blocks"),
        ("llama", {"mlp_bias": True}, "the MLP has biases"),
        ("llama", {"hidden_act": "gelu"}, "the MLP's activation is gelu, and engines' own classes compute SiLU"),
    ],
}  # fmt: skip
ONE_HEAD: dict[Host, list[tuple[str, dict[str, Any], str | None]]] = {
    BIGCODE: [
        ("opt", {"enable_bias": False}, "sets enable_bias to False, and the class needs True"),
        ("opt", {"layer_norm_elementwise_affine": False}, "sets layer_norm_elementwise_affine to False"),
        ("opt", {"_remove_final_layer_norm": True}, "sets _remove_final_layer_norm to True"),
        ("opt", {"word_embed_proj_dim": 24}, "sets word_embed_proj_dim to 24, and the class needs 64"),
        ("gpt_neo", {"window_size": 127}, "sets window_size to 127, which the class does not support"),
        ("gpt2", {}, None),
    ],
    PHI: [
        *((name, SHARE, "it has rotary_dim 6, and the class computes 5 from heads of 47 dims") for name in ("codegen", "gptj")),
        *PADS,
        *((name, changes, None) for name in ("codegen", "gptj") for changes in ({}, {"pad_token_id": -1})),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("host", "model_type", "changes", "message"),
    [(host, *row) for table in (LATENTS, ONE_HEAD) for host, rows in table.items() for row in rows],
    ids=lambda value: getattr(value, "name", str(value)[:40]),
)
def test_what_the_class_cannot_compute_is_refused_in_one_line(
    host: Host, model_type: str, changes: dict[str, Any], message: str | None
) -> None:
    family = FAMILIES[model_type].of(tiny_config(model_type, **changes))
    target = family.spec.latent(16, 8) if host in LATENTS else family.spec.grouped(1)
    found = host.refuses(family, target)
    assert (message in found and "\n" not in found) if message and found else found is message
    if host is BIGCODE:
        assert kvfold.HOST.refuses(family, target) is None, "its class does it"


def test_a_class_of_one_kv_head_holds_no_two() -> None:
    family = FAMILIES["gpt2"].of(tiny_config("gpt2"))
    assert "it has one KV head, not 2" in str(BIGCODE.refuses(family, family.spec.grouped(2)))


def test_another_number_of_kv_heads_leaves_the_config_as_it_was() -> None:
    family = FAMILIES["llama"].of(tiny_config("llama", num_key_value_heads=8))
    smaller = source_class.HOST.sized({}, family, family.spec.grouped(2))
    assert (family.config.num_key_value_heads, smaller.num_key_value_heads) == (8, 2)
    assert family.of(smaller).spec == family.spec.grouped(2)
