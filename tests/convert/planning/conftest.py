"""Checkpoints of which there is no more than a config: a plan reads no weights."""

from pathlib import Path
from typing import Any

import pytest
from plans import Sources
from tiny import save_tokenizer, tiny_config

from convert.output.destination import Output
from eval.inputs.source import Source


@pytest.fixture
def source(tmp_path: Path) -> Sources:
    """`source("llama", dtype="bfloat16", num_attention_heads=4)`: a config and a tokenizer."""

    def make(model_type: str = "llama", dtype: str = "float32", **changes: Any) -> Source:
        config = tiny_config(model_type, **changes)
        config.dtype = dtype
        path = tmp_path / "source"
        config.save_pretrained(path)
        save_tokenizer(path)
        return Source.parse(str(path))

    return make


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(tmp_path / "out")
