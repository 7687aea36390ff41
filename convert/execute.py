"""Carry out a plan: shard by shard, layer by layer, read, transform, write, verify, publish.

It knows the order of work and nothing of heads, names or formulas: those are the family's, the method's and the host's.
"""

from __future__ import annotations

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
from convert.layout import Unit, deal, units_of
from convert.methods.base import Draw
from convert.plan import Plan
from convert.workdir import WorkDirectory
from eval.evaluate import Settings, evaluate, prepare
from eval.source import Source
from eval.text import Text

# Copied byte for byte beside the weights. config.json, the card and the weights are written anew.
_COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "tekken.json",
    "generation_config.json", "chat_template*", "additional_chat_templates", "preprocessor_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip


def execute(plan: Plan, evaluate_on: Text | None = None, quiet: bool = False) -> None:
    """Write the plan's checkpoint.

    Args:
        plan: From `convert.plan`.
        evaluate_on: Held-out text whose perplexity goes into the model card.
        quiet: No progress bars.

    Raises:
        KvfoldError: With nothing new at OUTPUT; the work directory stays only if `--resume` can use it.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    settings = Settings(device=plan.device, quiet=quiet)
    if evaluate_on:
        prepare([plan.source], evaluate_on, settings)  # whatever is wrong with the text is wrong before the work
    directory = plan.source.files
    reader = Reader(directory)
    units = units_of(plan, reader)
    work = WorkDirectory(plan.output.path, _decides(plan, reader), plan.output.resume)
    try:
        layers = _write_weights(plan, reader, units, work, quiet)
        _write_config(plan, work.path)
        _copy_companions(plan, directory, work.path)
        record = _record(plan, reader, units, layers)
        if evaluate_on:
            record["evaluation"] = _evaluate(plan, work.path, evaluate_on, settings)
        (work.path / "README.md").write_text(model_card(plan, record, directory), encoding="utf-8")
        record["run"] = {
            "output": str(plan.output.path),
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - clock, 3),
            "host": platform.node(),
        }
        (work.path / "conversion.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        work.publish()
    except KeyboardInterrupt:
        raise Interrupted("interrupted", hint="the same command with --resume finishes the conversion") from None
    except OSError as error:
        raise Failure(
            f"conversion to {plan.output.path} stopped: {error}", hint="mend that, then repeat the command with --resume"
        ) from None


def _decides(plan: Plan, reader: Reader) -> dict[str, Any]:
    """Everything that the bytes depend on, for `--resume` to compare."""
    ((command, options),) = plan.recipe().items()
    source = str(plan.source.directory.resolve()) if plan.source.directory else options["model"]
    return {
        **options,
        "command": command,
        "model": source,
        "device": plan.device,
        "config": plan.source.raw,
        "files": reader.fingerprint(),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("kvfold", "torch", "transformers", "safetensors")}


def _write_weights(plan: Plan, reader: Reader, units: list[Unit], work: WorkDirectory, quiet: bool) -> list[dict[str, Any]]:
    """Write every shard that is not there yet.

    Returns:
        Per layer, what the conversion changed.
    """
    shards = deal(units, plan.output.max_shard_size)
    names = shard_names(len(shards))
    todo = {name: shard for name, shard in zip(names, shards, strict=True) if work.done(name) is None}
    work.require_space(sum(unit.nbytes for shard in todo.values() for unit in shard))
    total = sum(unit.nbytes for unit in units)
    # disable=None: tqdm draws only where stderr is a terminal.
    with tqdm(total=total, desc="convert", unit="B", unit_scale=True, file=sys.stderr, disable=quiet or None) as bar:
        for name, shard in zip(names, shards, strict=True):
            if name in todo:
                _write(plan, reader, shard, work, name, bar)
            else:
                bar.update(sum(unit.nbytes for unit in shard))
    if len(shards) > 1:
        contents = {n: [t for unit in s for t in unit.outputs] for n, s in zip(names, shards, strict=True)}
        write_index(work.path, contents, total)
    return sorted((entry for name in names for entry in work.done(name) or []), key=lambda entry: entry["layer"])


def _write(plan: Plan, reader: Reader, shard: list[Unit], work: WorkDirectory, name: str, bar: Any) -> None:
    """One shard. What cannot be written for reasons in the source ends the conversion: nothing of it is kept."""
    tensors: dict[str, torch.Tensor] = {}
    dtypes = {tensor: info.dtype for unit in shard for tensor, info in unit.outputs.items()}
    try:
        note = list(_fill(plan, reader, shard, tensors, bar))
        write_shard(work.path / name, tensors, dtypes, bar.update)
    except KvfoldError:
        work.discard()
        raise
    work.note(name, note)


def _fill(plan: Plan, reader: Reader, shard: list[Unit], into: dict[str, torch.Tensor], bar: Any) -> Iterator[dict[str, Any]]:
    """Put one shard's tensors into `into`: mapped where they are copied, computed where they are converted."""
    config, groups = plan.source.config, plan.target.num_kv_heads
    device = "cpu" if plan.device == "auto" else plan.device  # merging weights is too little work to move them for
    for unit in shard:
        if unit.layer is None:
            into |= {name: reader[name] for name in unit.outputs}
            continue
        bar.set_postfix(layer=unit.layer, refresh=False)
        tensors = {name: reader[name].to(device) for name in plan.family.shapes(config, unit.layer)}
        # Seeded per layer, so that a resumed run draws what an uninterrupted one would have.
        draw = Draw(torch.Generator().manual_seed(plan.seed * 100_003 + unit.layer), getattr(config, "initializer_range", 0.02))
        before = plan.family.split(tensors, config, unit.layer)
        after = before if groups == before.num_kv_heads else plan.method.merge(before, groups, draw)
        converted = plan.host.tensors(plan.family, after, unit.layer)
        into |= {name: tensor.cpu() for name, tensor in converted.items()}
        yield {
            "layer": unit.layer,
            "k_error": _error(before.k, after.k),
            "v_error": _error(before.v, after.v),
            "converted": [name for name, tensor in converted.items() if not _is_copy(tensor, tensors.get(name))],
        }


def _is_copy(tensor: torch.Tensor, source: torch.Tensor | None) -> bool:
    return source is not None and (tensor.data_ptr() == source.data_ptr() or torch.equal(tensor, source))


def _error(before: torch.Tensor, after: torch.Tensor) -> float:
    """Squared distance of each source head `[G, D, E]` from the one that replaces it, relative to its own square."""
    if after is before:
        return 0.0
    distance = own = 0.0
    for heads, shared in zip(before.unflatten(0, (after.shape[0], -1)), after.float(), strict=True):
        members = heads.float()  # group by group: what is copied to fp32 stays small
        own += float(torch.linalg.vector_norm(members) ** 2)
        distance += float(torch.linalg.vector_norm(members - shared) ** 2)
    return distance / own if own else 0.0


def _write_config(plan: Plan, path: Path) -> None:
    config = plan.host.config(plan.source.raw, plan.target)
    if plan.output.dtype:
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": plan.output.dtype}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_companions(plan: Plan, directory: Path, path: Path) -> None:
    patterns = (*_COMPANIONS, "*.py") if plan.source.trust_remote_code else _COMPANIONS
    for item in sorted(directory.iterdir()):
        if not any(fnmatch.fnmatch(item.name, pattern) for pattern in patterns):
            continue
        if item.is_dir():
            shutil.copytree(item, path / item.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(item, path / item.name)


def _record(plan: Plan, reader: Reader, units: list[Unit], layers: list[dict[str, Any]]) -> dict[str, Any]:
    """conversion.json, but for its `run`: the same for the same inputs and seed."""
    written = {name: info for unit in units for name, info in unit.outputs.items()}
    converted = {name for layer in layers for name in layer.pop("converted")}
    cast = {n for n, info in written.items() if n in reader.infos and info.dtype != reader.infos[n].dtype} - converted
    return {
        "kvfold": version("kvfold"),
        "source": {"model": plan.source.reference, "revision": plan.source.commit, "kind": plan.before.kind},
        "kind": plan.target.kind,
        "method": plan.applied_method,
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
            "cast": sorted(cast),
            "copied": sorted(written.keys() - converted - cast),
            "dropped": {name: _why_dropped(name, reader) for name in sorted(reader.infos.keys() - written.keys())},
        },
        "versions": _versions(),
    }


def _why_dropped(name: str, reader: Reader) -> str:
    if name in reader.aliases:
        return f"is {reader.aliases[name]}, to which the model ties it"
    return "belonged to a KV head that was merged into another"


def _evaluate(plan: Plan, path: Path, text: Text, settings: Settings) -> dict[str, Any]:
    result = Source.parse(str(path), plan.source.trust_remote_code)
    try:
        report = evaluate([plan.source, result], text, settings)
    except Failure as error:
        raise Failure(
            f"the conversion is done, its evaluation failed: {error}",
            hint="the same command with --resume and without --evaluate publishes it",
        ) from error
    source, converted = report["models"]
    # The work directory's own name means nothing later, and conversion.json is not there yet to name the method.
    source |= {"name": "source", "path": plan.source.reference}
    converted |= {"name": "converted", "path": "OUTPUT", "method": plan.applied_method}
    return report
