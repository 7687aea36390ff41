"""Small checkpoints of former model types, with the names of their own code, and what that code computes, in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

WIDTH, HEADS, INNER, LAYERS, TOKENS = 48, 4, 56, 2, 331
Tensors = dict[str, Tensor]

_SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "vocab_size": TOKENS}
_LLAMA = {
    **_SIZES, "intermediate_size": INNER, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_FALCON = {
    "n_head": HEADS, "n_layer": LAYERS, "hidden_size": WIDTH, "vocab_size": TOKENS, "alibi": False, "bias": False,
    "parallel_attn": True, "layer_norm_epsilon": 1e-3, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "RefinedWebModel": {**_FALCON, "multi_query": True},
    "RefinedWeb": {**_FALCON, "n_head_kv": 2},
    "stablelm_epoch": {
        **_SIZES, "intermediate_size": INNER, "hidden_act": "silu", "max_position_embeddings": 64, "norm_eps": 1e-3,
        "num_key_value_heads": 2, "rope_pct": 1 / 3, "rope_theta": 5000, "rotary_scaling_factor": 1.0, "use_qkv_bias": True,
        "tie_word_embeddings": False,
    },
    "Yi": {**_LLAMA, "num_key_value_heads": 2, "rope_theta": 5e6},
    "internlm": {**_LLAMA, "bias": True, "rotary": {"type": "dynamic", "base": 5000}},
    "baichuan": {
        **_LLAMA, "architectures": ["BaiChuanForCausalLM"], "model_max_length": 64, "tokenizer_class": "BaichuanTokenizer",
    },
    "qwen": {
        **_SIZES, "architectures": ["QWenLMHeadModel"], "intermediate_size": 2 * INNER, "kv_channels": WIDTH // HEADS,
        "layer_norm_epsilon": 1e-3, "max_position_embeddings": 128, "seq_length": 64, "no_bias": True, "rotary_pct": 1.0,
        "rotary_emb_base": 10000, "scale_attn_weights": True, "use_dynamic_ntk": True, "use_logn_attn": True,
        "tie_word_embeddings": False, "tokenizer_class": "QWenTokenizer",
    },
    "phi-msft": {
        "n_embd": WIDTH, "n_head": HEADS, "n_head_kv": None, "n_inner": None, "n_layer": LAYERS, "n_positions": 64,
        "rotary_dim": 8, "vocab_size": TOKENS, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False,
    },
}  # fmt: skip


def config_of(kind: str) -> dict[str, Any]:
    """The config.json of a type."""
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    return {"model_type": kind, "auto_map": own, "torch_dtype": "float32", **CONFIGS[kind]}


def tensors_of(kind: str, seed: int = 0) -> Tensors:
    """Random weights: gains and biases, too, are away from what they begin as."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.3
        return torch.randn(*shape, generator=draw) * scale + (0.0 if len(shape) > 1 else 0.8)

    tensors = {name: random(*shape) for name, shape in _shapes(kind)}
    if kind.startswith("RefinedWeb"):  # whose config ties them, and whose files hold both
        tensors["lm_head.weight"] = tensors["transformer.word_embeddings.weight"].clone()
    return tensors


def write(directory: Path, kind: str, tensors: Tensors | None = None, shards: int = 1, **changes: Any) -> Path:
    """A checkpoint in its original form."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(kind) | changes))
    tensors = tensors_of(kind) if tensors is None else tensors
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = list(tensors)
    files = {f"model-{shard + 1:05}-of-{shards:05}.safetensors": names[shard::shards] for shard in range(shards)}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _shapes(kind: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, in the words of the type's own code."""
    e, f, v, d = WIDTH, INNER, TOKENS, WIDTH // HEADS
    half = {"weight": (e,), "bias": (e,)}
    if kind.startswith("RefinedWeb"):
        grouped = kind == "RefinedWeb"
        norms = ["ln_attn", "ln_mlp"] if grouped else ["input_layernorm"]
        rows = 2 * (HEADS // 2 + 2) * d if grouped else (HEADS + 2) * d
        layer = {f"{norm}.{part}": shape for norm in norms for part, shape in half.items()} | {
            "self_attention.query_key_value.weight": (rows, e), "self_attention.dense.weight": (e, e),
            "mlp.dense_h_to_4h.weight": (4 * e, e), "mlp.dense_4h_to_h.weight": (e, 4 * e),
        }  # fmt: skip
        ends = {"transformer.word_embeddings.weight": (v, e), "lm_head.weight": (v, e)}
        ends |= {f"transformer.ln_f.{part}": shape for part, shape in half.items()}
        return _named(ends, "transformer.h", [layer] * LAYERS)
    if kind == "qwen":
        layer = {
            "ln_1.weight": (e,), "ln_2.weight": (e,), "attn.c_attn.weight": (3 * e, e), "attn.c_attn.bias": (3 * e,),
            "attn.c_proj.weight": (e, e), "mlp.w1.weight": (f, e), "mlp.w2.weight": (f, e), "mlp.c_proj.weight": (e, f),
        }  # fmt: skip
        ends = {"transformer.wte.weight": (v, e), "transformer.ln_f.weight": (e,), "lm_head.weight": (v, e)}
        return _named(ends, "transformer.h", [layer] * LAYERS)
    if kind == "phi-msft":
        layer = {f"ln.{part}": shape for part, shape in half.items()} | {
            "mixer.Wqkv.weight": (3 * e, e), "mixer.Wqkv.bias": (3 * e,), "mixer.out_proj.weight": (e, e),
            "mixer.out_proj.bias": (e,), "mlp.fc1.weight": (4 * e, e), "mlp.fc1.bias": (4 * e,),
            "mlp.fc2.weight": (e, 4 * e), "mlp.fc2.bias": (e,),
        }  # fmt: skip
        ends = {"transformer.embd.wte.weight": (v, e), "lm_head.linear.weight": (v, e), "lm_head.linear.bias": (v,)}
        return _named(ends | {f"lm_head.ln.{part}": shape for part, shape in half.items()}, "transformer.h", [layer] * LAYERS)
    kv = d * CONFIGS[kind].get("num_key_value_heads", HEADS)
    first, second = ("ln1", "ln2") if kind == "Yi" else ("input_layernorm", "post_attention_layernorm")
    attention = {"q": (e, e), "k": (kv, e), "v": (kv, e), "o": (e, e)}
    layer = {f"self_attn.{x}_proj.weight": shape for x, shape in attention.items()}
    if kind == "baichuan":
        layer = {"self_attn.W_pack.weight": (3 * e, e), "self_attn.o_proj.weight": (e, e)}
    biased = {"internlm": "qkvo", "stablelm_epoch": "qkv"}.get(kind, "")
    layer |= {f"self_attn.{x}_proj.bias": attention[x][:1] for x in biased}
    parts = half if kind == "stablelm_epoch" else {"weight": (e,)}
    layer |= {f"{norm}.{part}": shape for norm in (first, second) for part, shape in parts.items()}
    ends = {"model.embed_tokens.weight": (v, e), "lm_head.weight": (v, e)}
    ends |= {f"model.norm.{part}": shape for part, shape in parts.items()}
    mlp = {"gate": (f, e), "up": (f, e), "down": (e, f)}
    layer |= {f"mlp.{part}_proj.weight": size for part, size in mlp.items()}
    return _named(ends, "model.layers", [layer] * LAYERS)


def _named(
    ends: Mapping[str, tuple[int, ...]], layers: str, each: list[dict[str, tuple[int, ...]]]
) -> list[tuple[str, tuple[int, ...]]]:
    inner = [(f"{layers}.{number}.{name}", shape) for number, layer in enumerate(each) for name, shape in layer.items()]
    return [*ends.items(), *inner]


# ---- what their own code computes ------------------------------------------------------------------------------------


class _Own:
    """The tensors of one type, read by its own names."""

    def __init__(self, kind: str, tensors: Tensors) -> None:
        self.kind, self.tensors, self.config = kind, tensors, config_of(kind)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def rms(self, name: str, x: Tensor) -> Tensor:
        eps = self.config.get("rms_norm_eps", self.config.get("layer_norm_epsilon"))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.tensors[f"{name}.weight"]

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config.get("norm_eps", self.config.get("layer_norm_epsilon"))
        return F.layer_norm(x, (WIDTH,), self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], eps)

    def swiglu(self, gate: str, up: str, down: str, x: Tensor) -> Tensor:
        return self.linear(down, F.silu(self.linear(gate, x)) * self.linear(up, x))

    def gated(self, name: str, x: Tensor) -> Tensor:
        return self.swiglu(*(f"{name}.{part}_proj" for part in ("gate", "up", "down")), x)


def _attend(q: Tensor, k: Tensor, v: Tensor, dims: int, base: float) -> Tensor:
    """Causal attention of queries [T, H, D] to keys and values [T, G, D], whose first `dims` are rotated by halves."""
    length, group = len(q), q.shape[1] // k.shape[1]
    angles = torch.outer(torch.arange(length).float(), base ** (-torch.arange(0, dims, 2).float() / dims))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(x: Tensor) -> Tensor:
        z = torch.complex(x[..., : dims // 2], x[..., dims // 2 : dims]) * turn
        return torch.cat((z.real, z.imag, x[..., dims:]), -1)

    q, k, v = turned(q), turned(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, WIDTH // HEADS))


def _parallel(own: _Own, at: str, x: Tensor) -> Tensor:
    """A layer of Falcon's or Phi's, whose attention and MLP read the same stream."""
    if own.kind == "phi-msft":
        h = own.layer_norm(f"{at}.ln", x)
        q, k, v = own.linear(f"{at}.mixer.Wqkv", h).chunk(3, -1)
        mixed = own.linear(f"{at}.mixer.out_proj", _attend(_heads(q), _heads(k), _heads(v), own.config["rotary_dim"], 1e4))
        return x + mixed + own.linear(f"{at}.mlp.fc2", F.gelu(own.linear(f"{at}.mlp.fc1", h), approximate="tanh"))
    grouped = own.kind == "RefinedWeb"
    h, other = (own.layer_norm(f"{at}.{norm}", x) for norm in (("ln_attn", "ln_mlp") if grouped else ("input_layernorm",) * 2))
    fused = _heads(own.linear(f"{at}.self_attention.query_key_value", h)).unflatten(1, (2 if grouped else 1, -1))
    q, k, v = fused[:, :, :-2].flatten(1, 2), fused[:, :, -2], fused[:, :, -1]
    mixed = own.linear(f"{at}.self_attention.dense", _attend(q, k, v, WIDTH // HEADS, 1e4))
    return x + mixed + own.linear(f"{at}.mlp.dense_4h_to_h", F.gelu(own.linear(f"{at}.mlp.dense_h_to_4h", other)))


def _serial(own: _Own, at: str, x: Tensor, norm: Callable[[str, Tensor], Tensor], names: tuple[str, str]) -> Tensor:
    """A layer of the others: attention, then an MLP."""
    config, h = own.config, norm(f"{at}.{names[0]}", x)
    if own.kind == "qwen":
        q, k, v = own.linear(f"{at}.attn.c_attn", h).chunk(3, -1)
    elif own.kind == "baichuan":
        q, k, v = own.linear(f"{at}.self_attn.W_pack", h).chunk(3, -1)
    else:
        q, k, v = (own.linear(f"{at}.self_attn.{part}_proj", h) for part in "qkv")
    dims = round(WIDTH // HEADS * config.get("rope_pct", 1))
    base = config.get("rotary", {}).get("base") or config.get("rope_theta", 1e4)
    mixed = _attend(_heads(q), _heads(k), _heads(v), dims, base)
    x = x + own.linear(f"{at}.attn.c_proj" if own.kind == "qwen" else f"{at}.self_attn.o_proj", mixed)
    h = norm(f"{at}.{names[1]}", x)
    if own.kind == "qwen":
        return x + own.swiglu(f"{at}.mlp.w2", f"{at}.mlp.w1", f"{at}.mlp.c_proj", h)
    return x + own.gated(f"{at}.mlp", h)


def logits(kind: str, tensors: Tensors, ids: Tensor) -> Tensor:
    """What a type's own code says to ids [T]: [T, TOKENS]."""
    own = _Own(kind, tensors)
    if kind == "phi-msft" or kind.startswith("RefinedWeb"):
        x = tensors["transformer.embd.wte.weight" if kind == "phi-msft" else "transformer.word_embeddings.weight"][ids]
        for number in range(LAYERS):
            x = _parallel(own, f"transformer.h.{number}", x)
        last, head = ("lm_head.ln", "lm_head.linear") if kind == "phi-msft" else ("transformer.ln_f", "lm_head")
        return own.linear(head, own.layer_norm(last, x))
    qwen, norm = kind == "qwen", own.layer_norm if kind == "stablelm_epoch" else own.rms
    names = {"qwen": ("ln_1", "ln_2"), "Yi": ("ln1", "ln2")}.get(kind, ("input_layernorm", "post_attention_layernorm"))
    x = tensors["transformer.wte.weight" if qwen else "model.embed_tokens.weight"][ids]
    for number in range(LAYERS):
        x = _serial(own, f"{'transformer.h' if qwen else 'model.layers'}.{number}", x, norm, names)
    return own.linear("lm_head", norm("transformer.ln_f" if qwen else "model.norm", x))
