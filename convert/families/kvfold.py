"""The layout of kvfold's class (`attention.models`): another family inside, with separate projections in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attention.models import MODEL_TYPE
from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.families.base import Family, Traits
from convert.families.names import NameTable, Row
from convert.families.projections import join_projections, projection_shapes, split_projections

if TYPE_CHECKING:
    import torch

    from attention.rope import Rotary

_PREFIX = "model."  # of the source's class


class KvfoldProjections(Family):
    """`{q,k,v,o}_proj` where the attention of another family was; all else has that family's names behind `model.`.

    Args:
        inner: The other family, which reads the `text_config` of a config.
    """

    model_type = MODEL_TYPE
    layout = "separate projections in kvfold's class"
    shares_heads = False  # not by a key of config.json that other software reads
    needs_code = True

    def __init__(self, inner: Family) -> None:
        self.inner = inner
        self.names = NameTable([Row(_PREFIX + row.path, row.roles, row.transposed) for row in inner.names.rows])
        self.attention_path = _PREFIX + inner.attention_path
        self.gain_offset, self.computed = inner.gain_offset, inner.computed

    def unreadable(self, config: Any) -> str | None:
        return self.inner.unreadable(config.text_config)

    def shapes(self, config: Any, layer: int) -> dict[str, tuple[int, ...]]:
        shapes = projection_shapes(self.spec(config), config.text_config.hidden_size, config.qkv_bias, config.o_bias)
        return {f"{self.module(layer)}.{name}": shape for name, shape in shapes.items()}

    def split(self, tensors: Mapping[str, torch.Tensor], config: Any, layer: int) -> Attention:
        prefix = f"{self.module(layer)}."
        local = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return split_projections(local, self.spec(config).head_dim, self.scale(config), self.rotary(config, layer))

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        assert isinstance(record, Attention), "a latent has no projections of keys and values"
        return {f"{self.module(layer)}.{name}": tensor for name, tensor in join_projections(record).items()}

    def traits(self, config: Any) -> Traits:
        return self.inner.traits(config.text_config)

    def rotary(self, config: Any, layer: int) -> Rotary | None:
        return self.inner.rotary(config.text_config, layer)

    def scale(self, config: Any) -> float:
        return float(config.scaling)
