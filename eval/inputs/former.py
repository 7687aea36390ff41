"""Model types of code from before transformers had a class, or that it never had one for, as other classes compute them.

A type's function says which class that is, what the values of its config are called there, and what becomes of its tensors.
None of that code is run. What the class would compute otherwise is refused before weights are read. (`rewriting` writes the
result.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from attention.errors import Failure, Refusal

if TYPE_CHECKING:
    import torch

    Parts = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]

_OWN_CODE = "`convert eval --trust-remote-code` runs its own code to measure it"


@dataclass(frozen=True)
class Row:
    """Tensors of one kind.

    Attributes:
        pattern: What their whole names match.
        into: What they become, with the pattern's groups.
        parts: Their values, in the order of `into`; None for the tensor as it is.
    """

    pattern: str
    into: tuple[str, ...]
    parts: Parts | None = None


@dataclass(frozen=True)
class Former:
    """How a checkpoint of a former type is read.

    Attributes:
        config: Its config, of transformers' class.
        note: What was done, for plans and cards.
        rows: Its tensors, every one of them; none if all stay as they are.
    """

    config: dict[str, Any]
    note: str
    rows: tuple[Row, ...] = ()

    def becomes(self, name: str) -> tuple[tuple[str, ...], Parts | None]:
        """The names of what a tensor becomes, and what makes their values; None for the tensor as it is.

        Raises:
            Failure: The former code has no such tensor.
        """
        if not self.rows:
            return (name,), None
        for row in self.rows:
            if found := re.fullmatch(row.pattern, name):
                return tuple(found.expand(new) for new in row.into), row.parts
        raise Failure(
            f"this model type has tensors of other names than {name} ({self.note})",
            hint="is it quantised or adapted? Get the checkpoint that it was made from",
        )

    @property
    def identity(self) -> str:
        """Differs where checkpoints of the same files become others."""
        rows = [(row.pattern, row.into, row.parts and row.parts.__name__) for row in self.rows]
        return json.dumps([self.config, rows], sort_keys=True, default=str)


class Stated:
    """What a config.json says, and the class that it is checked for.

    Args:
        values: Its values.
        where: Its name in messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self._where = values, where

    def counts(self, *keys: str) -> list[int]:
        """Sizes that other values are computed from."""
        for key in keys:
            value = self.values.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
                self.refuse(f"{key} is {value!r}; it must be an integer above 0", "correct it in config.json")
        return [int(self.values[key]) for key in keys]

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse another value of a key; without the key, the former code has the first of these."""
        if (value := self.values.get(key, allowed[0])) not in allowed:
            said = " or ".join(map(repr, allowed))
            self.refuse(f"{key} is {value!r}; it must be {said}, which is all that transformers' class computes")

    def refuse(self, what: str, hint: str = _OWN_CODE) -> NoReturn:
        raise Refusal(f"{self._where} (model type {self.values['model_type']!r}): {what}", hint=hint)

    def read_as(
        self,
        model_type: str,
        renamed: Mapping[str, str],
        values: Mapping[str, Any],
        gone: tuple[str, ...] = (),
        rows: tuple[Row, ...] = (),
        done: str = "",
        usual: Mapping[str, Any] | None = None,
    ) -> Former:
        """The result: every value of the config under its new name, those of `values`, and none of `gone`.

        `usual` has defaults of the former code that are not those of the class.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

        left = {"auto_map", "tokenizer_class", *gone}
        kept = {renamed.get(key, key): value for key, value in self.values.items() if key not in left}
        now = {"model_type": model_type, "architectures": [CLASSES[model_type]]}
        note = f"its model type {self.values['model_type']!r} is read as {model_type}, without its own code"
        return Former({**(usual or {}), **kept, **values, **now}, note + (f": {done}" if done else ""), rows)


def _thirds(stacked: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values that are stacked by rows."""
    if not stacked.ndim or len(stacked) % 3:
        raise Failure(f"a tensor {list(stacked.shape)} does not stack queries, keys and values by rows", hint="get it again")
    return stacked.chunk(3)


def _normalised(head: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A head whose rows the former code divides by their norms when it is loaded."""
    rows = _matrix(head).float()
    return ((rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)).to(head.dtype),)


def _ungated(down: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Shared experts without a gate, for a class that has one: sigmoid(0) is exactly ½, and so is doubling exact.

    Returns:
        Twice the projection [E, F], and the gate [1, E], which is zero.
    """
    return _matrix(down) * 2, down.new_zeros(1, len(down))


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim != 2:
        raise Failure(f"a tensor {list(tensor.shape)} stands where a projection has two dims", hint="get it again")
    return tensor


def _renamed(names: Mapping[str, str]) -> tuple[Row, ...]:
    return tuple(Row(old, (new,)) for old, new in names.items())


_LAYER, _NEW = r"model\.layers\.(\d+)\.", r"model.layers.\1."
_H = r"transformer\.h\.(\d+)\."
_QKV = tuple(f"{_NEW}self_attn.{x}_proj" for x in "qkv")
_LLAMA = (
    Row(r"(model\.embed_tokens|model\.norm|lm_head)\.weight", (r"\g<0>",)),
    Row(_LAYER + r"(input_layernorm|post_attention_layernorm|mlp\.(gate|up|down)_proj)\.weight", (r"\g<0>",)),
    Row(_LAYER + r"self_attn\.[qkvo]_proj\.(weight|bias)", (r"\g<0>",)),
    Row(_LAYER + r"self_attn\.rotary_emb\.inv_freq", ()),  # a function of the config
)


def _falcon(stated: Stated) -> Former:
    grouped = {"new_decoder_architecture": True} if stated.values["model_type"] == "RefinedWeb" else {}
    renamed = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads"}
    usual = {"multi_query": False, "parallel_attn": False, "bos_token_id": 1, "eos_token_id": 2}
    stated.only("rope_scaling", None)
    return stated.read_as("falcon", renamed, grouped, usual=usual)


def _stablelm(stated: Stated) -> Former:
    stated.only("rotary_scaling_factor", 1.0)
    stated.only("rope_scaling", None)
    renamed = {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"}
    return stated.read_as("stablelm", renamed, {}, ("rotary_scaling_factor",))


def _yi(stated: Stated) -> Former:
    norms = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
    rows = _renamed({rf"{_LAYER}{old}\.weight": f"{_NEW}{new}.weight" for old, new in norms.items()})
    stated.only("rope_scaling", None)
    return stated.read_as("llama", {}, {}, rows=(*_LLAMA, *rows), usual={"rope_theta": 5e6, "num_key_value_heads": 4})


def _internlm(stated: Stated) -> Former:
    stated.only("rope_scaling", None)
    stated.only("bias", True, False)
    (limit,) = stated.counts("max_position_embeddings")
    rotary = stated.values.get("rotary") or {}
    if not isinstance(rotary, dict) or rotary.get("type", "dynamic") not in ("dynamic", "origin"):
        stated.refuse(f"rotary is {rotary!r}; it must be of type 'dynamic' or 'origin', as transformers' class computes them")
    values = {"attention_bias": stated.values.get("bias", True), "rope_theta": rotary.get("base", 10000)}
    done = f"a rotary base that grows beyond {limit} tokens is left out" if rotary.get("type") == "dynamic" else ""
    return stated.read_as("llama", {}, values, ("bias", "rotary"), _LLAMA, done)


def _baichuan(stated: Stated) -> Former:
    if "max_position_embeddings" not in stated.values:
        stated.refuse(
            "without max_position_embeddings it is a Baichuan-13B: no class of transformers has such layers with ALiBi"
        )
    stated.only("rope_scaling", None)
    stated.only("rope_theta", 10000.0)
    stated.only("tie_word_embeddings", False)
    stated.counts("max_position_embeddings", "hidden_size")
    if stated.values["hidden_size"] == 5120:
        stated.refuse("hidden_size is that of a 13B, with ALiBi, and max_position_embeddings is what only a 7B has, with RoPE")
    rows = [*_LLAMA, Row(_LAYER + r"self_attn\.W_pack\.weight", tuple(f"{name}.weight" for name in _QKV), _thirds)]
    done = "W_pack is split"
    if _has_norm_head(stated):
        rows.insert(0, Row(r"lm_head\.weight", (r"\g<0>",), _normalised))
        done += ", and the rows of lm_head are divided by their norms"
    return stated.read_as("llama", {}, {}, ("model_max_length", "z_loss_weight"), tuple(rows), done)


def _has_norm_head(stated: Stated) -> bool:
    """Whether it is a Baichuan 2, which divides the rows of its head by their norms. Only the names of the classes tell."""
    second = {"['BaiChuanForCausalLM']": False, "['BaichuanForCausalLM']": True}.get(str(stated.values.get("architectures")))
    size = stated.values.get("vocab_size")
    if second is None or size == (64000 if second else 125696):
        named = stated.values.get("architectures")
        stated.refuse(
            f"architectures is {named!r} and vocab_size {size!r}: is its head normalised? BaiChuanForCausalLM is the first "
            "Baichuan, of 64000 tokens, whose head is not; BaichuanForCausalLM is the second, of 125696, whose head is"
        )
    return second


def _qwen(stated: Stated) -> Former:
    width, heads, inner, limit = stated.counts("hidden_size", "num_attention_heads", "intermediate_size", "seq_length")
    for key in ("no_bias", "scale_attn_weights"):
        stated.only(key, True)
    stated.only("rope_scaling", None)
    stated.only("rotary_pct", 1.0)
    stated.only("kv_channels", width // heads)
    for key in ("visual", "audio"):  # of Qwen-VL and Qwen-Audio
        stated.only(key, None)
    names = {
        r"transformer\.wte\.weight": "model.embed_tokens.weight",
        r"transformer\.ln_f\.weight": "model.norm.weight",
        r"lm_head\.weight": r"\g<0>",
        rf"{_H}ln_1\.weight": f"{_NEW}input_layernorm.weight",
        rf"{_H}ln_2\.weight": f"{_NEW}post_attention_layernorm.weight",
        rf"{_H}attn\.c_proj\.weight": f"{_NEW}self_attn.o_proj.weight",
        rf"{_H}mlp\.w1\.weight": f"{_NEW}mlp.up_proj.weight",
        rf"{_H}mlp\.w2\.weight": f"{_NEW}mlp.gate_proj.weight",
        rf"{_H}mlp\.c_proj\.weight": f"{_NEW}mlp.down_proj.weight",
    }
    stacked = Row(_H + r"attn\.c_attn\.(weight|bias)", tuple(rf"{name}.\2" for name in _QKV), _thirds)
    rows = (*_renamed(names), stacked, Row(r"transformer\.rotary_emb\.inv_freq", ()))
    values = {"intermediate_size": inner // 2, "max_position_embeddings": limit, "num_key_value_heads": heads}
    renamed = {"layer_norm_epsilon": "rms_norm_eps", "rotary_emb_base": "rope_theta"}
    gone = (
        "seq_length", "kv_channels", "rotary_pct", "no_bias", "scale_attn_weights", "use_dynamic_ntk", "use_logn_attn",
        "use_flash_attn", "bf16", "fp16", "fp32", "onnx_safe",
    )  # fmt: skip
    scaled = [key for key in ("use_dynamic_ntk", "use_logn_attn") if stated.values.get(key)]
    done = "c_attn is split" + (f"; what {' and '.join(scaled)} scales beyond {limit} tokens is left out" if scaled else "")
    return stated.read_as("qwen2", renamed, values, gone, rows, done)


def _phi(stated: Stated) -> Former:
    width, heads, rotary = stated.counts("n_embd", "n_head", "rotary_dim")
    stated.only("n_head_kv", None, heads)
    stated.only("num_local_experts", None)  # of Phixtral
    names = {
        r"transformer\.embd\.wte\.weight": "model.embed_tokens.weight",
        r"lm_head\.ln\.(weight|bias)": r"model.final_layernorm.\1",
        r"lm_head\.linear\.(weight|bias)": r"lm_head.\1",
        rf"{_H}ln\.(weight|bias)": rf"{_NEW}input_layernorm.\2",
        rf"{_H}mixer\.out_proj\.(weight|bias)": rf"{_NEW}self_attn.dense.\2",
        rf"{_H}mlp\.(fc[12])\.(weight|bias)": rf"{_NEW}mlp.\2.\3",
    }
    stacked = Row(_H + r"mixer\.Wqkv\.(weight|bias)", tuple(rf"{name}.\2" for name in _QKV), _thirds)
    rows = (*_renamed(names), stacked, Row(_H + r"mixer\.rotary_emb\.(inv_freq|scale)", ()))
    dims = width // heads
    if not dims or int(rotary / dims * dims) != rotary:  # as the class computes it
        stated.refuse(f"rotary_dim is {rotary}, which no partial_rotary_factor of {dims} dims gives")
    renamed = {
        "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings", "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps", "attn_pdrop": "attention_dropout",
    }  # fmt: skip
    values = {"intermediate_size": stated.values.get("n_inner") or 4 * width, "partial_rotary_factor": rotary / dims}
    gone = ("n_inner", "n_head_kv", "rotary_dim", "flash_attn", "flash_rotary", "fused_dense")
    usual = {"bos_token_id": None, "eos_token_id": None}  # the class's are ordinary tokens of its vocabulary
    return stated.read_as("phi", renamed, values, gone, rows, "Wqkv is split", usual)


def _deepseek(stated: Stated) -> Former:
    experts, shared, size = stated.counts("n_routed_experts", "n_shared_experts", "moe_intermediate_size")
    stated.counts("num_key_value_heads", "num_experts_per_tok")
    dense = stated.values.get("first_k_dense_replace") or 0
    stated.only("moe_layer_freq", 1)
    stated.only("scoring_func", "softmax")
    for key in ("attention_bias", "norm_topk_prob"):
        stated.only(key, False)
    stated.only("rope_scaling", None)
    mlp, new = _LAYER + r"mlp\.", f"{_NEW}mlp.shared_expert"
    rows = (
        *_LLAMA,
        Row(mlp + r"(gate|experts\.\d+\.(gate_proj|up_proj|down_proj))\.weight", (r"\g<0>",)),
        Row(mlp + r"shared_experts\.(gate|up)_proj\.weight", (rf"{new}.\2_proj.weight",)),
        Row(mlp + r"shared_experts\.down_proj\.weight", (f"{new}.down_proj.weight", f"{new}_gate.weight"), _ungated),
    )
    values = {
        "num_experts": experts, "shared_expert_intermediate_size": shared * size, "mlp_only_layers": list(range(dense)),
        "decoder_sparse_step": 1, "qkv_bias": False, "norm_topk_prob": False,
    }  # fmt: skip
    gone = (
        "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq", "scoring_func", "attention_bias",
        "aux_loss_alpha", "seq_aux", "pretraining_tp",
    )  # fmt: skip
    done = "shared experts, which it has no gate for, are doubled behind a gate of ½"
    usual = {"bos_token_id": 100000, "eos_token_id": 100001}
    return stated.read_as("qwen2_moe", {}, values, gone, rows, done, usual)


FORMERS: dict[str, Callable[[Stated], Former]] = {
    "RefinedWebModel": _falcon,
    "RefinedWeb": _falcon,
    "stablelm_epoch": _stablelm,
    "Yi": _yi,
    "internlm": _internlm,
    "baichuan": _baichuan,
    "qwen": _qwen,
    "phi-msft": _phi,
    "deepseek": _deepseek,
}


def former_of(values: Mapping[str, Any], where: str) -> Former | None:
    """How a checkpoint is read that has a former type; None for another one.

    Args:
        values: The values of its config.json.
        where: The file's name in messages.

    Raises:
        Refusal: A value says what transformers' class does not compute.
    """
    read = FORMERS.get(values["model_type"])
    return read(Stated(values, where)) if read else None
