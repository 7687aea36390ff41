"""Damage a checkpoint's weight file in many ways, convert it, and count what must never happen.

    python tests/fuzz/weight_files.py [COUNT] [SEED]

Every case is a tiny Llama whose model.safetensors has bytes flipped, its end cut off, or its header edited (tensors renamed,
missing, misshaped, mistyped, or anything else that JSON can say). `convert gqa` may refuse it with one line, or convert it.
It may not end in a traceback, take longer than 20 seconds, or write what transformers does not load whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # tests/, for tiny; the repository
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from click.testing import CliRunner
from tiny import tiny_config, tiny_model

SECONDS = 20.0
METHODS = ("mean", "mean", "mean", "aligned")
DTYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL", "U32", "C64", "F4", "X"]
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "C64": 8, "U32": 4}
ODD: tuple[Any, ...] = (None, -1, 0, 1, 2**31, 2**62, 2**63, 2**64, 1e308, "", "x", [], {}, [[]], True, "\x1b[31mred\x1b[0m\n")

Header = dict[str, Any]
Edit = Callable[[random.Random, Header, bytes], tuple[Header, bytes]]


@dataclass
class Outcome:
    """What came of all cases; `wrong` names those by number, kind and reason."""

    cases: int = 0
    accepted: int = 0
    wrong: list[str] = field(default_factory=list)


# ---- damage --------------------------------------------------------------------------------------------------------


def packed(header: Header, data: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def unpacked(whole: bytes) -> tuple[Header, bytes]:
    length = struct.unpack("<Q", whole[:8])[0]
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def laid_out(tensors: list[tuple[str, dict[str, Any], bytes]]) -> tuple[Header, bytes]:
    """A header whose offsets fit, for tensors with their bytes."""
    header: Header = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, entry, content in tensors:
        header[name] = entry | {"data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return header, data


def taken_apart(header: Header, data: bytes) -> list[tuple[str, dict[str, Any], bytes]]:
    entries = [(name, dict(entry)) for name, entry in header.items() if name != "__metadata__"]
    return [(name, entry, data[slice(*entry["data_offsets"])]) for name, entry in entries]


def renamed(draw: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    tensors = taken_apart(header, data)
    i = draw.randrange(len(tensors))
    name = tensors[i][0]
    odd = ["", "x", "__metadata__", f"../{name}", f"/{name}", f"a\x1b[31m{name}", f"{name}\n", "\u202e" + name]
    near = [name + ".x", name.upper(), name.replace("layers.1", "layers.7"), name.replace("weight", "bias"), tensors[0][0]]
    new = draw.choice([*odd, *near])
    tensors[i] = (new, *tensors[i][1:])
    return laid_out(tensors)


def missing(draw: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    tensors = taken_apart(header, data)
    for _ in range(min(len(tensors), draw.choice((1, 1, 2, 5)))):
        tensors.pop(draw.randrange(len(tensors)))
    return laid_out(tensors)


def misshaped(draw: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    """Another shape of as many values, or of other values that are there, too."""
    tensors = taken_apart(header, data)
    i = draw.randrange(len(tensors))
    name, entry, content = tensors[i]
    count = len(content) // WIDTHS[entry["dtype"]]
    as_many = [entry["shape"][::-1], [count], [1, *entry["shape"]], [*entry["shape"], 1], [count, 1], [1] * 70 + [count]]
    shape = draw.choice([*as_many, [], [0], [0, 2**63], [max(1, count // 2)], [count // 2, 2]])
    tensors[i] = (name, entry | {"shape": shape}, (content * 2)[: math.prod(shape) * WIDTHS[entry["dtype"]]])
    return laid_out(tensors)


def mistyped(draw: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    tensors = taken_apart(header, data)
    dtype = draw.choice(DTYPES)
    chosen = range(len(tensors)) if draw.random() < 0.2 else [draw.randrange(len(tensors))]
    for i in chosen:
        name, entry, content = tensors[i]
        count = len(content) // WIDTHS[entry["dtype"]]
        tensors[i] = (name, entry | {"dtype": dtype}, (content * 2)[: count * WIDTHS.get(dtype, 1)])
    return laid_out(tensors)


def doubled(draw: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    """Tensors that no config speaks of."""
    tensors = taken_apart(header, data)
    name, entry, content = draw.choice(tensors)
    new = draw.choice([name + "_scale", name.replace("weight", "bias"), "lm_head.bias", "extra", "model.layers.9.mlp.weight"])
    return laid_out([*tensors, (new, entry, content)])


def edited(draw: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    """One value of the header replaced by some other; offsets need not fit."""
    name = draw.choice(list(header))
    if draw.random() < 0.2 or name == "__metadata__":
        header[name] = draw.choice(ODD)
    else:
        key = draw.choice(list(header[name]))
        if key == "dtype" or draw.random() < 0.3:
            header[name][key] = draw.choice(ODD)
        else:
            header[name][key][draw.randrange(len(header[name][key]))] = draw.choice(ODD)
    return header, data


def extreme(draw: random.Random, header: Header, data: bytes) -> tuple[Header, bytes]:
    """Values of one tensor that floats can be and weights are not."""
    tensors = taken_apart(header, data)
    i = draw.randrange(len(tensors))
    name, entry, content = tensors[i]
    value = draw.choice([0.0, -0.0, 1e38, -3e38, 1e-45, float("inf"), float("nan"), 1e19])
    whole = draw.random() < 0.5
    count = len(content) // 4
    place = 4 * draw.randrange(count)
    changed = struct.pack("<f", value) * count if whole else content[:place] + struct.pack("<f", value) + content[place + 4 :]
    tensors[i] = (name, entry, changed)
    return laid_out(tensors)


EDITS: tuple[Edit, ...] = (renamed, missing, misshaped, mistyped, doubled, edited, extreme)


def flipped(draw: random.Random, whole: bytes) -> bytes:
    changed, header = bytearray(whole), 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(draw.choice((1, 1, 3, 20))):
        changed[draw.randrange(header if draw.random() < 0.6 else len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(draw: random.Random, whole: bytes) -> bytes:
    end = draw.choice([0, 1, 7, 8, 9, draw.randrange(len(whole)), len(whole) - 1])
    return draw.choice([whole[:end], whole + b"\0" * (end % 64 + 1), whole[:end] + b"\0" * (len(whole) - end)])


def lengthened(draw: random.Random, whole: bytes) -> bytes:
    """Another header length, or other JSON as the header."""
    header, data = unpacked(whole)
    if draw.random() < 0.5:
        return struct.pack("<Q", draw.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1, len(whole), len(whole) - 8])) + whole[8:]
    text = draw.choice([b"[" * 5000, b"{}", b"[]", b"null", b"\xff\xfe", b'{"a":' * 300, json.dumps(list(header)).encode()])
    return struct.pack("<Q", len(text)) + text + data


def damaged(draw: random.Random, whole: bytes) -> tuple[str, bytes]:
    """What was done, and the file."""
    kind = draw.choices(("bytes", "header"), (1, 3))[0]
    if kind == "bytes":
        change = draw.choice((flipped, flipped, cut, lengthened))
        return change.__name__, change(draw, whole)
    edit = draw.choice(EDITS)
    return edit.__name__, packed(*edit(draw, *unpacked(whole)))


# ---- runs ----------------------------------------------------------------------------------------------------------


class TooLongError(BaseException):
    """No `except Exception` of the code under test may catch it."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def not_loaded(path: Path) -> str | None:
    """Why transformers does not load a checkpoint whole, or None if it does."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        _, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return next((f"{key}: {sorted(map(str, found))[:2]}" for key, found in info.items() if found), None)


def _run(case: str, source: Path, out: Path, method: str, outcome: Outcome) -> None:
    from convert.command.cli import main as command

    outcome.cases += 1
    try:
        with limited(SECONDS):
            result = CliRunner().invoke(command, ["gqa", str(source), str(out), "--groups", "2", "--method", method])
    except TooLongError:
        outcome.wrong.append(f"{case}: hangs")
        return
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        outcome.wrong.append(f"{case}: {type(result.exception).__name__}: {str(result.exception)[:200]!r}")
    if any(not character.isprintable() and character != "\n" for character in result.output):
        outcome.wrong.append(f"{case}: control characters on the terminal: {result.output[:200]!r}")
    if result.exit_code == 0:
        outcome.accepted += 1
        if reason := not_loaded(out):
            outcome.wrong.append(f"{case}: not loadable: {reason}")


def main(count: int = 3000, seed: int = 0) -> Outcome:
    """Run `count` cases, the same for the same seed."""
    outcome, draw = Outcome(), random.Random(seed)
    with tempfile.TemporaryDirectory() as work:
        source, out = Path(work, "source"), Path(work, "out")
        tiny_model(tiny_config("llama", num_hidden_layers=2)).save_pretrained(source)
        file = source / "model.safetensors"
        whole = file.read_bytes()
        for number in range(count):
            kind, content = damaged(draw, whole)
            file.write_bytes(content)
            method = draw.choice(METHODS)
            _run(f"{number} {kind} {method}", source, out, method, outcome)
            for left in (out, out.with_name("out.partial")):
                shutil.rmtree(left, ignore_errors=True)
    return outcome


if __name__ == "__main__":
    found = main(*map(int, sys.argv[1:]))
    print("\n".join([f"{found.cases} cases, {found.accepted} accepted, {len(found.wrong)} wrong", *found.wrong]))
    raise SystemExit(bool(found.wrong))
