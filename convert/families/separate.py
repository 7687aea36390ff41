"""Families with four separate projections, `self_attn.{q,k,v,o}_proj`, whose heads are stacked in the output rows.

A family is a row of `ROWS`, which says where its class differs from Llama. What a class does beyond the canonical record
(windows, soft-capping, …) is listed there too, so that a host other than the source's own class can refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attention import rope
from attention.qk_norm import NormForm, QKNorm
from attention.record import Attention, Record
from attention.rope import Pairing
from attention.spec import AttentionSpec
from convert.families import tables
from convert.families.base import CLIP, SOFTCAP, Family, Traits
from convert.families.names import Row
from convert.families.projections import NAMES, PARTS, join_projections, or_zeros, split_projections
from convert.families.tables import (
    EXPERTS,
    FUSED_MLP,
    GPT2,
    LLAMA,
    MLP,
    NORMS_AROUND,
    NORMS_BEHIND,
    NUMBERED_EXPERTS,
    WITHOUT_GAINS,
    in_llama,
    like_opt,
)  # fmt: skip

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NormRow:
    """How a family stores its QK-norm.

    Attributes:
        storage: "none" without gains; "shared" one `[D]` for all heads; "flat" one `[heads * D]`, normalised over all heads;
            "matrix" one `[heads, D]`; "list" one `[D]` per head, under `norms.{head}`.
        switch: The config field that switches it on; always on if None.
        eps: The config field with its epsilon.
        gain_offset: 1 if the checkpoint stores gain − 1, else 0.
    """

    q: str = "q_norm"
    k: str = "k_norm"
    kind: Literal["rms", "layer"] = "rms"
    storage: Literal["none", "shared", "flat", "matrix", "list"] = "shared"
    switch: str | None = None
    eps: str = "rms_norm_eps"
    bias: bool = False
    gain_offset: float = 0.0
    after_rotary: bool = False

    def form(self, eps: float) -> NormForm:
        scope: Literal["all", "head"] = "all" if self.storage == "flat" else "head"
        per_head, fixed = self.storage not in ("none", "shared"), self.storage == "none"
        return NormForm(self.kind, scope, per_head, self.bias, eps, self.gain_offset, self.after_rotary, fixed)

    def names(self, name: str, heads: int) -> list[str]:
        if self.storage == "none":
            return []
        return [f"{name}.norms.{h}" for h in range(heads)] if self.storage == "list" else [name]

    def shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        return {"flat": (heads * head_dim,), "matrix": (heads, head_dim)}.get(self.storage, (head_dim,))

    def read(self, tensors: Mapping[str, torch.Tensor], name: str, heads: int, head_dim: int, eps: float) -> QKNorm:
        import torch

        if self.storage == "none":
            return QKNorm(self.form(eps), next(iter(tensors.values())).new_ones(1, head_dim))

        def stack(kind: str) -> torch.Tensor:
            parts = [tensors[f"{part}.{kind}"] for part in self.names(name, heads)]
            whole = parts[0] if len(parts) == 1 else torch.stack(parts)
            return whole.view(-1, head_dim)  # [1 or heads, D]

        return QKNorm(self.form(eps), stack("weight"), stack("bias") if self.bias else None)

    def write(self, norm: QKNorm, name: str, heads: int) -> dict[str, torch.Tensor]:
        if self.storage == "none":
            assert bool((norm.gain == 1).all()), "the class has no gains, and these would be lost"
            return {}
        out: dict[str, torch.Tensor] = {}
        for kind, values in (("weight", norm.gain), ("bias", norm.bias)):
            if values is not None:
                names = self.names(name, heads)
                parts = values.unbind() if self.storage == "list" else [values]
                head_dim = values.shape[-1]
                out |= {f"{n}.{kind}": p.reshape(self.shape(heads, head_dim)) for n, p in zip(names, parts, strict=True)}
        return out


def nowhere(config: Any, layer: int) -> bool:
    """For `SeparateProjections.rotates`: no layer has RoPE."""
    return False


def _no_rope_layers(config: Any, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])  # 1 means that the layer has RoPE, despite the name


def _sliding_layers(config: Any, layer: int) -> bool:
    return config.sliding_window is not None and config.layer_types[layer] == "sliding_attention"


def _sliding_or_no_window(config: Any, layer: int) -> bool:
    return config.sliding_window is None or config.layer_types[layer] == "sliding_attention"


_BASE = 10_000.0  # of RoPE in classes that have no `rope_parameters`


@dataclass(frozen=True)
class SeparateProjections(Family):
    """One row: a model type and where it differs from Llama.

    Attributes:
        qkv_bias: Whether Q, K and V have biases; a string names the config field that says so. Likewise `o_bias`.
        projections: The names of the projections of queries, keys, values and outputs.
        within: Where the projections are in the attention's module, if not directly.
        norm: How the QK-norm is stored; None without one.
        sinks: The name of a tensor `[H]`, the sinks of its heads; None without.
        pairing: Which two dims form a rotary pair (see `Rotary`).
        scaled_by: The softmax scale, or the config field that it is read from, raised to `scale_power`; D^-½ if None.
        partial_rotary: Whether only the share `partial_rotary_factor` of D is rotary.
        rotary_dims: The config field with the number of rotary dims, in classes older than `rope_parameters`; None in others.
        rotates: Which layers have RoPE.
        local: Which layers see `window_size` tokens, by a mask inside their attention.
        adds_output: Whether a layer continues with the plain sum of its input and its attention's output.
        sums_unless: Config fields any of which, when on, make it continue otherwise.
        extra_features: Config fields that, when set, make the class do more than the record describes.
        extra_switch: The config field that switches those on; always on if None.
        required_values: (field, the only value that can be read, the reason for refusing any other), for fields of the config.

    The others are as in `Family`.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    projections: tuple[str, ...] = NAMES
    within: str = ""
    norm: NormRow | None = None
    sinks: str | None = None
    pairing: Pairing = "half"
    scaled_by: str | float | None = None
    scale_power: float = 1.0
    partial_rotary: bool = False
    rotary_dims: str | None = None
    rotates: Callable[[Any, int], bool] = lambda config, layer: True
    local: Callable[[Any, int], bool] = nowhere
    adds_output: bool = True
    sums_unless: tuple[str, ...] = ()
    extra_features: tuple[str, ...] = ()
    extra_switch: str | None = None
    required_values: tuple[tuple[str, Any, str], ...] = ()

    layout: ClassVar[str] = "separate projections"

    @property
    def without_latent(self) -> str | None:
        if self.norm and self.norm.after_rotary:
            return "queries and keys are normalised after RoPE, and a latent holds keys before RoPE"
        return super().without_latent

    @property
    def unreadable(self) -> str | None:
        if self.rotary_dims is not None:
            dims, most = getattr(self.decoder, self.rotary_dims), self.spec.head_dim
            if dims < 2 or dims % 2 or dims > most:
                return f"RoPE rotates pairs of each head's {most} dims, and {self.rotary_dims} is {dims}"
        windows = [self.inner_window(layer) for layer in range(self.decoder.num_hidden_layers)]
        if none := [window for window in windows if window is not None and window < 1]:
            return f"its local layers see no tokens (window_size is {none[0]})"
        if CLIP in self.extra_features and (clip := getattr(self.decoder, CLIP)) is not None and clip <= 0:
            return f"queries, keys and values are clipped to nothing ({CLIP} is {clip})"
        return next((why for name, value, why in self.required_values if getattr(self.decoder, name) != value), None)

    def rotary(self, layer: int) -> rope.Rotary | None:
        if not self.rotates(self.decoder, layer):
            return None
        if self.rotary_dims is not None:
            return rope.of_base(_BASE, getattr(self.decoder, self.rotary_dims), self.pairing)
        layer_types = getattr(self.decoder, "layer_types", None)
        layer_type = layer_types[layer] if layer_types else None
        return rope.from_config(self.decoder, self.spec.head_dim, self.pairing, layer_type, self.partial_rotary)

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        spec, width = self.spec, self.decoder.hidden_size
        rows = [count * spec.head_dim for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        sizes = [*((count, width) for count in rows), (width, rows[0])]
        biased = (*[self._flag(self.qkv_bias)] * 3, self._flag(self.o_bias))
        shapes: dict[str, tuple[int, ...]] = {}
        for name, size, bias in zip(self.projections, sizes, biased, strict=True):
            shapes[f"{name}.weight"] = size
            if bias:
                shapes[f"{name}.bias"] = size[:1]
        if norm := self._norm:
            for name, count in ((norm.q, spec.num_heads), (norm.k, spec.num_kv_heads)):
                for part in norm.names(name, count):
                    for kind in ("weight", "bias") if norm.bias else ("weight",):
                        shapes[f"{part}.{kind}"] = norm.shape(count, spec.head_dim)
        if self.sinks is not None:
            shapes[self.sinks] = (spec.num_heads,)
        return {self._prefix(layer) + name: shape for name, shape in shapes.items()}

    def split(self, tensors: Mapping[str, torch.Tensor], layer: int) -> Attention:
        spec, prefix = self.spec, self._prefix(layer)
        local = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        record = split_projections(local, spec.head_dim, self.scale, self.rotary(layer), self.projections)
        record = replace(record, scoring=self.scoring(layer), sinks=None if self.sinks is None else local[self.sinks])
        if (norm := self._norm) is None:
            return record
        eps = getattr(self.decoder, norm.eps)
        return replace(
            record,
            q_norm=norm.read(local, norm.q, spec.num_heads, spec.head_dim, eps),
            k_norm=norm.read(local, norm.k, spec.num_kv_heads, spec.head_dim, eps),
        )

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        assert isinstance(record, Attention), "a latent has no projections of keys and values"
        a = self.in_class(record, layer)
        local = join_projections(replace(a, sinks=None), self.projections)
        if self.norm and a.q_norm and a.k_norm:
            local |= self.norm.write(a.q_norm, self.norm.q, a.q.shape[0])
            local |= self.norm.write(a.k_norm, self.norm.k, a.k.shape[0])
        if self.sinks is not None and a.sinks is not None:
            local[self.sinks] = a.sinks
        return {self._prefix(layer) + name: tensor for name, tensor in local.items()}

    def in_class(self, a: Attention, layer: int) -> Attention:
        """A record of another class as this one computes it: its order of pairs, and the biases that it always has."""
        assert (a.sinks is None) == (self.sinks is None), "the class has sinks, or it has none"
        a = a.paired(self.pairing)
        if self.qkv_bias is True:
            of = (a.q, a.q_bias), (a.k, a.k_bias), (a.v, a.v_bias)
            q_bias, k_bias, v_bias = (or_zeros(bias, rows[..., 0]) for rows, bias in of)
            a = replace(a, q_bias=q_bias, k_bias=k_bias, v_bias=v_bias)
        return replace(a, o_bias=or_zeros(a.o_bias, a.o[:, 0, 0])) if self.o_bias is True else a

    def inner_window(self, layer: int) -> int | None:
        return int(self.decoder.window_size) if self.local(self.decoder, layer) else None

    def output(self, layer: int) -> str:
        return f"{self._prefix(layer)}{self.projections[-1]}"

    @property
    def traits(self) -> Traits:
        norm, config, layers = self._norm, self.decoder, range(self.spec.num_layers)
        extra = self.extra_features if self.extra_switch is None or getattr(config, self.extra_switch) else ()
        if any(self.local(config, layer) for layer in layers):
            extra = (*extra, "window_size")
        return Traits(
            qkv_bias=self._flag(self.qkv_bias),
            o_bias=self._flag(self.o_bias),
            qk_norm=norm.form(getattr(config, norm.eps)) if norm else None,
            layers_with_rotary=sum(self.rotates(config, layer) for layer in layers),
            sinks=self.sinks is not None,
            adds_output=self.adds_output and not any(getattr(config, field) for field in self.sums_unless),
            extra_features={field: value for field in extra if (value := getattr(config, field, None)) not in (None, False)},
        )

    def _prefix(self, layer: int) -> str:
        return f"{self.module(layer)}.{self.within}{'.' if self.within else ''}"

    def _flag(self, flag: bool | str) -> bool:
        return bool(getattr(self.decoder, flag)) if isinstance(flag, str) else flag

    @property
    def _norm(self) -> NormRow | None:
        on = self.norm and (self.norm.switch is None or getattr(self.decoder, self.norm.switch))
        return self.norm if on else None

    @property
    def scale(self) -> float:
        if self.scaled_by is None:
            return super().scale
        given = getattr(self.decoder, self.scaled_by) if isinstance(self.scaled_by, str) else self.scaled_by
        return float(given**self.scale_power)


WINDOW = ("sliding_window",)
_BIDIRECTIONAL = ("use_bidirectional_attention",)  # of embedding models: records are causal
GPTJ: dict[str, Any] = {
    "names": tables.GPTJ,
    "projections": (*PARTS, "out_proj"),
    "pairing": "interleaved",
    "rotary_dims": "rotary_dim",
    "adds_output": False,
    "shares_heads": False,
    "attention_path": "transformer.h.{layer}.attn",
    "base": "transformer",
    "computed": ("inv_freq", ".attn.bias", ".attn.masked_bias", ".attn.causal_mask"),  # masks of old checkpoints
}
_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_GRANITE: dict[str, Any] = {**_ATTENTION_BIAS, "adds_output": False, "scaled_by": "attention_multiplier"}
_COHERE: dict[str, Any] = {**_ATTENTION_BIAS, "adds_output": False, "pairing": "interleaved", "rope_stride": 2}
_LIKE_OPT: dict[str, Any] = {"projections": (*PARTS, "out_proj"), "rotates": nowhere, "shares_heads": False}
_POST_NORM: dict[str, Any] = {"names": NORMS_BEHIND, "adds_output": False}
_GEMMA2: dict[str, Any] = {**_ATTENTION_BIAS, "scaled_by": "query_pre_attn_scalar", "scale_power": -0.5}

ROWS = [
    SeparateProjections("llama", **_ATTENTION_BIAS),
    SeparateProjections("arcee", **_ATTENTION_BIAS),
    SeparateProjections("cwm", extra_features=WINDOW),
    SeparateProjections("mistral", extra_features=WINDOW),
    SeparateProjections("ministral", extra_features=WINDOW),
    SeparateProjections("mixtral", names=NUMBERED_EXPERTS, extra_features=WINDOW),
    SeparateProjections("qwen2", qkv_bias=True, extra_features=WINDOW),  # None or 0 in these, if `use_sliding_window` is off
    SeparateProjections(
        "qwen2_moe",
        names=EXPERTS.replacing(
            in_llama("mlp.shared_expert_gate", "mlp.shared_router"),
            *(in_llama(f"mlp.shared_expert.{part}_proj", f"mlp.shared.{part}") for part in MLP),
        ),
        qkv_bias="qkv_bias",
        extra_features=WINDOW,
    ),
    SeparateProjections("qwen3", **_ATTENTION_BIAS, norm=NormRow(), extra_features=WINDOW),
    SeparateProjections("qwen3_moe", names=EXPERTS, **_ATTENTION_BIAS, norm=NormRow(), extra_features=WINDOW),
    SeparateProjections("seed_oss", qkv_bias="attention_bias", o_bias="attention_out_bias"),
    SeparateProjections(
        "smollm3", **_ATTENTION_BIAS, rotates=_no_rope_layers, extra_features=WINDOW, extra_switch="use_sliding_window"
    ),
    SeparateProjections("granite", **_GRANITE),
    SeparateProjections(
        "granitemoe",
        names=LLAMA.replacing(
            in_llama("block_sparse_moe.router.layer", "mlp.router"),
            in_llama("block_sparse_moe.input_linear", "mlp.experts.gate", "mlp.experts.up"),
            in_llama("block_sparse_moe.output_linear", "mlp.experts.down"),
        ),
        **_GRANITE,
    ),
    SeparateProjections(
        "hyperclovax",
        names=LLAMA.replacing(in_llama("post_norm1", "attention_output_norm"), in_llama("post_norm2", "mlp_output_norm")),
        **_GRANITE,
    ),
    SeparateProjections("gemma", names=LLAMA.storing_gains_less_one(), **_ATTENTION_BIAS, extra_features=_BIDIRECTIONAL),
    SeparateProjections(
        "gemma2",
        names=NORMS_AROUND.storing_gains_less_one(),
        adds_output=False,
        **_GEMMA2,
        extra_features=(SOFTCAP, *WINDOW, *_BIDIRECTIONAL),
    ),
    SeparateProjections(
        "vaultgemma",
        names=LLAMA.replacing(in_llama("pre_feedforward_layernorm", "mlp_norm")).storing_gains_less_one(),
        **_GEMMA2,
        extra_features=(SOFTCAP, *WINDOW),
    ),
    SeparateProjections(
        "gemma3_text",
        names=NORMS_AROUND.storing_gains_less_one(),
        adds_output=False,
        **_GEMMA2,
        norm=NormRow(gain_offset=1.0),
        extra_features=(*WINDOW, *_BIDIRECTIONAL),
        required_values=((SOFTCAP, None, f"config.json sets {SOFTCAP}, which its class of transformers ignores"),),
    ),
    SeparateProjections("olmo", names=WITHOUT_GAINS, **_ATTENTION_BIAS, extra_features=(CLIP,)),
    SeparateProjections("olmo2", **_POST_NORM, **_ATTENTION_BIAS, norm=NormRow(storage="flat")),
    SeparateProjections("olmo3", **_POST_NORM, **_ATTENTION_BIAS, norm=NormRow(storage="flat"), extra_features=WINDOW),
    SeparateProjections("olmoe", names=EXPERTS, **_ATTENTION_BIAS, norm=NormRow(storage="flat"), extra_features=(CLIP,)),
    SeparateProjections("exaone4", **_POST_NORM, norm=NormRow(), rotates=_sliding_or_no_window, extra_features=WINDOW),
    SeparateProjections(
        "apertus",
        names=LLAMA.replacing(
            in_llama("attention_layernorm", "attention_norm"),
            in_llama("feedforward_layernorm", "mlp_norm"),
            in_llama("mlp.act_fn", "mlp.activation"),
        ),
        **_ATTENTION_BIAS,
        norm=NormRow(),
    ),
    SeparateProjections(
        "hunyuan_v1_dense",
        **_ATTENTION_BIAS,
        norm=NormRow("query_layernorm", "key_layernorm", after_rotary=True),
    ),
    SeparateProjections("jais2", **_ATTENTION_BIAS),
    SeparateProjections(
        "starcoder2",
        names=LLAMA.replacing(in_llama("mlp.c_fc", "mlp.up"), in_llama("mlp.c_proj", "mlp.down")),
        qkv_bias="use_bias",
        o_bias="use_bias",
        extra_features=WINDOW,
    ),
    SeparateProjections("nemotron", names=LLAMA.storing_gains_less_one(), **_ATTENTION_BIAS, partial_rotary=True),
    SeparateProjections(
        "stablelm",
        adds_output=False,
        qkv_bias="use_qkv_bias",
        partial_rotary=True,
        norm=NormRow("q_layernorm", "k_layernorm", kind="layer", storage="list", switch="qk_layernorm", eps="layer_norm_eps"),
    ),
    SeparateProjections(
        "phi",
        names=LLAMA.replacing(
            in_llama("mlp.fc1", "mlp.up"),
            in_llama("mlp.fc2", "mlp.down"),
            Row("model.final_layernorm", ("final_norm",)),
        ),
        adds_output=False,
        qkv_bias=True,
        partial_rotary=True,
        o_bias=True,
        projections=(*PARTS, "dense"),
        norm=NormRow("q_layernorm", "k_layernorm", kind="layer", switch="qk_layernorm", eps="layer_norm_eps", bias=True),
    ),
    SeparateProjections("phimoe", names=NUMBERED_EXPERTS, **_ATTENTION_BIAS, scales_rope=True, extra_features=WINDOW),
    SeparateProjections(
        "cohere", **_COHERE, norm=NormRow(kind="layer", storage="matrix", switch="use_qk_norm", eps="layer_norm_eps")
    ),
    SeparateProjections("cohere2", **_COHERE, rotates=_sliding_layers, extra_features=WINDOW),
    SeparateProjections("glm", names=FUSED_MLP, qkv_bias="attention_bias", pairing="interleaved", partial_rotary=True),
    SeparateProjections(
        "glm4",
        names=FUSED_MLP.replacing(
            in_llama("post_self_attn_layernorm", "attention_output_norm"),
            in_llama("post_mlp_layernorm", "mlp_output_norm"),
        ),
        adds_output=False,
        qkv_bias="attention_bias",
        pairing="interleaved",
        partial_rotary=True,
    ),
    SeparateProjections("helium", qkv_bias="attention_bias", pairing="interleaved"),
    SeparateProjections(
        "opt",
        names=like_opt("model.decoder", "final_layer_norm").replacing(
            Row("model.decoder.project_in", ("embedding_projection",)),
            Row("model.decoder.project_out", ("head_projection",)),
        ),
        qkv_bias="enable_bias",
        o_bias="enable_bias",
        **_LIKE_OPT,
        attention_path="model.decoder.layers.{layer}.self_attn",
        base="model",
        required_values=(("do_layer_norm_before", True, "it normalises behind its attention (do_layer_norm_before is false)"),),
    ),
    SeparateProjections("gptj", **GPTJ),
    SeparateProjections(
        "biogpt",
        names=like_opt("biogpt", "layer_norm", "output_projection"),
        qkv_bias=True,
        o_bias=True,
        **_LIKE_OPT,
        attention_path="biogpt.layers.{layer}.self_attn",
        base="biogpt",
    ),
    SeparateProjections(
        "xglm",
        names=like_opt("model", "layer_norm", learned=False),
        qkv_bias=True,
        o_bias=True,
        **_LIKE_OPT,
        base="model",
        required_values=(("add_cross_attention", False, "it has cross-attention (add_cross_attention)"),),
    ),
    SeparateProjections(
        "gpt_neo",
        names=GPT2,
        o_bias=True,
        **_LIKE_OPT,
        within="attention",
        scaled_by=1.0,
        local=lambda config, layer: bool(config.attention_layers[layer] == "local"),
        attention_path="transformer.h.{layer}.attn",
        base="transformer",
        computed=(".attention.bias", ".attention.masked_bias"),  # the masks of old checkpoints
    ),
    SeparateProjections("ernie4_5", qkv_bias="use_bias", o_bias="use_bias", pairing="interleaved"),
]
