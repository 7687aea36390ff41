"""Which configs are proved before a conversion, and what their refusals say."""

import logging
from typing import Any

import pytest
from tiny import switched, tiny_config
from transformers.models.llama.modeling_llama import LlamaAttention
from written import raising

from attention.errors import Refusal
from convert.families import FAMILIES
from convert.families.reading import family_for, require_proved


@pytest.mark.parametrize("model_type", FAMILIES)
def test_configs_that_the_rows_are_tested_with_need_no_proof(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.families.reading.twin.Twin", lambda config: pytest.fail("a twin is made"))
    for config in (tiny_config(model_type), switched(model_type, True)):
        require_proved(family_for(config))


def test_a_field_that_changes_the_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = LlamaAttention.__init__

    def scaled(self: Any, config: Any, layer_idx: int) -> None:
        built(self, config, layer_idx)
        self.scaling *= getattr(config, "temper", 1.0)

    monkeypatch.setattr(LlamaAttention, "__init__", scaled)
    plain, tempered = tiny_config("llama", mood=3), tiny_config("llama", temper=0.5)
    require_proved(FAMILIES["llama"].of(plain))
    with pytest.raises(Refusal, match="this llama cannot be read: layer 0 computes something else") as refused:
        require_proved(FAMILIES["llama"].of(tempered))
    assert "config.json sets temper" in str(refused.value.hint)


def test_a_class_of_which_no_twin_runs_is_taken_on_the_tests_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("convert.families.reading.twin.Twin", raising(ValueError("no such size")))
    with caplog.at_level(logging.WARNING, "kvfold"):
        require_proved(FAMILIES["llama"].of(tiny_config("llama", mood=3)))
    assert "not proved whether mood change its attention: no such size" in caplog.text
