"""The config of `modeling_kvfold.py`: that of a stock class, and what its attention became."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

# Of this file and `modeling_kvfold.py`, which has the same: raised whenever a release changes one of them.
CODE_VERSION = 1


class KvfoldConfig(PreTrainedConfig):  # type: ignore[misc]
    """The config of a stock class and what its attention became.

    Attributes:
        text_config: The stock class's config with the result's `num_key_value_heads`, or with its `kv_lora_rank` (R),
            `qk_rope_head_dim` (P), `qk_nope_head_dim` (N) and `v_head_dim`.
        attention_path: Where a layer's attention is in the stock class, with `{layer}` for its number.
        kept_layers: Layers whose attention is the stock class's, as in the source; None for none.
        shared_kv_heads: Where layers are kept, the KV heads that grouped attention caches in the others; `text_config` then
            states the source's.
        qkv_bias: Whether Q, K and V have biases; with a latent, Q and the RoPE key, or the source's projections if these stay.
        o_bias: Whether O has one.
        scaling: What logits are multiplied by before the softmax.
        inner_windows: How many tokens each layer sees, or None for all, where the source's class has windows inside its
            attention, so that its masks lack them.
        rope_pairs: With a latent: for each of the P/2 pairs of the RoPE key, which of the class's frequencies it rotates with.
        rope_stride: With a latent, or behind a norm or clamp: how many columns of the class's cosines and sines lie between one
            frequency and the next.
        rope_factor: With a latent: what the stock class multiplies cosines and sines by, in all layers, or in each of them.
            The RoPE key goes without.
        qk_norm: The source's QK-norm, behind which attention is new, or None. `kind` is "rms" or "layer"; `scope` is "head" for
            a norm of each head, or "all" for one of all heads; `per_head` says whether each head has its own gains, and `bias`
            whether it adds a bias; `eps` is added to the variance, and `gain_offset` to the gains.
        clip_qkv: What the source clamps queries, keys and values to, behind its QK-norm; None without a clamp.
        projected_kv_heads: Behind a norm or clamp: the KV heads that are projected, where `text_config` states those that are
            cached; None if it states both.
        unrotated_layers: Of grouped attention behind a norm or clamp: layers without RoPE in a model that has it.
    """

    model_type = "kvfold"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012  # as transformers declares it

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    attention_path: str = ""
    kept_layers: list[int] | None = None
    shared_kv_heads: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    scaling: float = 1.0
    inner_windows: list[int | None] | None = None
    rope_pairs: list[int] | None = None
    rope_stride: int = 1
    rope_factor: float | list[float] = 1.0
    qk_norm: dict[str, Any] | None = None
    clip_qkv: float | None = None
    projected_kv_heads: int | None = None
    unrotated_layers: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # Written before the first release: of models that had a latent already, and of ranks that differ by layer.
        if former := sorted(name for name in ("source_latent", "kv_lora_ranks") if kwargs.get(name) is not None):
            raise ValueError(f"{former[0]} is of an earlier version of kvfold: load the model with the code beside its weights")
        if isinstance(self.text_config, dict):
            self.text_config = AutoConfig.for_model(**self.text_config)
        self._check()
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        """Raise `ValueError` if sizes, lists or projections are not complete."""
        layers = getattr(self.text_config, "num_hidden_layers", 0)

        def require(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}; it must {rule}")

        if getattr(self.text_config, "kv_lora_rank", None) is not None:
            sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
            found: dict[str, Any] = {name: getattr(self.text_config, name, None) for name in sizes}
            if not all(isinstance(size, int) and size >= (name != "qk_rope_head_dim") for name, size in found.items()):
                raise ValueError(f"the sizes of the latent in text_config are {found}; they must be integers above 0")
            pairs, count = self.rope_pairs, found["qk_rope_head_dim"] // 2
            complete = isinstance(pairs, list) and len(pairs) == count
            complete = complete and all(isinstance(pair, int) and pair >= 0 for pair in pairs or ())
            require("rope_pairs", complete, f"list {count} frequencies, half of qk_rope_head_dim")
            factors = self.rope_factor if isinstance(self.rope_factor, list) else [self.rope_factor] * layers
            positive = len(factors) == layers and all(isinstance(factor, int | float) and factor > 0 for factor in factors)
            require("rope_factor", positive, f"be a number above 0, or one for each of {layers} layers")
        require("rope_stride", self.rope_stride in (1, 2), "be 1 or 2")
        clip, heads, shared, windows = self.clip_qkv, self.projected_kv_heads, self.shared_kv_heads, self.inner_windows
        require("clip_qkv", clip is None or (isinstance(clip, int | float) and clip > 0), "be a number above 0")
        if self.qk_norm is not None:
            self._check_norm(self.qk_norm)
        require("projected_kv_heads", heads is None or (type(heads) is int and heads > 0), "be an integer above 0")
        if heads is not None and self.qk_norm is None and clip is None:
            raise ValueError(f"projected_kv_heads is {heads}, and neither qk_norm nor clip_qkv follows what is projected")
        for name in ("unrotated_layers", "kept_layers"):
            listed = getattr(self, name)
            known = isinstance(listed, list) and all(type(layer) is int and 0 <= layer < layers for layer in listed)
            require(name, listed is None or known, f"list layers from 0 to {layers - 1}")
        rule = "be an integer above 0, beside kept_layers"
        require("shared_kv_heads", shared is None or (type(shared) is int and shared > 0 and bool(self.kept_layers)), rule)
        rule = f"list a number above 0, or null, for each of {layers} layers"
        known = isinstance(windows, list) and len(windows) == layers
        known = known and all(window is None or (type(window) is int and window > 0) for window in windows or ())
        require("inner_windows", windows is None or known, rule)

    def _check_norm(self, norm: dict[str, Any]) -> None:
        """Raise `ValueError` if the class has no such norm."""
        known = {"kind": ("rms", "layer"), "scope": ("head", "all"), "per_head": (True, False), "bias": (True, False)}
        if not isinstance(norm, dict) or set(norm) != {*known, "eps", "gain_offset"}:
            raise ValueError(f"qk_norm is {norm}; it must have the keys {', '.join(known)}, eps and gain_offset")
        for key, values in known.items():
            if norm[key] not in values:
                raise ValueError(f"qk_norm has {key} {norm[key]!r}; it must be one of {values}")
        for key in ("eps", "gain_offset"):
            if not isinstance(norm[key], int | float) or not norm[key] >= 0:
                raise ValueError(f"qk_norm has {key} {norm[key]!r}; it must be a number of at least 0")
