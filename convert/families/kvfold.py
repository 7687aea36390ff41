"""The layout of kvfold's class (`attention.models`): another family inside, and grouped or latent projections in its layers.

Sources with QK-norm or a clamp keep their projections and norms, and have shared heads or the latent behind them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from attention.models import MODEL_TYPE
from attention.record import Attention, Record
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families.base import Family, Traits
from convert.families.names import NameTable
from convert.families.projections import NAMES, join_factors, join_heads, join_projections, or_zeros

if TYPE_CHECKING:
    import torch

# What is behind a source's projections: maps of each head's queries, in place of those here, and shared heads.
_OF_HEADS = "q_head_proj.weight"
_BEHIND = ("q_proj", "k_head_proj", "v_head_proj", "o_proj")
_PREFIX = "model."  # of the source's class


def around(inner: Family, config: Any = None) -> KvfoldProjections:
    """The family of kvfold's class around the class of another family, which reads the `text_config` of the config."""
    if config is not None:
        stock = copy.copy(config.text_config)
        vars(stock).pop("kv_lora_rank", None)  # the sizes of a latent, which a stock class ignores
        inner = inner.of(stock)
    return KvfoldProjections(
        MODEL_TYPE,
        config=config,
        names=NameTable([replace(row, name=_PREFIX + row.name) for row in inner.names.rows]),
        attention_path=_PREFIX + inner.attention_path,
        computed=inner.computed,
        is_row=inner.is_row,
        shares_heads=False,  # not by a key of config.json that other software reads
        inner=inner,
    )


@dataclass(frozen=True)
class KvfoldProjections(Family):
    """`{q,k,v,o}_proj`, or a latent's projections as DeepSeek names them, where the attention of another family was.

    All else, also the attention of layers that are kept, has that family's names behind `model.` (`around`).

    Attributes:
        inner: The other family.
    """

    layout: ClassVar[str] = "kvfold's class"
    needs_code: ClassVar[bool] = True
    inner: Family

    def of(self, config: Any) -> Family:
        return around(self.inner, config)

    @property
    def unreadable(self) -> str | None:
        return self.inner.unreadable

    def beside(self, name: str) -> str | None:
        kept = self.inner.beside(name)
        return None if kept is None else _PREFIX + kept

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Those of the class's own attention, without weights."""
        if layer in self._kept:
            return {_PREFIX + name: shape for name, shape in self.inner.shapes(layer).items()}
        import torch

        from attention.models.modeling_kvfold import GroupedAttention, KvfoldLatentAttention

        with torch.device("meta"):
            attention = (KvfoldLatentAttention if self.spec.kv_lora_rank else GroupedAttention)(self.config, layer)
        return {f"{self.module(layer)}.{name}": tuple(tensor.shape) for name, tensor in attention.named_parameters()}

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        if layer in spec.kept:
            assert isinstance(record, Attention), "a source has heads"
            source = AttentionSpec(spec.num_layers, spec.num_heads, spec.kept_kv_heads, spec.head_dim, windows=spec.windows)
            return {_PREFIX + name: tensor for name, tensor in self.inner.join(record, source, layer).items()}
        rank = spec.kv_lora_rank or 0
        if isinstance(record, Attention):
            behind = record.projections is not None
            local = join_projections(record.paired("half") if behind else record, _BEHIND if behind else NAMES)
        else:
            import torch

            assert record.q_down is None, "the class has no latent of queries"
            a = record.paired("half")  # pairs of rotary dims are P/2 dims apart
            local = join_factors(a, rank) | {"o_proj.bias": or_zeros(a.o_bias, a.o[:, 0, 0])}
            if "q_proj.bias" in local and len(a.k_rope):
                of_key = or_zeros(a.k_rope_bias, a.k_rope[:, 0])
                local["kv_a_proj_with_mqa.bias"] = torch.nn.functional.pad(of_key, (rank, 0))
        if record.projections is not None:
            local[_OF_HEADS] = local.pop("q_proj.weight").unflatten(0, (spec.num_heads, -1))
            local |= _join_projected(record.projections.source)
        return {f"{self.module(layer)}.{name}": tensor for name, tensor in local.items()}

    def dtypes(self, tensors: Mapping[str, torch.Tensor], source: Family, layer: int) -> dict[str, torch.dtype]:
        record = source.split(tensors, layer)
        assert isinstance(record, Attention), "a source has heads"
        if layer in self._kept:
            return {name: tensor.dtype for name, tensor in self.join(record, self.spec, layer).items()}
        local = {**_join_projected(record), "o_proj.weight": record.o, "o_proj.bias": record.o_bias}
        return {f"{self.module(layer)}.{name}": tensor.dtype for name, tensor in local.items() if tensor is not None}

    @property
    def _kept(self) -> Collection[int]:
        return (self.config.kept_layers if self.config else None) or ()  # none is known without a config

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, qkv_bias=self.config.qkv_bias, o_bias=self.config.o_bias)

    def rotary(self, layer: int) -> Rotary | None:
        own = self.inner.rotary(layer)
        if not self.config.rope_pairs:
            return replace(own, pairing="half") if own and self.needs_projections else own
        rotary = own or self.inner.first_rotary  # every layer has a RoPE key, also those that had no RoPE: it is zero there
        assert rotary is not None, "pairs are of some layer's frequencies"
        return rotary.select(self.config.rope_pairs, "half")

    @property
    def needs_projections(self) -> bool:
        return self.config.qk_norm is not None or self.config.clip_qkv is not None

    @property
    def scale(self) -> float:
        return float(self.config.scaling)


def _join_projected(a: Attention) -> dict[str, torch.Tensor]:
    """Projections and their norms."""
    local = join_heads(a)
    for name, norm in (("q_norm", a.q_norm), ("k_norm", a.k_norm)):
        if norm is not None:
            local |= {f"{name}.weight": norm.gain, **({} if norm.bias is None else {f"{name}.bias": norm.bias})}
    return local
