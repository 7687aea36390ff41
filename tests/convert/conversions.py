"""Conversions in every process that starts this: `conversions.py CASES`, a JSON file of [command, source, output, options].

STOP_AT is the layer at which the first process is interrupted when it puts it on the shelf.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from refitting import in_full

import convert
from convert.checkpoint.shelf import Shelf
from convert.console import console

put = Shelf.put
in_full()  # rounded products make differences between orders of sums a hundred times larger


def stopping(self: Shelf, layer: int, tensors: Any, note: Any) -> None:
    if layer == int(os.environ["STOP_AT"]) and self._name == "layer":
        raise KeyboardInterrupt
    put(self, layer, tensors, note)


if "STOP_AT" in os.environ:
    Shelf.put = stopping  # type: ignore[method-assign]
for command, source, output, options in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
    done = getattr(convert, command)(source, output, progress=console(1, False), **options)
    assert bool(done.record) == (os.environ["RANK"] == "0")
