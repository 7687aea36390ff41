"""Carry out a plan: shard by shard, layer by layer, read, transform, write, verify, publish.

It knows the order of work and nothing of heads, names or formulas: those are the family's, the method's and the host's.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from attention.errors import Failure, Interrupted, KvfoldError
from convert.card import model_card
from convert.checkpoint import Reader, shard_names, write_index, write_shard
from convert.layout import Unit, convert_layer, deal, stored_dtype, units_of
from convert.methods.base import Draw
from convert.plan import Plan
from convert.workdir import WorkDirectory
from eval.evaluate import Settings, evaluate
from eval.source import Source
from eval.text import Text

# Copied byte for byte beside the weights. config.json, the card and the weights are written anew.
_COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "generation_config.json", "chat_template*", "preprocessor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip


def execute(plan: Plan, evaluate_on: Text | None = None, quiet: bool = False) -> None:
    """Write the plan's checkpoint.

    Args:
        plan: From `convert.plan`.
        evaluate_on: Held-out text whose perplexity goes into the model card.
        quiet: No progress bars.

    Raises:
        KvfoldError: With nothing left at OUTPUT; the work directory stays only if `--resume` can use it.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    directory = plan.source.files
    reader = Reader(directory)
    units = units_of(plan, reader)
    work = WorkDirectory(plan.output.path, {"recipe": plan.recipe(), "files": reader.fingerprint()}, plan.output.resume)
    try:
        layers = _write_weights(plan, reader, units, work, quiet)
        _write_config(plan, work.path)
        _copy_companions(plan, directory, work.path)
        record = _record(plan, reader, units, layers)
        if evaluate_on:
            record["evaluation"] = _evaluate(plan, work.path, evaluate_on, quiet)
        (work.path / "README.md").write_text(model_card(plan, record, directory), encoding="utf-8")
        record["run"] = {
            "output": str(plan.output.path),
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - clock, 3),
            "host": platform.node(),
        }
        (work.path / "conversion.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except KvfoldError:
        work.discard()
        raise
    except KeyboardInterrupt:
        raise Interrupted("interrupted", hint="the same command with --resume finishes the conversion") from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise Failure(
            f"cannot write {work.path}: {error.strerror}",
            hint="free some space, then repeat the command with --resume" if full else "repeat the command with --resume",
        ) from None
    work.publish()


def _write_weights(plan: Plan, reader: Reader, units: list[Unit], work: WorkDirectory, quiet: bool) -> list[dict[str, Any]]:
    """Write every shard that is not there yet.

    Returns:
        Per layer, what the conversion changed.
    """
    shards = deal(units, plan.output.max_shard_size)
    names = shard_names(len(shards))
    done = {name: work.done(name) for name in names}
    work.require_space(sum(u.nbytes for name, shard in zip(names, shards, strict=True) if done[name] is None for u in shard))
    layers: list[dict[str, Any]] = []
    # disable=None: tqdm draws only where stderr is a terminal.
    with tqdm(total=plan.before.num_layers, desc="convert", unit="layer", file=sys.stderr, disable=quiet or None) as bar:
        for name, shard in zip(names, shards, strict=True):
            if done[name] is None:
                tensors: dict[str, torch.Tensor] = {}
                note = list(_fill(plan, reader, shard, tensors, bar))
                write_shard(work.path / name, tensors, stored_dtype(plan))
                work.note(name, note)
            else:
                note = done[name] or []
                bar.update(len(note))
            layers += note
    if len(shards) > 1:
        contents = {n: [t for unit in s for t in unit.outputs] for n, s in zip(names, shards, strict=True)}
        write_index(work.path, contents, sum(unit.nbytes for unit in units))
    return sorted(layers, key=lambda entry: entry["layer"])


def _fill(plan: Plan, reader: Reader, shard: list[Unit], into: dict[str, torch.Tensor], bar: Any) -> Iterator[dict[str, Any]]:
    """Put one shard's tensors into `into`: mapped where they are copied, computed where they are converted."""
    width = getattr(plan.source.config, "initializer_range", 0.02)
    device = "cpu" if plan.device == "auto" else plan.device  # merging weights is too little work to move them for
    for unit in shard:
        if unit.layer is None:
            into |= {name: reader[name] for name in unit.outputs}
            continue
        tensors = {n: reader[n].to(device) for n in plan.family.shapes(plan.source.config, unit.layer)}
        # Seeded per layer, so that a resumed run draws what an uninterrupted one would have.
        draw = Draw(torch.Generator().manual_seed(plan.seed * 100_003 + unit.layer), width)
        before = plan.family.split(tensors, plan.source.config, unit.layer)
        after = convert_layer(plan, before, draw)
        converted = plan.host.tensors(plan.family, after, unit.layer)
        into |= {name: tensor.cpu() for name, tensor in converted.items()}
        yield {
            "layer": unit.layer,
            "k_error": _error(before.k, after.k),
            "v_error": _error(before.v, after.v),
            # What still lies where it was read from has been copied.
            "converted": [n for n, t in converted.items() if n not in tensors or t.data_ptr() != tensors[n].data_ptr()],
        }
        bar.update()


def _error(before: torch.Tensor, after: torch.Tensor) -> float:
    """Squared distance of each source head `[G, D, E]` from the one that replaces it, relative to its own square."""
    if after is before:
        return 0.0
    difference = before.unflatten(0, (after.shape[0], -1)) - after.float()[:, None]  # fp32, whatever the heads are in
    own = torch.linalg.vector_norm(before, dtype=torch.float32).clamp_min(1e-30)
    return float((torch.linalg.vector_norm(difference) / own) ** 2)


def _write_config(plan: Plan, path: Path) -> None:
    config = plan.host.config(plan.source.raw, plan.target)
    if plan.output.dtype:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = plan.output.dtype
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_companions(plan: Plan, directory: Path, path: Path) -> None:
    patterns = (*_COMPANIONS, "*.py") if plan.source.trust_remote_code else _COMPANIONS
    for file in sorted(directory.iterdir()):
        if file.is_file() and any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns):
            shutil.copyfile(file, path / file.name)


def _record(plan: Plan, reader: Reader, units: list[Unit], layers: list[dict[str, Any]]) -> dict[str, Any]:
    """conversion.json, but for its `run`: the same for the same inputs and seed."""
    written = {name for unit in units for name in unit.outputs}
    converted = {name for layer in layers for name in layer.pop("converted")}
    return {
        "kvfold": version("kvfold"),
        "source": {"model": plan.source.reference, "revision": plan.source.commit, "kind": plan.before.kind},
        "kind": plan.target.kind,
        "method": plan.method.name if converted else None,
        "recipe": plan.recipe(),
        "kv_bytes_per_token": {
            "before": plan.before.bytes_per_token(plan.source.dtype),
            "after": plan.target.bytes_per_token(plan.cache_dtype),
            "cache_dtype": plan.cache_dtype,
        },
        "calibration_hash": None,
        "notes": list(plan.notes),
        "layers": layers,
        "tensors": {
            "converted": sorted(converted),
            "copied": sorted(written - converted),
            "dropped": {name: f"shares memory with {kept}" for name, kept in reader.aliases.items()},
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")},
    }


def _evaluate(plan: Plan, path: Path, text: Text, quiet: bool) -> dict[str, Any]:
    result = Source.parse(str(path), plan.source.trust_remote_code)
    report = evaluate([plan.source, result], text, Settings(device=plan.device, quiet=quiet))
    for entry, name in zip(report["models"], ("source", "converted"), strict=True):
        entry |= {"name": name, "path": name}  # the work directory's own name means nothing later
    return report
