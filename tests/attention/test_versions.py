"""What versions of transformers differ in: who caps logits, and how layers hand over their cache."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import tiny_config, tiny_model
from tiny_mla import error, logits, mla_model, tokens
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from attention import absorb, latent, load
from attention.errors import Failure
from attention.models import modeling_kvfold
from attention.models.configuration_kvfold import KvfoldConfig
from attention.models.modeling_kvfold import require_decoding, taken_cache
from attention.versions import CACHE, keep_caps


def test_a_model_that_caps_logits_never_attends_through_sdpa() -> None:
    ids = tokens(2, 12)
    model, free = (tiny_model(tiny_config("gemma2", attn_logit_softcapping=cap)) for cap in (0.05, None))
    expected = logits(model, ids)
    assert error(logits(free, ids), expected) > 1e-3
    model.config._attn_implementation = "sdpa"  # as transformers before 5.23 chooses
    assert keep_caps(model) is model
    assert model.config._attn_implementation == "eager"
    assert torch.equal(logits(model, ids), expected)


def test_others_attend_as_transformers_chose(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("llama"))
    model.config._attn_implementation = "sdpa"
    assert keep_caps(model).config._attn_implementation == "sdpa"
    tiny_model(tiny_config("vaultgemma")).save_pretrained(tmp_path)
    assert load(tmp_path).config._attn_implementation == "eager"


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_kvfold, "_TRIED", set())


def with_memory(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
    """The forward of a layer that hands over its cache by a name of its own."""
    given = {"attention_mask": attention_mask, "position_embeddings": kwargs["position_embeddings"]}
    attended, _ = self.self_attn(self.input_layernorm(hidden_states), memory=kwargs.get(CACHE), **given)
    hidden_states = hidden_states + attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


NAMES_MEMORY = re.compile(rf"argument 'memory', which holds the cache.*transformers {re.escape(transformers.__version__)}")


@pytest.mark.usefixtures("untried")
def test_a_cache_of_an_unknown_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = KvfoldConfig(text_config=tiny_config("llama"), attention_path="model.layers.{layer}.self_attn")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", with_memory)
    for opened in (load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises((Failure, TypeError), match=NAMES_MEMORY):
            opened(tmp_path)
    model = AutoModelForCausalLM.from_config(config).eval()
    model(tokens(1, 4), use_cache=False)
    with pytest.raises(TypeError, match=NAMES_MEMORY):  # what is not loaded says so at its first step
        model.generate(tokens(1, 4), max_new_tokens=2)


def test_arguments_that_hold_nothing_are_no_matter() -> None:
    module, cache = torch.nn.Identity(), transformers.DynamicCache()
    given = {"memory": None, "position_ids": tokens(1, 2), "token_type_ids": tokens(1, 2), "layer_past": cache}
    assert taken_cache(module, given) is cache
    assert given.keys() == {"memory", "position_ids", "token_type_ids"}
    with pytest.raises(TypeError, match="argument 'bias', which holds a float"):
        taken_cache(module, {"bias": 1.0})


def absorbed_attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in absorb(model, when="always").model.layers]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("spoilt", "dtype"),
    [("nothing", torch.bfloat16), ("no cache", torch.float32), ("one token less", torch.float32),
     ("another scale", torch.bfloat16)],
)  # fmt: skip
def test_the_trial_finds_what_decodes_otherwise(spoilt: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mla_model(dtype=dtype)
    attentions, before = absorbed_attentions(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kind: Any = type(attentions[0])
    if spoilt == "no cache":
        stock = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: stock(self, *args, **kwargs | {CACHE: None}))
    elif spoilt == "one token less":
        update = transformers.DynamicLayer.update
        monkeypatch.setattr(
            transformers.cache_utils.DynamicLayer, "update", lambda self, k, v, *_, **__: update(self, k[:, :, 1:], v[:, :, 1:])
        )
    elif spoilt == "another scale":
        decode = latent.decode
        monkeypatch.setattr(latent, "decode", lambda q_latent, *rest: decode(q_latent * 1.01, *rest))
    if spoilt == "nothing":
        require_decoding(model, attentions)
    else:
        with pytest.raises((RuntimeError, TypeError)):
            require_decoding(model, attentions)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len(model.model.layers) == model.config.num_hidden_layers


@pytest.mark.usefixtures("untried")
def test_each_class_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = mla_model(), mla_model(seed=1)
    require_decoding(first, absorbed_attentions(first))
    monkeypatch.setattr(second, "forward", None)
    require_decoding(second, absorbed_attentions(second))
