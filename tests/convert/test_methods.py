"""The registry of methods."""

from __future__ import annotations

import pytest

from convert.methods import GROUPED, LATENT, load_grouped, load_latent


@pytest.mark.parametrize("name", LATENT)
def test_the_registry_names_each_method_of_making_a_latent_by_its_module(name: str) -> None:
    method = load_latent(name)
    assert method.name == name
    assert method.summary
    assert (method.measure is None) == method.folds


@pytest.mark.parametrize("method", GROUPED)
def test_the_registry_names_each_method_of_merging_heads_by_its_module(method: str) -> None:
    found = load_grouped(method)
    assert found.name == method
    assert found.summary
    assert found.source.startswith("arXiv:") or method == "aligned"
