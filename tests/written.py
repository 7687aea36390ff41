"""What tests of whole conversions share: results of commands, and checkpoints as they lie on disk."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# The beginning of a script for `python -c`: as on a machine where kvfold is not installed.
WITHOUT_KVFOLD = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("convert", "attention", "eval"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
try:
    import convert
except ImportError:
    pass
else:
    raise SystemExit("convert can be imported")
"""


def ok(result: Any) -> Any:
    assert result.exit_code == 0, result.output
    return result


def weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        part = load_file(file)
        assert not part.keys() & found.keys(), "a tensor is in two shards"
        found |= part
    return found


def same_but_for_the_run(a: Path, b: Path) -> None:
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir())
    records = [json.loads((path / "conversion.json").read_text()) for path in (a, b)]
    for record in records:
        del record["run"]
    assert records[0] == records[1]
    others = [name for name in names if name != "conversion.json"]
    assert filecmp.cmpfiles(a, b, others, shallow=False) == (others, [], [])
