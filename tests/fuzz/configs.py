"""Mutated config.json files through `convert inspect` and `convert plan`: no traceback, no hang, one line to say what is wrong.

PYTHONPATH=tests python tests/fuzz/configs.py --count 2000 --seed 0
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import signal
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from click.testing import CliRunner
from tiny import VOCABULARY, tiny_config
from tiny_mla import LONGROPE, SIZES

from convert.command.cli import main as convert
from convert.families import FAMILIES

LIMIT = 20  # seconds for one command
COMMANDS = ("inspect", "plan")

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


class Hang(BaseException):
    """A command ran longer than `LIMIT`. No `except Exception` catches it."""


class Finding(NamedTuple):
    """A case that went wrong: "traceback", "hang", "exit code" or "several lines", the number of the case, and what it was."""

    kind: str
    case: int
    command: str
    detail: str
    config: bytes


def bases() -> list[dict[str, Any]]:
    """Small configs of every family, whole and without defaults, and of latent attention as `convert mla` writes it."""
    configs = [tiny_config(name) for name in sorted(FAMILIES)]
    configs += [tiny_config("deepseek_v3", **SIZES, **rope) for rope in ({}, {"rope_parameters": dict(LONGROPE)})]
    return [json.loads(config.to_json_string(use_diff=diff)) for config in configs for diff in (False, True)]


def mutated(base: dict[str, Any], draw: random.Random) -> bytes:
    """A config with one to three values changed, or with bytes changed."""
    config = copy.deepcopy(base)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        draw.choices((_replace, _delete, _duplicate, _nest, _retype, _insert), (8, 2, 1, 1, 3, 4))[0](config, draw)
    text = json.dumps(config).encode()
    if draw.random() < 0.15:
        text = b'{"a":' * 2000 + text + b"}" * 2000 if draw.random() < 0.1 else _bytes_changed(text, draw)
    return text


def _places(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every value of the objects in a config, as the object and its key."""
    found = [(config, key) for key in config]
    return found + [place for value in config.values() if isinstance(value, dict) for place in _places(value)]


def _any_place(config: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], str]:
    return draw.choice(_places(config) or [(config, "num_hidden_layers")])


def _replace(config: dict[str, Any], draw: random.Random) -> None:
    values, key = _any_place(config, draw)
    values[key] = copy.deepcopy(draw.choice(_NUMBERS if draw.random() < 0.6 else _OTHERS))


def _delete(config: dict[str, Any], draw: random.Random) -> None:
    values, key = _any_place(config, draw)
    values.pop(key, None)


def _duplicate(config: dict[str, Any], draw: random.Random) -> None:
    (values, key), (others, other) = _any_place(config, draw), _any_place(config, draw)
    values[key] = copy.deepcopy(others.get(other))


def _nest(config: dict[str, Any], draw: random.Random) -> None:
    values, key = _any_place(config, draw)
    for _ in range(draw.choice((1, 2, 40))):
        values[key] = [values.get(key)] if draw.random() < 0.5 else {draw.choice((key, "a", "text_config")): values.get(key)}


def _retype(config: dict[str, Any], draw: random.Random) -> None:
    values, key = _any_place(config, draw)
    value = values.get(key)
    values[key] = draw.choice(
        (str(value), [value], {"value": value}, bool(value), float(value) if isinstance(value, int) else 4.0)
    )


def _insert(config: dict[str, Any], draw: random.Random) -> None:
    key = draw.choice(sorted(_KEYS))
    config[key] = copy.deepcopy(draw.choice(_KEYS[key]))


def _bytes_changed(text: bytes, draw: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(draw.choice((1, 1, 2, 8))):
        start = draw.randrange(len(changed) + 1)
        how = draw.randrange(4)
        if how == 0:
            changed[start : start + 1] = bytes([draw.randrange(256)])
        elif how == 1:
            del changed[start : start + draw.choice((1, 1, 4, 100))]
        elif how == 2:
            changed[start:start] = draw.choice(
                (b'"', b"{", b"]", b",", b"9" * 5000, b"\x00", b"\xff\xfe", b"-", b"e9", b"\\u0000")
            )
        else:
            changed = changed[:start]
    return bytes(changed)


def run(command: str, directory: Path) -> tuple[str, str] | None:
    """Run a command on `directory`; what went wrong as (kind, detail), or None."""

    def stop(number: int, frame: types.FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        result = CliRunner().invoke(convert, [command, str(directory)], color=True)  # or click takes escapes out
    except Hang as error:
        return "hang", raised_at(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "traceback", raised_at(result.exception)
    if result.exit_code not in (0, 1, 2):
        return "exit code", str(result.exit_code)
    lines = result.stderr.splitlines()
    said = [line for line in lines if not line.startswith("hint: ")]
    if result.exit_code and not (len(said) == 1 and said[0].startswith("error: ") and len(lines) <= 2):
        return "several lines", repr(result.stderr[:400])
    if any(not c.isprintable() for c in "".join(lines)):
        return "several lines", f"control characters: {result.stderr[:400]!r}"
    return None


def raised_at(error: BaseException) -> str:
    """The error, and the last lines of code outside installed packages that led to it, the innermost first."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    lines = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))
    return f"{type(error).__name__}: {str(error)[:200]} ({lines})"


def cases(count: int, seed: int) -> Iterator[bytes]:
    """Configs, the same for the same seed; so many of them."""
    known = bases()
    for case in range(count):
        draw = random.Random(f"{seed}:{case}")
        yield mutated(draw.choice(known), draw)


def main(count: int, seed: int, report: Callable[[Finding], None] | None = None) -> list[Finding]:
    """Run `count` cases; what went wrong."""
    findings = []
    with tempfile.TemporaryDirectory() as directory:
        for number, config in enumerate(cases(count, seed)):
            (Path(directory) / "config.json").write_bytes(config)
            for command in COMMANDS:
                if wrong := run(command, Path(directory)):
                    findings.append(Finding(wrong[0], number, command, wrong[1], config))
                    if report:
                        report(findings[-1])
    return findings


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = main(given.count, given.seed, lambda one: print(*one[:4], one.config[:2000], flush=True))
    print(f"{given.count} cases, seed {given.seed}: {len(found)} wrong")
    sys.exit(bool(found))
