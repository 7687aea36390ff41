"""Where a conversion happens until it is whole: `OUTPUT.partial`, whose checkpoint is renamed to OUTPUT at the end.

An interrupted run leaves it for `--resume`; a refused one removes it. Only what carries this file's own marks is ever
deleted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention.errors import Failure, Refusal

# In the work directory: the plan, a note for each finished shard, the checkpoint as it grows, and what a survey found. When the
# checkpoint goes to OUTPUT the plan gets another name, and what was at OUTPUT waits here.
_PLAN, _NOTES, _CHECKPOINT, _SURVEY = "plan.json", "notes", "checkpoint", "survey"
_PUBLISHED, _REPLACED = "published.json", "replaced"


def partial_path(output: Path) -> Path:
    """The work directory of OUTPUT, beside it."""
    whole = output.resolve()  # "." has no name of its own, and what a link points to may be on another disk
    return whole.with_name(whole.name + ".partial")


def check_output(output: Path, source: Path | None, overwrite: bool, resume: bool) -> None:
    """Refuse an OUTPUT that may not be written.

    Args:
        output: As the user gave it.
        source: The source's directory, if it is one.
        overwrite: Whether an existing checkpoint may be replaced.
        resume: Whether an unfinished conversion may be continued, be it finished but for its work directory.
    """
    if output.is_symlink() and not output.exists():
        raise Refusal(f"OUTPUT {output} is a link to nothing", hint="remove the link, or choose another OUTPUT")
    if output.is_file() or any(parent.is_file() for parent in output.parents):
        raise Refusal(f"OUTPUT {output} is a file, or lies in one", hint="give a directory that does not exist yet")
    if not output.resolve().name or not _is_unicode(output):
        raise Refusal(f"OUTPUT {str(output)!r} is no name for a directory", hint="choose another")
    partial = partial_path(output)
    for ours in (output.resolve(), partial.resolve()) if source else ():
        whole = source.resolve() if source else ours
        if whole == ours or whole in ours.parents or ours in whole.parents:
            raise Refusal(f"OUTPUT {output} and MODEL {source} lie inside each other", hint="choose an OUTPUT beside MODEL")
    if output.is_dir() and any(output.iterdir()):
        if not (overwrite or (resume and _is_published(partial))):
            raise Refusal(f"OUTPUT {output} exists already", hint="choose another, or replace it with --overwrite")
        if not _is_checkpoint(output):
            raise Refusal(f"OUTPUT {output} is no checkpoint, so --overwrite leaves it alone", hint="choose another OUTPUT")
    if partial.exists() or partial.is_symlink():
        if not _is_ours(partial):
            raise Refusal(f"{partial} is in the way, and no conversion made it", hint="move it, or choose another OUTPUT")
        if not (resume or overwrite):
            raise Refusal(
                f"{partial} holds an unfinished conversion", hint="finish it with --resume, or start again with --overwrite"
            )


def _is_ours(partial: Path) -> bool:
    """Whether a run of kvfold made this directory: it holds a plan, the first thing that is written, or nothing yet."""
    if partial.is_symlink() or not partial.is_dir():
        return False
    there = {path.name for path in partial.iterdir()}
    return bool(there & {_PLAN, _PUBLISHED}) or there <= {f"{_PLAN}.tmp"}


def _is_published(partial: Path) -> bool:
    """Whether the checkpoint of a work directory is at OUTPUT, whole."""
    return (partial / _PUBLISHED).is_file() and not (partial / _CHECKPOINT).exists()


def _is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a model: a config of some model type, and weights."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    weights = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    return isinstance(config, dict) and "model_type" in config and bool(weights)


def _is_unicode(path: Path) -> bool:
    """Whether safetensors can open files in it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


class WorkDirectory:
    """The directory of one conversion, opened for a plan.

    Args:
        output: Where the checkpoint will end up.
        plan: Everything the bytes depend on. A resumed run must bring the same.
        resume: Continue what is there, if the plan is the same.
        overwrite: Begin again if it is not.

    Attributes:
        path: The checkpoint as it grows.
        survey: What surveys of the source leave for the layer loop.
        published: Whether the checkpoint is at OUTPUT already, and only this directory is left to remove.
    """

    def __init__(self, output: Path, plan: Mapping[str, Any], resume: bool, overwrite: bool) -> None:
        self._output = output
        self._root = partial_path(output)
        self.path, self._notes, self.survey = (self._root / part for part in (_CHECKPOINT, _NOTES, _SURVEY))
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
        if (self._root / _PUBLISHED).exists():  # it stopped before the checkpoint went to OUTPUT
            (self._root / _PUBLISHED).replace(self._root / _PLAN)
        if (self._root / _REPLACED).exists() and not output.exists():  # what was whole stays until something else is
            (self._root / _REPLACED).rename(output.resolve())
        if known is None:
            self.discard()
        self._root.mkdir(parents=True, exist_ok=known is not None)
        _write_whole(self._root / _PLAN, plan)
        self.path.mkdir(exist_ok=True)
        self._notes.mkdir(exist_ok=True)
        self.survey.mkdir(exist_ok=True)

    def _known_plan(self) -> Any:
        for name in (_PLAN, _PUBLISHED):
            try:
                return json.loads((self._root / name).read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):  # killed before it was written, or lost with the power: begin again
                continue
        return None

    def done(self, shard: str) -> Any | None:
        """What was noted of a finished shard, or None. A shard is noted only once it has been verified."""
        try:
            note = json.loads((self._notes / f"{shard}.json").read_text(encoding="utf-8"))
            whole = (self.path / shard).stat().st_size == note["bytes"]
        except (FileNotFoundError, ValueError):
            return None
        return note["value"] if whole else None

    def note(self, shard: str, value: Any) -> None:
        """Keep `value` for a finished shard, so that a resumed run can still report it."""
        _write_whole(self._notes / f"{shard}.json", {"bytes": (self.path / shard).stat().st_size, "value": value})

    def require_space(self, needed: int) -> None:
        """Fail before the first byte if the disk cannot take `needed` bytes; finished shards stay for `--resume`."""
        free = shutil.disk_usage(self.path).free
        if needed <= free:
            return
        where = self._root.parent
        resumable = any(self._notes.iterdir()) or any(self.survey.iterdir())
        if not resumable:
            self.discard()
        raise Failure(
            f"no space: {where} has {free / 1e9:.3f} GB free, the conversion needs {needed / 1e9:.3f} GB",
            hint="free some, then use --resume" if resumable else "free some, or choose an OUTPUT on another disk",
        )

    def discard(self) -> None:
        """Remove everything: the run was refused, or OUTPUT is whole. The plan goes last: it marks the rest as ours."""
        for name in (_CHECKPOINT, _NOTES, _SURVEY, _REPLACED):
            shutil.rmtree(self._root / name, ignore_errors=True)
        shutil.rmtree(self._root, ignore_errors=True)

    def publish(self) -> None:
        """Put the checkpoint at OUTPUT. One that is to be replaced steps aside first. What is left here is to be discarded."""
        output = self._output.resolve()
        (self._root / _PLAN).replace(self._root / _PUBLISHED)
        if output.exists():
            output.rename(self._root / _REPLACED)
        self.path.rename(output)


def _short(value: Any) -> str:
    return "others" if isinstance(value, dict) else str(value)


def _write_whole(path: Path, value: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    temporary.replace(path)
