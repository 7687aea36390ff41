"""Writes a checkpoint to OUTPUT: `with writing(…) as work:` holds the lock, keeps what is finished, and publishes at the end.

The checkpoint grows in a work directory beside OUTPUT:

    OUTPUT.partial/inputs.json    everything that its bytes depend on; a run with --resume must have the same
    OUTPUT.partial/steps/         finished steps: statistics of layers, notes of shards, choices; each with a checksum
    OUTPUT.partial/training/      states of a healing
    OUTPUT.partial/checkpoint/    is renamed to OUTPUT when it is complete
    OUTPUT.partial/replaced/      the checkpoint that was at OUTPUT, until the new one is

An interrupted run leaves it for `--resume`, which repeats what is not a finished step; a refused run removes it. Only
directories that kvfold marked are ever deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attention.errors import Failure, Interrupted, KvfoldError, Refusal
from convert.output.destination import (
    CHECKPOINT,
    INPUTS,
    Output,
    check_output,
    exclusive,
    partial_path,
    read_provenance,
    write_provenance,
)
from eval.inputs.reader import Reader
from eval.inputs.sealed import read_object, seal, sync_directory, sync_tree, unchanged, unsealed, write_whole
from eval.inputs.source import Source
from eval.machine.device import out_of_memory

_log = logging.getLogger("kvfold")
_STEPS, _TRAINING, _REPLACED = "steps", "training", "replaced"


@contextlib.contextmanager
def writing(
    noun: str, output: Output, models: Sequence[Source], inputs: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> Iterator[Work]:
    """Hold OUTPUT's lock and open its work directory; publish what the block has completed.

    Args:
        noun: For messages: "conversion".
        output: OUTPUT, and how to write it.
        models: The checkpoints that are read, that whose weights are rewritten last. None may change during the block.
        inputs: Everything that the bytes depend on.
        optional: Of these, what a resumed run may leave out.

    Yields:
        The work. Its `provenance` is that of an earlier run which has finished, and then there is nothing to do; else the
        block ends with `Work.complete`.

    Raises:
        KvfoldError: OUTPUT is unchanged; the work directory stays only if `--resume` can use it.
    """
    with exclusive(output.path), explained(noun, output.path):
        require_unchanged = watched(models)
        for model in models:  # again, now that no other run writes
            check_output(output, model.directory)
        work = Work(noun, output, models, inputs, optional or {})
        if work.provenance:
            _log.warning("%s is finished already, there is nothing to do", output.path)
            work.discard()
            yield work
            return
        try:
            work.begin()
            yield work
            assert work.provenance, "the block completes the work"
            work.kept = False  # no run can go on from a mixture
            require_unchanged()
            work.publish()
        except KvfoldError as error:
            if not (work.kept or isinstance(error, Interrupted)):
                work.discard()  # bad data leaves nothing
            raise
        work.discard()


@contextlib.contextmanager
def explained(noun: str, path: Path) -> Iterator[None]:
    """Turn an interrupt or a disk's error in the block into an error of the command."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted", hint=f"the same command with --resume finishes the {noun}") from None
    except OSError as error:
        raise Failure(f"the {noun} to {path} stopped: {error}", hint="fix the cause and rerun with --resume") from None


def watched(models: Sequence[Source]) -> Callable[[], None]:
    """Return a check that raises `Failure` if a weight file of the models has changed since: a result has one source."""

    def found() -> dict[str, list[int]]:
        return {
            model.reference if model.gguf else f"{model.reference}/{name}": stat
            for model in models
            for name, stat in model.fingerprint.items()
        }

    before = found()

    def require_unchanged() -> None:
        now = found()
        if changed := sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
            raise Failure(
                f"{changed[0]} has changed since this run began, so what was made of it is of no use",
                hint="begin again once nothing writes to the model any more",
            )

    return require_unchanged


class Work:
    """A checkpoint in progress. The caller holds the lock of OUTPUT.

    Args:
        noun, output, models, inputs, optional: As of `writing`.

    Attributes:
        noun: For messages.
        models: The checkpoints that are read.
        path: The directory of the growing checkpoint.
        steps: The directory of finished steps.
        training: The directory of a training's states.
        provenance: The content of conversion.json, once the checkpoint is complete.
        kept: Whether the directory stays for `--resume` after a failure, which is then not due to the data.
    """

    def __init__(
        self, noun: str, output: Output, models: Sequence[Source], inputs: Mapping[str, Any], optional: Mapping[str, Any]
    ) -> None:
        self.noun, self._given, self._output = noun, output, output.path.resolve()  # now: what appears later may be a link
        self._inputs = json.loads(json.dumps(inputs))  # as read back from a file
        self._digest = hashlib.sha256(json.dumps([self._inputs, dict(optional)], sort_keys=True).encode()).hexdigest()
        self.models, self._started, self._began = models, datetime.now(UTC), time.monotonic()
        self._root = partial_path(output.path)
        self._checked = set[str]()  # values whose files this run has written or checked
        self._replaceable: dict[str, tuple[int, int, int]] = {}
        self.kept = False
        self.path, self.steps, self.training = (self._root / part for part in (CHECKPOINT, _STEPS, _TRAINING))
        self.provenance = self._finished() if output.resume else None

    def _finished(self) -> dict[str, Any] | None:
        """The provenance of the checkpoint at OUTPUT, if an earlier run has made it of the same inputs.

        Raises:
            Refusal: It was made of others, or files are missing; and nothing says that it may be replaced.
        """
        output = self._given.path
        if self.path.exists() or not (provenance := read_provenance(output)):
            return None
        run = provenance.get("run")
        same, whole = isinstance(run, dict) and run.get("inputs") == self._digest, False
        with contextlib.suppress(Failure, OSError):
            whole = "model_type" in (read_object(output / "config.json") or {}) and bool(Reader(output).infos)
        if same and whole:
            return provenance
        if self._given.overwrite:
            return None
        raise Refusal(
            f"OUTPUT {output} exists already, and " + ("is not whole" if same else "was made by another command, or of others"),
            hint="make it again with --overwrite",
        )

    def begin(self) -> None:
        """Make the work directory, or go on with that of an interrupted run.

        Raises:
            Refusal: It was begun with other inputs.
        """
        begun = read_object(self._root / INPUTS) if self._given.resume else None
        if begun not in (None, self._inputs):
            if not self._given.overwrite:
                self.kept = True  # it is not this run's
                raise Refusal(
                    f"{self._root} was begun with other settings: {_changes(begun or {}, self._inputs)}",
                    hint="repeat the first command with --resume, or start again with --overwrite",
                )
            begun = None
        aside = self._root / _REPLACED
        if stopped := aside.exists() and not os.path.lexists(self._output):  # between the two renames of `publish`
            aside.rename(self._output)
        self._replaceable = _content(self._output) if self._given.overwrite or stopped else {}
        if begun is None:
            self.discard()
        self._root.mkdir(parents=True, exist_ok=True)
        write_whole(self._root / INPUTS, json.dumps(self._inputs, indent=1).encode())
        for part in (self.path, self.steps, self.training):
            if part.is_symlink() or part.is_file():
                part.unlink()
            part.mkdir(exist_ok=True)
        sync_directory(self._root)
        sync_directory(self._root.parent)

    @contextlib.contextmanager
    def kept_without_memory(self, device: Any, hint: str) -> Iterator[None]:
        """Turn a lack of memory on a device, in the block, into `Failure`; the directory stays for `--resume`."""
        try:
            yield
        except KvfoldError:  # a Failure is a RuntimeError, too, and has said what to do
            raise
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.kept = True
            raise Failure(f"no memory left on {device}: {' '.join(str(error).split())[:120]}", hint=hint) from None

    def recall(self, name: str) -> Any | None:
        """The value that this or an earlier run stored under a name, or None. Files that it is about must be as they were.

        They are read on the first call.
        """
        noted = unsealed(self.steps / f"{name}.json")
        if noted is None or "files" not in noted or not (name in self._checked or unchanged(self.path, noted["files"])):
            return None
        self._checked.add(name)
        return noted["value"]

    def remember(self, name: str, value: Any, files: Mapping[str, str] | None = None) -> None:
        """Store a JSON value for a resumed run.

        Args:
            name: Its name; that of a finished shard is the file's.
            value: Any JSON value except None.
            files: The files of the checkpoint that it is about, with their checksums, as from `write_shard`.
        """
        seal(self.steps / f"{name}.json", {"value": value, "files": dict(files or {})})
        self._checked.add(name)

    def require_space(self, needed: int) -> None:
        """Fail if the disk cannot hold `needed` more bytes; finished steps stay for `--resume`."""
        free = shutil.disk_usage(self.path).free
        if needed <= free:
            return
        if resumable := any(any(part.iterdir()) for part in (self.steps, self.training)):
            self.kept = True
        raise Failure(
            f"no space: {self._root.parent} has {free / 1e9:.3f} GB free, the conversion needs {needed / 1e9:.3f} GB",
            hint="free some, then use --resume" if resumable else "free some, or choose an OUTPUT on another disk",
        )

    def complete(self, provenance: Mapping[str, Any], card: str) -> dict[str, Any]:
        """Write the card and conversion.json, the last files of a checkpoint. Returns the content of conversion.json.

        Args:
            provenance: conversion.json, without its entry `run`, which differs between runs of the same inputs.
            card: The text of README.md.
        """
        (self.path / "README.md").write_text(card, encoding="utf-8")
        files = {
            ("" if model is self.models[-1] else "teacher/") + name: stat
            for model in self.models
            for name, stat in model.fingerprint.items()
        }
        run = {
            "output": str(self._given.path),
            "source_files": files,
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._began, 3),
            "machine": platform.node(),
            "inputs": self._digest,
        }
        self.provenance = {**provenance, "run": run}
        write_provenance(self.path, self.provenance)
        return self.provenance

    def publish(self) -> None:
        """Move the checkpoint to OUTPUT. One that it replaces steps aside first, and comes back if a run begins again.

        Raises:
            Failure: Something is there that may not be replaced: it has appeared or changed since this run began.
        """
        sync_tree(self.path)
        self.kept = True
        if self._replaceable and _content(self._output) == self._replaceable:
            shutil.rmtree(self._root / _REPLACED, ignore_errors=True)  # left by a run that was stopped at this point
            self._output.rename(self._root / _REPLACED)
        try:
            self.path.rename(self._output)  # which the system refuses over all but an empty directory
        except OSError:
            if not os.path.lexists(self._output):
                raise
            raise Failure(
                f"OUTPUT {self._output} is in the way: it has appeared or changed since this run began",
                hint="move it away; then the same command with --resume publishes the result, which is complete",
            ) from None
        sync_directory(self._root)
        sync_directory(self._output.parent)

    def discard(self) -> None:
        """Remove everything: the run was refused, or OUTPUT is complete. The inputs go last: they mark the rest as ours."""
        for part in (CHECKPOINT, _STEPS, _TRAINING, _REPLACED):
            shutil.rmtree(self._root / part, ignore_errors=True)
        shutil.rmtree(self._root, ignore_errors=True)


def _changes(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The inputs that differ, in words."""
    said = []
    for key in sorted(key for key in {*begun, *now} if begun.get(key) != now.get(key)):
        then, later = ("others" if isinstance(one.get(key), dict) else one.get(key) for one in (begun, now))
        said.append(f"{key}: {then} then, {later} now")
    return "; ".join(said)


def _content(path: Path) -> dict[str, tuple[int, int, int]]:
    """Kind, size and modification time of what is at a path and in it, links not followed; {} if nothing is."""
    there = [path, *path.rglob("*")] if os.path.lexists(path) else []
    return {str(one): (stat.st_mode, stat.st_size, stat.st_mtime_ns) for one in there for stat in [one.lstat()]}
