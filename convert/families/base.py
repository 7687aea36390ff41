"""The base of all families. A family knows what every tensor of a checkpoint is; nothing else in this project does.

It knows no method and no target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from attention import rope
from attention.qk_norm import NormForm
from attention.record import Record, Scoring
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families.names import LLAMA, NameTable, Place

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Traits:
    """Features of a config's attention besides four projections; read from the config, without weights.

    Attributes:
        qkv_bias: Whether Q, K and V have biases.
        o_bias: Whether O has a bias.
        qk_norm: The QK-norm, or None.
        adds_output: Whether a layer continues with the plain sum of its input and its attention's output.
        extra_features: Config fields that are set and make the class do more than the record describes.
        sinks: Whether each head has a sink (`attention.record.Attention`).
    """

    qkv_bias: bool
    o_bias: bool
    qk_norm: NormForm | None = None
    adds_output: bool = True
    extra_features: Mapping[str, Any] = field(default_factory=dict)
    sinks: bool = False

    @property
    def clip(self) -> float | None:
        """The bound that clamps queries, keys and values, behind QK-norm and before RoPE; None without a clamp."""
        return self.extra_features.get(CLIP)

    @property
    def unmodelled(self) -> list[str]:
        """Config fields that make attention differ from what the record's logits and its scoring say."""
        return [field for field in self.extra_features if field not in (*WINDOWS, SOFTCAP)]


# Config fields that say how many tokens some layers see.
WINDOWS = ("sliding_window", "window_size")
SOFTCAP = "attn_logit_softcapping"  # the one that says what logits are capped at
CLIP = "clip_qkv"  # the one that says what queries, keys and values are clamped to


def decoder_of(config: Any) -> Any:
    """The part of a model's config that describes its decoder."""
    return config.get_text_config(decoder=True)


def has_other_models(config: Any) -> bool:
    """Whether a config describes models besides its decoder, such as one that sees."""
    from transformers import PreTrainedConfig

    return decoder_of(config) is not config or any(isinstance(part, PreTrainedConfig) for part in vars(config).values())


@dataclass(frozen=True)
class Family(ABC):
    """How the checkpoints of one model type store its attention; of one config, once it is bound to that (`of`).

    A layout defines `shapes`, `join`, and `split` if it is converted; all else comes from the config, and is overridden where
    a class differs from Llama. Of these, `join(split(x)) == x`, bit for bit.

    Attributes:
        model_type: As in config.json.
        config: What it is bound to; None if it is not, and only `join` and what is below can be asked.
        layout: How the file stores the projections, for display: "separate projections".
        has_heads: Whether it has KV heads; a latent has none.
        needs_code: Whether its class is kvfold's own, whose code comes with every checkpoint.
        names: Every tensor that a checkpoint may hold besides those of its attentions.
        rope_stride: How many columns of the class's cosines and sines lie between one frequency and the next.
        without_latent: Why no latent can take the place of its attention, whatever the config; None if one can.
        restarts_cache: Whether generation computes the cache anew where LongRoPE changes its frequencies.
        shares_heads: Whether its own class can share KV heads (`num_key_value_heads`); some ignore that key.
        is_row: Whether it is a row of the registry: results were tried in engines, and tables say the roles of all tensors. Of
            what experiments found, tensors keep their names.
        attention_path: Where a layer's attention module is, with `{layer}` for its number; its parent is the decoder layer.
        base: The name of the base model in the class, if there are checkpoints of the base model alone, whose names lack it;
            else "".
        computed: Ends of the names of tensors that the class computes itself, and that checkpoints may hold.
        path: Where the decoder is in a model around it, such as one that sees; "" if the decoder is the model.
    """

    layout: ClassVar[str]
    has_heads: ClassVar[bool] = True
    needs_code: ClassVar[bool] = False

    model_type: str
    _: KW_ONLY
    config: Any = field(default=None, compare=False, repr=False)
    names: NameTable = LLAMA
    rope_stride: int = 1
    without_latent: str | None = None
    restarts_cache: bool = False
    shares_heads: bool = True
    is_row: bool = True
    attention_path: str = "model.layers.{layer}.self_attn"
    base: str = ""
    computed: tuple[str, ...] = ("inv_freq",)
    path: str = ""

    def of(self, config: Any) -> Family:
        """The family of checkpoints with this config, bound to it."""
        return replace(self, config=config)

    def inside(self, path: str, config: Any) -> Family:
        """The family of such a decoder at that path in a model of this config, of which the decoder's config is a part."""
        root = self.attention_path.partition(".layers.")[0]

        def moved(name: str) -> str:
            return path + name.removeprefix(root) if name.startswith(f"{root}.") else name

        return replace(
            self,
            model_type=config.model_type,
            config=config,
            names=NameTable([replace(row, name=moved(row.name)) for row in self.names.rows]),
            is_row=False,
            attention_path=moved(self.attention_path),
            base="",
            path=path,
        )

    @cached_property
    def decoder(self) -> Any:
        """The part of its config that describes the decoder."""
        return decoder_of(self.config)

    @abstractmethod
    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the layer's attention, by its name in the checkpoint."""

    def split(self, tensors: Mapping[str, torch.Tensor], layer: int) -> Record:
        """The record of a layer, as views of `tensors`, which have the names that `shapes` gives."""
        raise AssertionError(f"{self.layout} are not converted again")

    @abstractmethod
    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        """The inverse of `split`, for a record of any size.

        Args:
            record: The attention to write.
            spec: Its sizes, as config.json will state them.
            layer: The index of the layer.
        """

    def dtypes(self, tensors: Mapping[str, torch.Tensor], source: Family, layer: int) -> dict[str, torch.dtype]:
        """The dtypes of a layer by the names that its tensors, or those that hold the same in this layout, have here.

        Args:
            tensors: Those of the source's attention by name; only their shapes and dtypes are read.
            source: The source's family.
            layer: The index of the layer.
        """
        return {name: tensor.dtype for name, tensor in tensors.items()}

    def renamed(self, stored: Collection[str]) -> dict[str, str]:
        """The names of tensors by their names in a checkpoint, where these differ: where the base model was saved alone."""
        if not self.base or any(name.startswith(f"{self.base}.") for name in stored):
            return {}
        return {name: f"{self.base}.{name}" for name in stored if self.names.place(name) is None}

    def beside(self, name: str) -> str | None:
        """The name that a tensor keeps here whose role no table of the source's says; None if it has no place here."""
        return None if self.is_row else name

    @property
    def folded(self) -> tuple[str, ...]:
        """Config fields whose effect is in the weights of records, so that results do not have them."""
        return ()

    def unshared(self, spec: AttentionSpec) -> str | None:
        """Why its own class cannot share KV heads as `spec` says, or None if it can."""
        return None if self.shares_heads else f"{self.model_type} ignores num_key_value_heads, so its heads cannot share"

    def sharing(self, spec: AttentionSpec) -> dict[str, Any]:
        """The fields by which a config of its own class has the KV heads of `spec`."""
        # Both are written even if they equal a default, since defaults differ between classes and engines.
        return {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim}

    @property
    def unreadable(self) -> str | None:
        """Why checkpoints of this type with this config cannot be read, or None if they can."""
        return None

    @property
    def spec(self) -> AttentionSpec:
        """The sizes of its attention."""
        return AttentionSpec.from_config(self.config)

    @property
    def class_kv_heads(self) -> int:
        """How many KV heads its class has, if it ignores `num_key_value_heads`."""
        return int(self.decoder.num_attention_heads)

    @property
    def traits(self) -> Traits:
        """Features of its attention besides projections; output classes accept or refuse it by these."""
        return Traits(qkv_bias=False, o_bias=False)

    def rotary(self, layer: int) -> Rotary | None:
        """How the layer's queries and keys rotate with position, or None if they do not."""
        return rope.from_config(self.decoder, self.spec.head_dim)

    @cached_property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """As `rotary`, of each layer."""
        return tuple(self.rotary(layer) for layer in range(self.spec.num_layers))

    @property
    def first_rotary(self) -> Rotary | None:
        """How the first layer that has RoPE rotates; None if none has."""
        return next(filter(None, self.rotaries), None)

    def inner_window(self, layer: int) -> int | None:
        """How many tokens a layer sees, if its class has that window inside its attention, so that its masks lack it."""
        return None

    @property
    def scale(self) -> float:
        """The factor of the logits before the softmax."""
        return float(self.spec.key_dim**-0.5)

    @property
    def slopes(self) -> tuple[float, ...] | None:
        """ALiBi's slope of each query head, or None without ALiBi."""
        return None

    def window(self, layer: int) -> int | None:
        """How many tokens a layer sees, itself included, by its class's masks or inside its attention; None for all."""
        if (window := self.traits.extra_features.get("sliding_window")) is None:
            return self.inner_window(layer)
        known = "layer_types" in type(self.decoder).__dataclass_fields__  # else it is a stray key
        kinds = self.decoder.layer_types if known else None
        return int(window) if kinds is None or kinds[layer] == "sliding_attention" else None

    @property
    def skips(self) -> bool:
        """Whether positions may skip within a text: they only turn RoPE, by angles that do not depend on the text's length."""
        rotary, layers = self.first_rotary, range(self.spec.num_layers)
        if rotary is None or self.spec.windows is not None or self.traits.unmodelled:
            return False
        parameters = getattr(self.decoder, "rope_parameters", None) or {}
        kinds = {part.get("rope_type") for part in (parameters, *parameters.values()) if isinstance(part, dict)}
        long = rotary.long_frequencies
        by_length = "dynamic" in kinds or (long is not None and not long.equal(rotary.frequencies))
        return not by_length and all(self.window(layer) is None for layer in layers)

    def scoring(self, layer: int) -> Scoring:
        """Changes to the layer's scaled logits."""
        return Scoring(self.slopes, self.window(layer), self.traits.extra_features.get(SOFTCAP))

    def latent_dims(self, rope_dim: int) -> int:
        """Dims of nope keys and of values, summed, that a latent has to hold if `rope_dim` rotary dims are kept.

        If some layers have no RoPE, it is the number of those, whose keys are all in the latent.
        """
        spec = self.spec
        rotary = rope_dim if all(self.rotaries) else 0
        return 2 * spec.num_kv_heads * spec.head_dim - rotary

    @property
    def needs_projections(self) -> bool:
        """Whether a latent reads `attention.record.HeadProjections`: nothing can be mixed across a norm or a clamp."""
        traits = self.traits
        return traits.qk_norm is not None or traits.clip is not None

    def describe(self) -> dict[str, Any]:
        """The facts about its config that `convert inspect` prints, read without weights."""
        traits = self.traits
        rotary = self.first_rotary
        parameters = getattr(self.decoder, "rope_parameters", None) or {"rope_type": "default"}
        return {
            "qkv_bias": traits.qkv_bias,
            "o_bias": traits.o_bias,
            "qk_norm": None if traits.qk_norm is None else str(traits.qk_norm),
            "rotary_dims": rotary.dims if rotary else 0,
            "rotary_pairing": rotary.pairing if rotary else None,
            "rope_type": parameters.get("rope_type", "per layer type") if rotary else None,
            "layers_with_rotary": len(list(filter(None, self.rotaries))),
            "alibi": self.slopes is not None,
            "sinks": traits.sinks,
            "softmax_scale": self.scale,
            "also": dict(traits.extra_features),
        }

    def module(self, layer: int) -> str:
        """The path of a layer's attention module; its parent is the decoder layer."""
        return self.attention_path.format(layer=layer)

    def output(self, layer: int) -> str:
        """The path of the layer's output projection."""
        return f"{self.module(layer)}.o_proj"

    def input_norm(self, layer: int) -> Place | None:
        """The gains of the norm whose output the layer's attention reads; None if there are none."""
        return self.names.holding(f"layers.{layer}.attention_norm.weight")
