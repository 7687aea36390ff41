"""Model types of code from before transformers had a class, or that it never had one for, as other classes compute them.

One table says which class a type is, what the values of its config are called there, and what becomes of its tensors: other
names, or equal parts. None of that code is run, and nothing is written: `reader` reads the tensors by their new names. What the
class would compute otherwise is refused before weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from attention.errors import Failure, Refusal

_OWN_CODE = "`convert eval --trust-remote-code` runs its own code to measure it"
# What whole names of tensors match, and the names of what they become, with the pattern's groups: of equal parts by rows, if
# there are several.
Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Former:
    """How a checkpoint of a former type is read.

    Attributes:
        config: Its config, of transformers' class.
        note: What was done, for plans and cards.
        names: Its tensors, every one of them; none if all keep their names.
    """

    config: dict[str, Any]
    note: str
    names: Names

    def becomes(self, name: str) -> tuple[str, ...]:
        """The names of what a tensor becomes: its new name, those of its equal parts by rows, or none if it is left out.

        Raises:
            Failure: The former code has no such tensor.
        """
        if not self.names:
            return (name,)
        for pattern, new in self.names.items():
            if match := re.fullmatch(pattern, name):
                return tuple(match.expand(one) for one in new)
        raise Failure(
            f"this model type has tensors of other names than {name} ({self.note})",
            hint="is it quantised or adapted? Get the checkpoint that it was made from",
        )


class Stated:
    """What a config.json says, and the class that it is checked for.

    Args:
        values: Its values.
        where: Its name in messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self._where = values, where

    def count(self, key: str) -> int:
        """A size that other values are computed from."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            self.refuse(f"{key} is {value!r}; it must be an integer above 0", "correct it in config.json")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse another value of a key; without the key, the former code has the first of these."""
        if (value := self.values.get(key, allowed[0])) not in allowed:
            said = " or ".join(map(repr, allowed))
            self.refuse(f"{key} is {value!r}; it must be {said}, which is all that transformers' class computes")

    def refuse(self, what: str, hint: str = _OWN_CODE) -> NoReturn:
        raise Refusal(f"{self._where} (model type {self.values['model_type']!r}): {what}", hint=hint)


@dataclass(frozen=True)
class _Type:
    """A former model type.

    Attributes:
        model_type: The type of the class that computes the same.
        keys: Keys of its config, and what the class calls them.
        names: As of `Former`.
        only: Keys of its config, and their only values that the class computes; the first is the former code's default.
        values: Computes other values of the config, and refuses what the class does not compute.
        gone: Keys that the class does not need.
        usual: Defaults of the former code that are not those of the class.
        note: What was done beyond new names, for plans and cards.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    names: Names = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    values: Callable[[Stated], dict[str, Any]] = lambda stated: {}
    gone: tuple[str, ...] = ()
    usual: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def read(self, stated: Stated) -> Former:
        """The config's values under their new names, with the computed ones, and the names of the tensors."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

        for key, allowed in {"rope_scaling": (None,), **self.only}.items():
            stated.only(key, *allowed)
        left = {"auto_map", "tokenizer_class", *self.gone}
        kept = {self.keys.get(key, key): value for key, value in stated.values.items() if key not in left}
        now = {"model_type": self.model_type, "architectures": [CLASSES[self.model_type]]}
        done = f"its model type {stated.values['model_type']!r} is read as {self.model_type}, without its own code"
        config = {**self.usual, **kept, **self.values(stated), **now}
        return Former(config, f"{done}: {self.note}" if self.note else done, self.names)


def _internlm(stated: Stated) -> dict[str, Any]:
    stated.count("max_position_embeddings")
    rotary = stated.values.get("rotary") or {}
    if not isinstance(rotary, dict) or rotary.get("type", "dynamic") not in ("dynamic", "origin"):
        stated.refuse(f"rotary is {rotary!r}; it must be of type 'dynamic' or 'origin', as transformers' class computes them")
    return {"attention_bias": stated.values.get("bias", True), "rope_theta": rotary.get("base", 10000)}


def _baichuan(stated: Stated) -> dict[str, Any]:
    if "max_position_embeddings" not in stated.values or stated.count("hidden_size") == 5120:
        stated.refuse("it is a Baichuan-13B by its sizes: no class of transformers has such layers with ALiBi")
    stated.count("max_position_embeddings")
    # Baichuan 2 divides the rows of its head by their norms. Only the names of the classes and the vocabularies tell.
    named, size = stated.values.get("architectures"), stated.values.get("vocab_size")
    if named != ["BaiChuanForCausalLM"] or size == 125696:
        stated.refuse(
            f"architectures is {named!r} and vocab_size {size!r}; it must be ['BaiChuanForCausalLM'], the first Baichuan: "
            "the second, BaichuanForCausalLM of 125696 tokens, normalises its head, which no class of transformers does",
            "get a copy of it that was converted to llama",
        )
    return {}


def _qwen(stated: Stated) -> dict[str, Any]:
    heads = stated.count("num_attention_heads")
    stated.only("kv_channels", stated.count("hidden_size") // heads)
    return {
        "intermediate_size": stated.count("intermediate_size") // 2,
        "max_position_embeddings": stated.count("seq_length"),
        "num_key_value_heads": heads,
    }


def _phi(stated: Stated) -> dict[str, Any]:
    width, heads, rotary = (stated.count(key) for key in ("n_embd", "n_head", "rotary_dim"))
    stated.only("n_head_kv", None, heads)
    dims = width // heads
    if not dims or int(rotary / dims * dims) != rotary:  # as the class computes it
        stated.refuse(f"rotary_dim is {rotary}, which no partial_rotary_factor of {dims} dims gives")
    return {"intermediate_size": stated.values.get("n_inner") or 4 * width, "partial_rotary_factor": rotary / dims}


_LAYER, _NEW = r"model\.layers\.(\d+)\.", r"model.layers.\1."
_H = r"transformer\.h\.(\d+)\."
_QKV = tuple(f"{_NEW}self_attn.{x}_proj" for x in "qkv")
_LLAMA: Names = {
    r"(model\.embed_tokens|model\.norm|lm_head)\.weight": (r"\g<0>",),
    _LAYER + r"(input_layernorm|post_attention_layernorm|mlp\.(gate|up|down)_proj)\.weight": (r"\g<0>",),
    _LAYER + r"self_attn\.[qkvo]_proj\.(weight|bias)": (r"\g<0>",),
    _LAYER + r"self_attn\.rotary_emb\.inv_freq": (),  # a function of the config
}
_FALCON = _Type(
    "falcon",
    keys={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads"},
    usual={"multi_query": False, "parallel_attn": False, "bos_token_id": 1, "eos_token_id": 2},
)
FORMERS: dict[str, _Type] = {
    "RefinedWebModel": _FALCON,
    "RefinedWeb": replace(_FALCON, values=lambda stated: {"new_decoder_architecture": True}),
    "stablelm_epoch": _Type(
        "stablelm",
        keys={"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"},
        only={"rotary_scaling_factor": (1.0,)},
        gone=("rotary_scaling_factor",),
    ),
    "Yi": _Type(
        "llama",
        names={
            **_LLAMA,
            rf"{_LAYER}ln1\.weight": (f"{_NEW}input_layernorm.weight",),
            rf"{_LAYER}ln2\.weight": (f"{_NEW}post_attention_layernorm.weight",),
        },
        usual={"rope_theta": 5e6, "num_key_value_heads": 4},
    ),
    "internlm": _Type(
        "llama",
        names=_LLAMA,
        only={"bias": (True, False)},
        values=_internlm,
        gone=("bias", "rotary"),
        note="its rotary base does not grow beyond max_position_embeddings",
    ),
    "baichuan": _Type(
        "llama",
        names={**_LLAMA, _LAYER + r"self_attn\.W_pack\.weight": tuple(f"{name}.weight" for name in _QKV)},
        only={"rope_theta": (10000.0,), "tie_word_embeddings": (False,)},
        values=_baichuan,
        gone=("model_max_length", "z_loss_weight"),
        note="W_pack is split",
    ),
    "qwen": _Type(
        "qwen2",
        keys={"layer_norm_epsilon": "rms_norm_eps", "rotary_emb_base": "rope_theta"},
        names={
            r"transformer\.wte\.weight": ("model.embed_tokens.weight",),
            r"transformer\.ln_f\.weight": ("model.norm.weight",),
            r"lm_head\.weight": (r"\g<0>",),
            rf"{_H}ln_1\.weight": (f"{_NEW}input_layernorm.weight",),
            rf"{_H}ln_2\.weight": (f"{_NEW}post_attention_layernorm.weight",),
            rf"{_H}attn\.c_attn\.(weight|bias)": tuple(rf"{name}.\2" for name in _QKV),
            rf"{_H}attn\.c_proj\.weight": (f"{_NEW}self_attn.o_proj.weight",),
            rf"{_H}mlp\.w1\.weight": (f"{_NEW}mlp.up_proj.weight",),
            rf"{_H}mlp\.w2\.weight": (f"{_NEW}mlp.gate_proj.weight",),
            rf"{_H}mlp\.c_proj\.weight": (f"{_NEW}mlp.down_proj.weight",),
            r"transformer\.rotary_emb\.inv_freq": (),
        },
        # The last two are of Qwen-VL and Qwen-Audio.
        only={"no_bias": (True,), "scale_attn_weights": (True,), "rotary_pct": (1.0,), "visual": (None,), "audio": (None,)},
        values=_qwen,
        gone=(
            "seq_length", "kv_channels", "rotary_pct", "no_bias", "scale_attn_weights", "use_dynamic_ntk", "use_logn_attn",
            "use_flash_attn", "bf16", "fp16", "fp32", "onnx_safe",
        ),
        note="c_attn is split; what use_dynamic_ntk and use_logn_attn scale beyond seq_length is left out",
    ),
    "phi-msft": _Type(
        "phi",
        keys={
            "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings", "activation_function": "hidden_act",
            "layer_norm_epsilon": "layer_norm_eps", "attn_pdrop": "attention_dropout",
        },
        names={
            r"transformer\.embd\.wte\.weight": ("model.embed_tokens.weight",),
            r"lm_head\.ln\.(weight|bias)": (r"model.final_layernorm.\1",),
            r"lm_head\.linear\.(weight|bias)": (r"lm_head.\1",),
            rf"{_H}ln\.(weight|bias)": (rf"{_NEW}input_layernorm.\2",),
            rf"{_H}mixer\.Wqkv\.(weight|bias)": tuple(rf"{name}.\2" for name in _QKV),
            rf"{_H}mixer\.out_proj\.(weight|bias)": (rf"{_NEW}self_attn.dense.\2",),
            rf"{_H}mixer\.rotary_emb\.(inv_freq|scale)": (),
            rf"{_H}mlp\.(fc[12])\.(weight|bias)": (rf"{_NEW}mlp.\2.\3",),
        },
        only={"num_local_experts": (None,)},  # of Phixtral
        values=_phi,
        gone=("n_inner", "n_head_kv", "rotary_dim", "flash_attn", "flash_rotary", "fused_dense"),
        usual={"bos_token_id": None, "eos_token_id": None},  # the class's are ordinary tokens of its vocabulary
        note="Wqkv is split",
    ),
}  # fmt: skip


def former_of(values: Mapping[str, Any], where: str) -> Former | None:
    """How a checkpoint is read that has a former type; None for another one.

    Args:
        values: The values of its config.json.
        where: The file's name in messages.

    Raises:
        Refusal: A value says what transformers' class does not compute.
    """
    known = FORMERS.get(values["model_type"])
    return known.read(Stated(values, where)) if known else None
