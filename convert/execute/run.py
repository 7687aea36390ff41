"""Carry out a plan: shard by shard, layer by layer, read, transform, write, verify, publish.

It knows the order of work and nothing of heads, names or formulas: those are the family's, the method's and the host's.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from attention.errors import Failure, Interrupted, KvfoldError, Refusal
from convert.calibration.memory import release
from convert.calibration.survey import SAMPLE
from convert.checkpoint.lock import exclusive
from convert.checkpoint.reader import Reader
from convert.checkpoint.workdir import WorkDirectory, check_output, finished, recorded_recipe
from convert.checkpoint.writer import shard_names, write_index, write_shard
from convert.execute.card import model_card
from convert.execute.job import Job
from convert.execute.manifest import Unit, deal, units_of
from convert.execute.transform import Transform, decided, transform_of
from convert.methods.latent import LatentMethod
from convert.methods.text import TextUse
from convert.planning.base import Plan
from convert.planning.calibration import calibration_tokens, remarks
from eval.device import compute_device, out_of_memory
from eval.evaluation import Settings, evaluate, prepare
from eval.overlap import WARN_ABOVE
from eval.source import Source
from eval.text import Text, Tokens

# Copied byte for byte beside the weights. config.json, the card and the weights are written anew.
_COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "tekken.json",
    "generation_config.json", "chat_template*", "additional_chat_templates", "preprocessor_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip


def execute(
    plan: Plan,
    evaluate_on: Text | None = None,
    calibrate_on: Text | None = None,
    quiet: bool = False,
    surveys: Path | None = None,
    published: Callable[[], None] | None = None,
) -> Plan:
    """Write the plan's checkpoint.

    Args:
        plan: From `convert.planning.base` or `convert.planning.latent`.
        evaluate_on: Held-out text whose perplexity goes into the model card.
        calibrate_on: The text that `plan.calibration` speaks of.
        quiet: No progress bars.
        surveys: Where surveys of the source are kept for other conversions; None to keep none.
        published: Called when OUTPUT is whole, before what `--resume` knows it by is removed.

    Returns:
        The plan, with what the text had to decide.

    Raises:
        KvfoldError: With nothing new at OUTPUT; the work directory stays only if `--resume` can use it.
    """
    where = plan.output
    with exclusive(where.path):
        check_output(where.path, plan.source.directory, where.overwrite, where.resume)  # of what others have left by now
        return _execute(plan, evaluate_on, calibrate_on, quiet, surveys, published)


def _execute(
    plan: Plan,
    evaluate_on: Text | None,
    calibrate_on: Text | None,
    quiet: bool,
    surveys: Path | None,
    published: Callable[[], None] | None,
) -> Plan:
    started, clock = datetime.now(UTC), time.monotonic()
    settings = Settings(device=plan.device, quiet=quiet)
    if evaluate_on:
        prepare([plan.source], evaluate_on, settings)  # whatever is wrong with the text is wrong before the work
    tokens = calibration_tokens(plan.source, plan.calibration, calibrate_on)
    for remark in () if quiet else remarks(tokens, plan.source.config.hidden_size):
        print(f"warning: {remark}", file=sys.stderr)
    if plan.output.resume and not plan.output.overwrite:
        recipes = [one.recipe() for one in (*plan.splits, plan)]
        if recipe := finished(plan.output.path, recipes, tokens.hash if tokens else None):
            if not quiet:
                print(f"note: {plan.output.path} is finished already, nothing to do", file=sys.stderr)
            if published:
                published()
            return _decided(plan, recipe)
    directory = plan.source.files
    reader = Reader(directory)
    units = units_of(plan, reader)
    inputs = inputs_of(plan, reader, tokens)
    try:
        with WorkDirectory.opened(plan.output.path, inputs, plan.output.resume, plan.output.overwrite) as work:
            if not work.published:
                job = Job(
                    plan, reader, work, tokens, _device(plan), quiet, _survey_directory(plan, reader, work, tokens, surveys)
                )
                _require_space(job, units)
                job, units, transform, layers = _convert(job, units)
                plan = job.plan
                _write_config(plan, transform, work.path)
                _copy_companions(plan, directory, work.path)
                record = _record(job, units, layers, transform)
                if evaluate_on:
                    record["evaluation"] = _evaluate(job, evaluate_on, settings)
                (work.path / "README.md").write_text(model_card(plan, record, directory), encoding="utf-8")
                record["run"] = {
                    "output": str(plan.output.path),
                    "started": started.isoformat(timespec="seconds"),
                    "seconds": round(time.monotonic() - clock, 3),
                    "host": platform.node(),
                }
                text = json.dumps(record, indent=2, allow_nan=False) + "\n"
                (work.path / "conversion.json").write_text(text, encoding="utf-8")
                work.publish()
            if published:
                published()
            plan = _decided(plan, recorded_recipe(plan.output.path))
            work.discard()
            return plan
    except KeyboardInterrupt:
        raise Interrupted("interrupted", hint="the same command with --resume finishes the conversion") from None
    except OSError as error:
        raise Failure(
            f"conversion to {plan.output.path} stopped: {error}", hint="mend that, then repeat the command with --resume"
        ) from None


def _decided(plan: Plan, recipe: Mapping[str, Any] | None) -> Plan:
    """The plan as it was carried out."""
    return next((split for split in plan.splits if split.recipe() == recipe), plan)


def _survey_directory(plan: Plan, reader: Reader, work: WorkDirectory, tokens: Tokens | None, surveys: Path | None) -> Path:
    """Where statistics of this source on this text lie."""
    if surveys is None or tokens is None or plan.calibration is None:
        return work.survey
    found_in = [str(plan.source.files), plan.source.raw, reader.fingerprint(), tokens.hash, plan.calibration.context]
    seen = [*found_in, str(_device(plan)), _versions()]  # which round differently
    directory = surveys / hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _device(plan: Plan) -> torch.device:
    if plan.device == "auto" and plan.command != "mla" and plan.method.text is TextUse.IGNORED and not plan.calibration:
        return torch.device("cpu")  # pooling heads is too little work to move weights for
    return compute_device(plan.device)


def _convert(job: Job, units: list[Unit]) -> tuple[Job, list[Unit], Transform, list[dict[str, Any]]]:
    """Survey, allocate, and write every shard. A device without memory leaves what there is for `--resume`.

    Returns:
        The job with all of its plan decided, what is written, what was done to each layer, and what that changed.
    """
    try:
        job = decided(job)
        units = units_of(job.plan, job.reader)
        transform = transform_of(job)
        return job, units, transform, _write_weights(job, units, transform)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # torch's stubs forget it
        raise Failure(
            f"a decomposition failed: {' '.join(str(error).split())[:120]}",
            hint="the model's weights or activations are extreme; please report it",
        ) from None
    except KvfoldError:
        raise
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        job.work.keep()
        raise Failure(
            f"no memory left on {job.device}: {' '.join(str(error).split())[:120]}",
            hint="free some and repeat the command with --resume; or begin again with --overwrite and --device cpu or, with "
            "text, a shorter --calibration-context",
        ) from None


def inputs_of(plan: Plan, reader: Reader, tokens: Tokens | None) -> dict[str, Any]:
    """Everything that the bytes depend on, for `--resume` to compare."""
    return {
        **_settings(plan),
        "splits": [_settings(split) for split in plan.splits],
        "device": str(_device(plan)),
        "config": plan.source.raw,
        "files": reader.fingerprint(),
        "calibration_hash": tokens.hash if tokens else None,
        "versions": _versions(),
    }


def _settings(plan: Plan) -> dict[str, Any]:
    """Its recipe, but for where the text lies: which text it is, the hash of its tokens says."""
    ((command, options),) = plan.recipe().items()
    return {"command": command, **{name: value for name, value in options.items() if name != "text"}}


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("kvfold", "torch", "transformers", "safetensors")}


def _shards(plan: Plan, units: list[Unit]) -> dict[str, list[Unit]]:
    shards = deal(units, plan.output.max_shard_size)
    return dict(zip(shard_names(len(shards)), shards, strict=True))


def _require_space(job: Job, units: list[Unit]) -> None:
    """Refuse before the first byte what the disk cannot hold: shards, statistics, and the inputs of two layers at a time."""
    shards = _shards(job.plan, units)
    needed = sum(unit.nbytes for name, shard in shards.items() if job.work.done(name) is None for unit in shard)
    if job.tokens and needed:
        there = {file: file.stat().st_size for place in {job.surveys, job.work.survey} for file in place.iterdir()}
        needed += max(0, _survey_bytes(job, units) - sum(there.values()))
    job.work.require_space(needed)


def _survey_bytes(job: Job, units: list[Unit]) -> int:
    """What statistics, samples, the inputs of two layers at a time and layers converted in sequence take on the disk."""
    plan, calibration = job.plan, job.plan.calibration
    assert job.tokens is not None
    assert calibration is not None
    width, inputs = plan.source.config.hidden_size, 2 * 4 * len(job.tokens.ids) * plan.source.config.hidden_size
    sample = 2 * width * max(calibration.context or 0, SAMPLE)
    survey = plan.before.num_layers * (8 * width * (width + 1) + sample) + inputs
    if isinstance(plan.method, LatentMethod) and plan.method.survey_bytes:
        survey += plan.before.num_layers * plan.method.survey_bytes(plan.before)
    if not calibration.in_sequence:
        return survey
    return survey + inputs + sum(4 * math.prod(i.shape) for u in units if u.layer is not None for i in u.outputs.values())


def _write_weights(job: Job, units: list[Unit], transform: Transform) -> list[dict[str, Any]]:
    """Write every shard that is not there yet.

    Returns:
        Per layer, what the conversion changed.
    """
    work, shards = job.work, _shards(job.plan, units)
    total = sum(unit.nbytes for unit in units)
    # disable=None: tqdm draws only where stderr is a terminal.
    with tqdm(total=total, desc="convert", unit="B", unit_scale=True, file=sys.stderr, disable=job.quiet or None) as bar:
        for name, shard in shards.items():
            if work.done(name) is not None:
                bar.update(sum(unit.nbytes for unit in shard))
                continue
            tensors: dict[str, torch.Tensor] = {}
            dtypes = {tensor: info.dtype for unit in shard for tensor, info in unit.outputs.items()}
            note = list(_fill(job, shard, transform, tensors, bar))
            work.note(name, note, write_shard(work.path / name, tensors, dtypes, bar.update))
    if len(shards) > 1:
        contents = {name: [tensor for unit in shard for tensor in unit.outputs] for name, shard in shards.items()}
        write_index(work.path, contents, total)
    return sorted((entry for name in shards for entry in work.done(name) or []), key=lambda entry: entry["layer"])


def _fill(
    job: Job, shard: list[Unit], transform: Transform, into: dict[str, torch.Tensor], bar: Any
) -> Iterator[dict[str, Any]]:
    """Put one shard's tensors into `into`: mapped where they are copied, computed where they are converted."""
    for unit in shard:
        if unit.layer is None:
            into |= {name: job.reader[name] for name in unit.outputs}
            continue
        bar.set_postfix(layer=unit.layer, refresh=False)
        converted = transform.layer(unit.layer)
        for name, info in unit.outputs.items():
            found = converted.tensors[name].shape
            assert found == info.shape, f"{name} came out as {list(found)}, and config.json will say {list(info.shape)}"
        into |= converted.tensors
        release()
        yield dict(converted.note)


def _write_config(plan: Plan, transform: Transform, path: Path) -> None:
    config = plan.host.config(plan.source.raw, plan.source.config, plan.target, transform.rotary)
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


def _record(job: Job, units: list[Unit], layers: list[dict[str, Any]], transform: Transform) -> dict[str, Any]:
    """conversion.json, but for its `run`: the same for the same inputs and seed."""
    plan, reader, tokens = job.plan, job.reader, job.tokens
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
        "calibration_hash": tokens.hash if tokens else None,
        "calibration": {"text": tokens.name, "tokens": len(tokens.ids)} if tokens else None,
        **transform.found,
        "notes": [*plan.notes, *remarks(tokens, plan.source.config.hidden_size)],
        "layers": layers,
        "tensors": {
            "converted": sorted(converted),
            "cast": sorted(cast),
            "copied": sorted(written.keys() - converted - cast),
            "dropped": {name: _why_dropped(plan, name, reader) for name in sorted(reader.infos.keys() - written.keys())},
        },
        "versions": _versions(),
    }


def _why_dropped(plan: Plan, name: str, reader: Reader) -> str:
    if name in reader.aliases:
        return f"is {reader.aliases[name]}, to which the model ties it"
    return plan.host.drops(name) or plan.host.replaces


def _evaluate(job: Job, text: Text, settings: Settings) -> dict[str, Any]:
    plan = job.plan
    job.work.keep()  # the weights are whole, whatever is wrong with the evaluation
    result = Source.parse(str(job.work.path), plan.source.trust_remote_code)
    try:
        report = evaluate([plan.source, result], text, settings, job.tokens)
    except (Refusal, Failure) as error:
        raise Failure(
            f"the conversion is done, its evaluation failed: {error}",
            hint="the same command with --resume and without --evaluate publishes it",
        ) from error
    source, converted = report["models"]
    # The work directory's own name means nothing later, and conversion.json is not there yet to name method and text.
    source |= {"name": "source", "path": plan.source.reference}
    converted |= {
        "name": "converted",
        "path": "OUTPUT",
        "method": plan.applied_method,
        "calibration_hash": job.tokens.hash if job.tokens else None,
    }
    if not job.quiet and (converted["calibration_overlap"] or 0.0) > WARN_ABOVE:
        print(
            f"warning: {text.name} shares {converted['calibration_overlap']:.0%} of its runs with the calibration text: "
            "its perplexity is flattered",
            file=sys.stderr,
        )
    return report
