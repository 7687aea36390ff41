"""The work directory of a conversion, `OUTPUT.partial`; its checkpoint is renamed to OUTPUT when it is complete.

An interrupted run leaves it for `--resume`; a refused one removes it. Only directories that kvfold marked are ever
deleted. Files in it may be damaged in any way: any file whose checksum does not match is made again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention.errors import Failure, Interrupted, KvfoldError, Refusal
from convert.checkpoint.reader import Reader
from eval.inputs.sealed import checksum, read_object, seal, sync_directory, sync_tree, unsealed, write_whole
from eval.inputs.text import SELF

# In the work directory: the plan, a note for each finished shard, the growing checkpoint, results of the survey, and states of
# a training. When the checkpoint moves to OUTPUT, the plan is renamed, and a checkpoint that was at OUTPUT is moved here.
_PLAN, _NOTES, _CHECKPOINT, _SURVEY, _TRAINING = "plan.json", "notes", "checkpoint", "survey", "training"
_PUBLISHED, _REPLACED = "published.json", "replaced"
_RECORD = "conversion.json"  # in OUTPUT


def partial_path(output: Path) -> Path:
    """The work directory of OUTPUT, beside it."""
    whole = output.resolve()  # "." has no name
    return whole.with_name(whole.name + ".partial")


def check_output(output: Path, source: Path | None, overwrite: bool, resume: bool) -> None:
    """Refuse an OUTPUT that may not be written.

    Args:
        output: As the user gave it.
        source: The source's directory, if it is local.
        overwrite: Whether an existing checkpoint may be replaced.
        resume: Whether an unfinished conversion may be continued. A finished one at OUTPUT passes too: `finished` must then
            check which one it is.
    """
    _require_place(output)
    partial = partial_path(output)
    for ours in (output.resolve(), partial.resolve()) if source else ():
        whole = source.resolve() if source else ours
        if whole == ours or whole in ours.parents or ours in whole.parents:
            raise Refusal(f"OUTPUT {output} and MODEL {source} lie inside each other", hint="choose an OUTPUT beside MODEL")
    if output.is_dir() and any(output.iterdir()):
        if not (overwrite or (resume and (_is_published(partial) or _may_be_finished(output, partial)))):
            raise Refusal(f"OUTPUT {output} exists already", hint="choose another, or replace it with --overwrite")
        if not ({"kvfold", "recipe"} <= recorded(output).keys() or _is_published(partial)):
            raise Refusal(
                f"OUTPUT {output} has no conversion.json of kvfold, so --overwrite leaves it alone",
                hint="choose another OUTPUT",
            )
    if partial.exists() or partial.is_symlink():
        if not _is_ours(partial):
            raise Refusal(f"{partial} is in the way, and no conversion made it", hint="move it, or choose another OUTPUT")
        if not (resume or overwrite):
            raise Refusal(
                f"{partial} holds an unfinished conversion", hint="finish it with --resume, or start again with --overwrite"
            )


def _require_place(output: Path) -> None:
    """Refuse an OUTPUT where no directory can be renamed to: it has to be nothing yet, or a directory."""
    if output.is_symlink():
        raise Refusal(f"OUTPUT {output} is a link to {output.readlink()}", hint="give the directory that it is to be itself")
    if output.exists() and not output.is_dir():
        raise Refusal(f"OUTPUT {output} is {_kind(output)}", hint="give a directory that does not exist yet")
    if above := next((parent for parent in output.parents if parent.exists() and not parent.is_dir()), None):
        raise Refusal(f"OUTPUT {output} lies in {_kind(above)}, {above}", hint="give a directory that does not exist yet")
    if os.path.ismount(output):
        raise Refusal(f"OUTPUT {output} is a mount point, which cannot be renamed", hint="give a directory inside it")
    if not output.resolve().name or not _is_unicode(output):
        raise Refusal(f"OUTPUT {str(output)!r} is not a name for a directory", hint="choose another")


def _kind(path: Path) -> str:
    """Names what stands there instead of a directory."""
    kinds = {"a device": (path.is_char_device, path.is_block_device), "a FIFO": (path.is_fifo,), "a socket": (path.is_socket,)}
    return next((name for name, tests in kinds.items() if any(test() for test in tests)), "a file")


def _is_ours(partial: Path) -> bool:
    """Whether kvfold made this directory: it holds a plan, which is written first, or nothing yet."""
    if partial.is_symlink() or not partial.is_dir():
        return False
    there = {path.name for path in partial.iterdir()}
    return bool(there & {_PLAN, _PUBLISHED}) or there <= {f"{_PLAN}.tmp"}


def _is_published(partial: Path) -> bool:
    """Whether the checkpoint of a work directory is at OUTPUT, whole."""
    return read_object(partial / _PUBLISHED) is not None and not (partial / _CHECKPOINT).exists()


def _may_be_finished(output: Path, partial: Path) -> bool:
    """Whether OUTPUT holds a conversion and no other one is unfinished."""
    return isinstance(recorded(output).get("recipe"), dict) and not (partial.exists() or partial.is_symlink())


def begun(output: Path) -> dict[str, Any] | None:
    """The inputs of the unfinished work at OUTPUT, or None."""
    return read_object(partial_path(output) / _PLAN)


def finished(
    output: Path, recipes: Sequence[Mapping[str, Any]], hashes: Sequence[str | None], source_files: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Find the conversion that a run with `--resume`, without `--overwrite`, would repeat.

    Args:
        output: OUTPUT.
        recipes: The recipe of the run's plan, and those among which the text decides.
        hashes: Of the calibration texts' tokens, wherever the texts lie; None for what the model writes itself.
        source_files: The fingerprint of the source's files, as under `run` in conversion.json.

    Returns:
        The recipe by which the conversion at OUTPUT was made. None if the run has work to do.

    Raises:
        Refusal: OUTPUT holds another conversion, one of other source files, or one with missing files.
    """
    if not _may_be_finished(output, partial_path(output)):
        return None
    known = recorded(output)
    on = calibration_hashes(known)
    same_text = len(on) == len(hashes) and all(wanted in (None, found) for wanted, found in zip(hashes, on, strict=True))
    there = _without_text(known["recipe"]) if same_text else None
    same = next((recipe for recipe in recipes if _without_text(recipe) == there), None)
    if same is None:
        raise Refusal(
            f"OUTPUT {output} exists already, and was made by another recipe",
            hint="choose another OUTPUT, or replace it with --overwrite",
        )
    run = known.get("run")
    before = run.get("source_files") if isinstance(run, dict) else None
    if before is not None and before != source_files:
        raise Refusal(
            f"OUTPUT {output} exists already, and the source's files have changed since it was made",
            hint="make it again with --overwrite",
        )
    try:
        whole = _is_checkpoint(output) and bool(Reader(output).infos)
    except (Failure, OSError):
        whole = False
    if not whole:
        raise Refusal(f"OUTPUT {output} exists already, and is not whole", hint="make it again with --overwrite")
    return same


def calibration_hashes(record: Mapping[str, Any]) -> list[Any]:
    """The hashes of the texts that a record says its conversion was calibrated on."""
    calibration = record.get("calibration")
    found = calibration.get("texts") if isinstance(calibration, dict) else []
    return [one.get("hash") if isinstance(one, dict) else None for one in found] if isinstance(found, list) else []


def _without_text(recipe: Mapping[str, Any]) -> Any:
    """A recipe, `{command: options}`, as read back from JSON, without the path of its text."""
    plain = json.loads(json.dumps(recipe))
    return {command: without_text(options) if isinstance(options, dict) else options for command, options in plain.items()}


def without_text(options: Mapping[str, Any]) -> dict[str, Any]:
    """A command's options without its texts, which hashes of tokens identify wherever they lie; what is its own stays so."""
    given = options.get("text")
    own = SELF in (given if isinstance(given, list) else [given])
    plain = {name: value for name, value in options.items() if name not in ("text", "strings", "text_shares")}
    return plain | ({"text": SELF, "text_shares": options.get("text_shares")} if own else {})


def recorded(output: Path) -> dict[str, Any]:
    """conversion.json of an OUTPUT, empty if there is none that can be read."""
    return read_object(output / _RECORD) or {}


def _is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a model: a config with a model type, and weights."""
    weights = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    return "model_type" in (read_object(directory / "config.json") or {}) and bool(weights)


def _is_unicode(path: Path) -> bool:
    """Whether the path is valid Unicode, as safetensors needs."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


class WorkDirectory:
    """The work directory of one conversion, opened for a plan. The caller holds the lock of OUTPUT.

    Args:
        output: OUTPUT, where the checkpoint will go.
        plan: Everything that the bytes depend on. A resumed run must have the same.
        resume: Continue an unfinished conversion if its plan is the same.
        overwrite: Start again if it is not.

    Attributes:
        path: The directory of the growing checkpoint.
        survey: The directory of the survey's results.
        training: The directory of a training's states.
        published: Whether the checkpoint is already at OUTPUT, so that only this directory is left to remove.
    """

    def __init__(self, output: Path, plan: Mapping[str, Any], resume: bool, overwrite: bool) -> None:
        self._place(output)
        plan = json.loads(json.dumps(plan))  # as read back from a file
        known = self._known_plan() if resume else None
        if known != plan and overwrite:
            known = None
        if known is not None and known != plan:
            changed = sorted(key for key in {*known, *plan} if known.get(key) != plan.get(key))
            values = "; ".join(f"{key}: {_short(known.get(key))} then, {_short(plan.get(key))} now" for key in changed)
            raise Refusal(
                f"{self._root} was begun with other settings: {values}",
                hint="repeat the first command with --resume, or start again with --overwrite",
            )
        self.published = known is not None and _is_published(self._root) and output.exists()
        if self.published:
            return
        if (self._root / _REPLACED).exists() and not output.exists():  # restore the replaced checkpoint
            (self._root / _REPLACED).rename(output.resolve())
        if known is None:
            self.discard()
        elif (self._root / _PUBLISHED).exists():  # the run stopped before the checkpoint moved to OUTPUT
            (self._root / _PUBLISHED).replace(self._root / _PLAN)
        self._root.mkdir(parents=True, exist_ok=known is not None)
        write_whole(self._root / _PLAN, _json(plan))
        for part in (self.path, self._notes, self.survey, self.training):
            if part.is_symlink() or part.is_file():
                part.unlink()
            part.mkdir(exist_ok=True)
        sync_directory(self._root)
        sync_directory(self._root.parent)

    @classmethod
    def of_another(cls, output: Path) -> WorkDirectory:
        """The work directory that another process has opened, and that this one only reads."""
        work = cls.__new__(cls)
        work._place(output)
        return work

    def _place(self, output: Path) -> None:
        self._output = output
        self._root = partial_path(output)
        self._done: dict[str, str] = {}  # the notes, as JSON, of shards that this run has written or checked
        self._kept = False
        self.path, self._notes, self.survey, self.training = (
            self._root / part for part in (_CHECKPOINT, _NOTES, _SURVEY, _TRAINING)
        )

    @classmethod
    @contextlib.contextmanager
    def opened(cls, output: Path, plan: Mapping[str, Any], resume: bool, overwrite: bool) -> Iterator[WorkDirectory]:
        """A work directory that is removed if the block ends in a refusal or a failure: bad data leaves nothing.

        It stays for `--resume` after everything else (an interrupt, an OSError, a bug), and after `keep`. After `publish` it
        must be discarded by the caller.
        """
        work = cls(output, plan, resume, overwrite)
        try:
            yield work
        except KvfoldError as error:
            if not (work._kept or work.published or isinstance(error, Interrupted)):
                work.discard()
            raise

    def keep(self) -> None:
        """From now on, leave the directory for `--resume` even after a failure, which is then not due to the data."""
        self._kept = True

    def _known_plan(self) -> dict[str, Any] | None:
        """None if it was killed before it was written, or lost with the power: begin again."""
        return next((plan for name in (_PLAN, _PUBLISHED) if (plan := read_object(self._root / name)) is not None), None)

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
        """Remove everything: the run was refused, or OUTPUT is complete. The plan goes last: it marks the rest as ours."""
        for name in (_CHECKPOINT, _NOTES, _SURVEY, _TRAINING, _REPLACED):
            shutil.rmtree(self._root / name, ignore_errors=True)
        shutil.rmtree(self._root, ignore_errors=True)

    def publish(self) -> None:
        """Move the checkpoint to OUTPUT. One that it replaces is moved here first. The caller discards what is left."""
        output = self._output.resolve()
        sync_tree(self.path)
        self.keep()
        (self._root / _PLAN).replace(self._root / _PUBLISHED)
        sync_directory(self._root)
        if output.exists():
            shutil.rmtree(self._root / _REPLACED, ignore_errors=True)  # left by a run that was stopped at this point
            output.rename(self._root / _REPLACED)
        self.path.rename(output)
        sync_directory(self._root)
        sync_directory(output.parent)


def _short(value: Any) -> str:
    return "others" if isinstance(value, dict) else str(value)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()
