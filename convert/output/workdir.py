"""The work directory of a conversion, `OUTPUT.partial`; its checkpoint is renamed to OUTPUT when it is complete.

An interrupted run leaves it for `--resume`; a refused one removes it. Only directories that kvfold marked are ever
deleted. Files in it may be damaged in any way: any file whose checksum does not match is made again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attention.errors import Failure, Interrupted, KvfoldError, Refusal
from convert.output.destination import CHECKPOINT, INPUTS, PUBLISHED, is_published, partial_path
from eval.inputs.sealed import checksum, read_object, seal, sync_directory, sync_tree, unsealed, write_whole
from eval.machine.device import out_of_memory

# In the work directory, beside the inputs and the growing checkpoint: a note for each finished shard, results of the survey,
# states of a training, and a checkpoint that was at OUTPUT before.
_NOTES, _SURVEY, _TRAINING, _REPLACED = "notes", "survey", "training", "replaced"


class WorkDirectory:
    """The work directory of one conversion, opened for some inputs. The caller holds the lock of OUTPUT.

    Args:
        output: OUTPUT, where the checkpoint will go.
        inputs: Everything that the bytes depend on. A resumed run must have the same.
        resume: Continue an unfinished conversion if its inputs are the same.
        overwrite: Start again if they are not.

    Attributes:
        path: The directory of the growing checkpoint.
        survey: The directory of the survey's results.
        training: The directory of a training's states.
        published: Whether the checkpoint is already at OUTPUT, so that only this directory is left to remove.
    """

    def __init__(self, output: Path, inputs: Mapping[str, Any], resume: bool, overwrite: bool) -> None:
        self._output = output.resolve()  # now: what appears later may be a link
        self._root = partial_path(output)
        self._done: dict[str, str] = {}  # the notes, as JSON, of shards that this run has written or checked
        self._kept = False
        self.path, self._notes, self.survey, self.training = (
            self._root / part for part in (CHECKPOINT, _NOTES, _SURVEY, _TRAINING)
        )
        inputs = json.loads(json.dumps(inputs))  # as read back from a file
        begun = self._known_inputs() if resume else None
        if begun != inputs and overwrite:
            begun = None
        if begun is not None and begun != inputs:
            changed = sorted(key for key in {*begun, *inputs} if begun.get(key) != inputs.get(key))
            values = "; ".join(f"{key}: {_short(begun.get(key))} then, {_short(inputs.get(key))} now" for key in changed)
            raise Refusal(
                f"{self._root} was begun with other settings: {values}",
                hint="repeat the first command with --resume, or start again with --overwrite",
            )
        self.published = begun is not None and is_published(self._root) and output.exists()
        if self.published:
            return
        if restored := (self._root / _REPLACED).exists() and not os.path.lexists(self._output):
            (self._root / _REPLACED).rename(self._output)
        self._replaceable = _content(self._output) if overwrite or restored else {}
        if begun is None:
            self.discard()
        elif (self._root / PUBLISHED).exists():  # the run stopped before the checkpoint moved to OUTPUT
            (self._root / PUBLISHED).replace(self._root / INPUTS)
        self._root.mkdir(parents=True, exist_ok=begun is not None)
        write_whole(self._root / INPUTS, json.dumps(inputs, indent=1).encode())
        for part in (self.path, self._notes, self.survey, self.training):
            if part.is_symlink() or part.is_file():
                part.unlink()
            part.mkdir(exist_ok=True)
        sync_directory(self._root)
        sync_directory(self._root.parent)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, output: Path, inputs: Mapping[str, Any], resume: bool, overwrite: bool) -> Iterator[WorkDirectory]:
        """A work directory that is removed if the block ends in a refusal or a failure: bad data leaves nothing.

        It stays for `--resume` after everything else (an interrupt, an OSError, a bug), and after `keep`. After `publish` it
        must be discarded by the caller.
        """
        work = cls(output, inputs, resume, overwrite)
        try:
            yield work
        except KvfoldError as error:
            if not (work._kept or work.published or isinstance(error, Interrupted)):
                work.discard()
            raise

    def keep(self) -> None:
        """From now on, leave the directory for `--resume` even after a failure, which is then not due to the data."""
        self._kept = True

    @contextlib.contextmanager
    def kept_without_memory(self, device: Any, hint: str) -> Iterator[None]:
        """Turn a lack of memory on a device, in the block, into `Failure`; the directory stays for `--resume`."""
        try:
            yield
        except KvfoldError:
            raise
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.keep()
            raise Failure(f"no memory left on {device}: {' '.join(str(error).split())[:120]}", hint=hint) from None

    def _known_inputs(self) -> dict[str, Any] | None:
        """None if it was killed before it was written, or lost with the power: begin again."""
        return next((inputs for name in (INPUTS, PUBLISHED) if (inputs := read_object(self._root / name)) is not None), None)

    def done(self, shard: str) -> Any | None:
        """The note of a finished shard, or None. Only verified shards have a note.

        On the first call for a shard, its file is read and must match the noted checksum.
        """
        if shard not in self._done:
            noted, file = unsealed(self._notes / f"{shard}.json"), self.path / shard
            if noted is None or not file.is_file() or noted["sha256"] != checksum(file):
                return None
            self._done[shard] = json.dumps(noted["value"])
        return json.loads(self._done[shard])

    def note(self, shard: str, value: Any, sha256: str | None = None) -> None:
        """Store `value` for a finished shard, so that a resumed run can still report it.

        Args:
            shard: The file's name.
            value: Any JSON value except None.
            sha256: The file's checksum from `write_shard`; None to compute it from the file.
        """
        seal(self._notes / f"{shard}.json", {"sha256": sha256 or checksum(self.path / shard), "value": value})
        self._done[shard] = json.dumps(value)

    def recall(self, name: str) -> Any | None:
        """The value that an earlier run stored under a name, or None."""
        noted = unsealed(self.survey / f"{name}.json")
        return None if noted is None else noted["value"]

    def remember(self, name: str, value: Any) -> None:
        """Store a JSON value for a resumed run."""
        seal(self.survey / f"{name}.json", {"value": value})

    def require_space(self, needed: int) -> None:
        """Fail if the disk cannot hold `needed` more bytes; finished shards stay for `--resume`."""
        free = shutil.disk_usage(self.path).free
        if needed <= free:
            return
        where = self._root.parent
        resumable = any(any(part.iterdir()) for part in (self._notes, self.survey, self.training))
        if resumable:
            self.keep()
        else:
            self.discard()
        raise Failure(
            f"no space: {where} has {free / 1e9:.3f} GB free, the conversion needs {needed / 1e9:.3f} GB",
            hint="free some, then use --resume" if resumable else "free some, or choose an OUTPUT on another disk",
        )

    def discard(self) -> None:
        """Remove everything: the run was refused, or OUTPUT is complete. The inputs go last: they mark the rest as ours."""
        for name in (CHECKPOINT, _NOTES, _SURVEY, _TRAINING, _REPLACED):
            shutil.rmtree(self._root / name, ignore_errors=True)
        shutil.rmtree(self._root, ignore_errors=True)

    def publish(self) -> None:
        """Move the checkpoint to OUTPUT. One that it replaces is moved here first. The caller discards what is left.

        Raises:
            Failure: Something is there that may not be replaced: it has appeared or changed since this run began.
        """
        sync_tree(self.path)
        self.keep()
        (self._root / INPUTS).replace(self._root / PUBLISHED)
        sync_directory(self._root)
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


def _content(path: Path) -> dict[str, tuple[int, int, int]]:
    """Kind, size and modification time of what is at a path and in it, links not followed; {} if nothing is."""
    there = [path, *path.rglob("*")] if os.path.lexists(path) else []
    return {str(one): (stat.st_mode, stat.st_size, stat.st_mtime_ns) for one in there for stat in [one.lstat()]}


def _short(value: Any) -> str:
    return "others" if isinstance(value, dict) else str(value)
