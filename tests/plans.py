"""Plans of conversions on a CPU, without text unless one is given."""

from collections.abc import Callable
from typing import Any

from convert.methods import load_grouped, load_latent
from convert.output.destination import Output
from convert.planning.base import Plan, Request
from convert.planning.calibration import CalibrationOptions
from convert.planning.plans import plan_grouped, plan_latent
from convert.planning.sizes import LatentSize
from convert.planning.texts import texts_of
from eval.inputs.source import Source

# `source("llama", num_attention_heads=4)`, a fixture of planning/conftest.py.
Sources = Callable[..., Source]
TEXT = CalibrationOptions(texts_of("some.txt", None))  # which nobody reads


def request(source: Source, output: Output, text: CalibrationOptions | None = None, seed: int = 0, **given: Any) -> Request:
    return Request(source, output, text or CalibrationOptions(), device="cpu", seed=seed, **given)


def grouped(
    source: Source,
    output: Output,
    groups: int = 2,
    command: str = "gqa",
    method: str = "mean",
    text: CalibrationOptions | None = None,
    seed: int = 0,
    **given: Any,
) -> Plan:
    """To fewer heads."""
    return plan_grouped(request(source, output, text, seed, **given), command, groups, load_grouped(method))


def factored(
    source: Source, output: Output, method: str = "svd", text: CalibrationOptions | None = None, seed: int = 0, **size: Any
) -> Plan:
    """To a latent of a size: `kv_lora_rank=16, qk_rope_head_dim=8`; with layers that stay."""
    layers = {name: size.pop(name) for name in ("keep_layers", "all_layers") if name in size}
    return plan_latent(request(source, output, text, seed, **layers), LatentSize(**size), load_latent(method))
