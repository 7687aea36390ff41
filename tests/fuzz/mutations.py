"""Damage to files, by chance: to JSON, to tensors, and to bytes."""

import copy
import json
import random
import struct
from typing import Any

import safetensors.torch
import torch
from tiny import VOCABULARY
from tiny_mla import LONGROPE

_NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, 16, 2048, 2049, 10**5, 2**16, 2**20, 2**28, 10**9, 2**31, 2**40, 2**63, 10**40, -(10**9),
    0.0, -0.0, 0.5, 1.0, 4.0, -2.5, 1e-300, 1e30, 1e300, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
_OTHERS: list[Any] = [
    None, True, False, "", "0", "8", "10000", "nan", "llama", "default", "yarn", "float32", "int3", "silu", "a\nb",
    "\x1b[31m", "\u202e",
    [], [1], [0, 0, 0], ["full_attention"], ["sliding_attention"] * 3, [None], {}, {"a": 1}, {"rope_type": "dynamic"},
]  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64, "rope_theta": 1e4}  # fmt: skip
# Settings that a tiny config need not have, and keys that no config should have.
_KEYS: dict[str, list[Any]] = {
    "rope_parameters": [
        _LLAMA3, dict.fromkeys(_LLAMA3, 0) | {"rope_type": "llama3"}, LONGROPE, {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4},
        {"full_attention": _LLAMA3, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    ],
    "rope_scaling": [{"type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}, {"rope_type": "yarn"}],
    "rope_theta": [0, -1, float("nan"), "10000", 5e5],
    "partial_rotary_factor": [0.5, 0.3, 2, 0],
    "layer_types": [["full_attention"] * 3, ["full_attention"] * 2, ["full_attention", "sliding_attention", "mamba"]],
    "no_rope_layers": [[1, 0, 1], [1], [2, 2, 2], []],
    "text_config": [5, {}, {"num_hidden_layers": -1}], "decoder": [{"a": 1}, 5], "auto_map": [{"AutoConfig": "a.B"}, 5],
    "quantization_config": [{"quant_method": "gptq"}, 5, [1], "fp8"], "num_labels": [10**9, -1], "id2label": [{"a": 1}, 5],
    "per_layer_config": [{"0": {"head_dim": 4}}, {"1": {"sliding_window": 4}}, {"0": {"intermediate_size": 4}}, 5],
    "dtype": ["bfloat16", "int3", "nn", 5], "torch_dtype": ["float64", "int3", 5], "attn_implementation": ["nonsense", 5],
    "validate": [5], "get_text_config": [5], "to_dict": ["x"], "attribute_map": [{}, 5], "__class__": [5], "__dict__": [{}],
    "is_encoder_decoder": [True], "architectures": [5, ["Llama"]], "use_sliding_window": [True], "name_or_path": ["\x1b[31m"],
    "model_type": ["bert", "gpt2", "", "../x", "a\nb", "mixtral", "qwen2"], "kv_lora_rank": [4, 0, -1],
    "pad_token_id": [VOCABULARY, -1, -VOCABULARY - 1, 10**6],
}  # fmt: skip


def mutated(base: dict[str, Any], draw: random.Random) -> bytes:
    """JSON with one to three values changed, or with bytes changed."""
    config = copy.deepcopy(base)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        _change(config, draw)
    text = json.dumps(config).encode()
    if draw.random() < 0.15:
        text = b'{"a":' * 2000 + text + b"}" * 2000 if draw.random() < 0.1 else bytes_changed(text, len(text), draw)
    return text


def _change(config: dict[str, Any], draw: random.Random) -> None:
    (values, key), (others, other) = (draw.choice(_places(config) or [(config, "num_hidden_layers")]) for _ in range(2))
    value = values.get(key)
    how = draw.choices(("replace", "delete", "duplicate", "nest", "retype", "insert"), (8, 2, 1, 1, 3, 4))[0]
    if how == "insert":
        values, key = config, draw.choice(sorted(_KEYS))
        value = draw.choice(_KEYS[key])
    elif how == "replace":
        value = draw.choice(_NUMBERS if draw.random() < 0.6 else _OTHERS)
    elif how == "duplicate":
        value = others.get(other)
    elif how == "retype":
        number = float(value) if isinstance(value, int) else 4.0
        value = draw.choice((str(value), [value], {"value": value}, bool(value), number))
    elif how == "nest":
        for _ in range(draw.choice((1, 2, 40))):
            value = [value] if draw.random() < 0.5 else {draw.choice((key, "a", "text_config")): value}
    values[key] = copy.deepcopy(value)
    if how == "delete":
        del values[key]


def _places(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every value of the objects in a config, as the object and its key."""
    found = [(config, key) for key in config]
    return found + [place for value in config.values() if isinstance(value, dict) for place in _places(value)]


def bytes_changed(data: bytes, reach: int, draw: random.Random) -> bytes:
    """Some of the first `reach` bytes are other ones, are too many or are missing; most often a count, a length or a type."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        start, how = draw.randrange(max(1, min(reach, len(changed)))), draw.randrange(5)
        if how == 0:
            changed[start : start + 1] = bytes(byte ^ (1 << draw.randrange(8)) for byte in changed[start : start + 1])
        elif how == 1:
            width = draw.choice((1, 4, 8))
            value = draw.choice((0, 1, 8, 9, 13, 2**7, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)) % 2 ** (8 * width)
            changed[start : start + width] = value.to_bytes(width, "little")
        elif how == 2:
            del changed[start : start + draw.choice((1, 1, 8, 100))]
        elif how == 3:
            changed[start:start] = draw.choice((b'"', b"{", b"]", b"9" * 5000, b"\0", b"\xff\xfe", b"e9", draw.randbytes(8)))
        elif draw.random() < 0.3:
            changed = changed[:start]
    return bytes(changed)


_DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int8, torch.uint8, torch.bool,
           torch.complex64)  # fmt: skip
_EXTREME = (0.0, -0.0, 1e38, -3e38, 1e-45, float("inf"), float("nan"), 1e19)


def tensors_changed(data: bytes, draw: random.Random) -> bytes:
    """A weight file whose tensors are renamed, missing, too many, misshaped, mistyped, or hold what weights do not."""
    tensors = safetensors.torch.load(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        name = draw.choice(sorted(tensors))
        tensor = tensors[name]
        strange = ["", "lm_head.bias", "extra", f"../{name}", f"/{name}", f"a\x1b[31m{name}", f"{name}\n", "\u202e" + name]
        near = [
            f"{name}.x",
            f"{name}_scale",
            name.replace("layers.1", "layers.7"),
            name.replace("weight", "bias"),
            "lm_head.bias",
        ]
        how = draw.choice(("renamed", "missing", "doubled", "misshaped", "mistyped", "extreme"))
        if how in ("renamed", "missing"):
            del tensors[name]
        if how in ("renamed", "doubled"):
            tensors[draw.choice([*strange, *near])] = tensor.clone()
        elif how == "misshaped":
            as_many = [tensor.shape[::-1], [-1], [1, *tensor.shape], [*tensor.shape, 1], [1] * 6 + [-1]]
            less = [tensor.flatten()[: draw.choice((0, 1, tensor.numel() // 2))], tensor.flatten()[0]]
            tensors[name] = draw.choice([*map(tensor.reshape, as_many), *less]).contiguous()
        elif how == "mistyped":
            dtype = draw.choice(_DTYPES)
            tensors |= {one: tensors[one].to(dtype) for one in ([*tensors] if draw.random() < 0.2 else [name])}
        elif how == "extreme" and tensor.is_floating_point() and tensor.numel():
            place = slice(None) if draw.random() < 0.5 else draw.randrange(tensor.numel())
            tensor.view(-1)[place] = draw.choice(_EXTREME)
    return safetensors.torch.save(tensors, {"format": "pt"})


def weights_changed(data: bytes, draw: random.Random) -> bytes:
    """A weight file whose tensors are others, or whose header is, or whose bytes are."""
    header = 8 + struct.unpack("<Q", data[:8])[0]
    how = draw.random()
    if how < 0.6:
        return tensors_changed(data, draw)
    if how < 0.8:
        return bytes_changed(data, header if draw.random() < 0.6 else len(data), draw)
    text = mutated(json.loads(data[8:header]), draw)
    return struct.pack("<Q", len(text)) + text + data[header:]
