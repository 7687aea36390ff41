"""Where a conversion happens until it is whole: a directory beside OUTPUT that is renamed to OUTPUT at the end.

Nothing in it can be loaded before the rename, because config.json is written last. An interrupted run leaves it for
`--resume`; a refused one removes it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention.errors import Failure, Refusal

_PLAN, _NOTES = "plan.json", "notes"


def partial_path(output: Path) -> Path:
    """The work directory of OUTPUT."""
    return output.with_name(output.name + ".partial")


def check_output(output: Path, source: Path | None, overwrite: bool, resume: bool) -> None:
    """Refuse an OUTPUT that may not be written.

    Args:
        output: As the user gave it.
        source: The source's directory, if it is one.
        overwrite: Whether an existing checkpoint may be replaced.
        resume: Whether an unfinished conversion may be continued.
    """
    if source:
        whole, ours = source.resolve(), output.resolve()
        if whole == ours or whole in ours.parents or ours in whole.parents:
            raise Refusal(f"OUTPUT {output} and MODEL {source} lie inside each other", hint="choose an OUTPUT beside MODEL")
    if output.is_file():
        raise Refusal(f"OUTPUT {output} is a file", hint="give a directory that does not exist yet")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise Refusal(f"OUTPUT {output} exists already", hint="choose another, or replace it with --overwrite")
        if not (output / "config.json").is_file():
            raise Refusal(f"OUTPUT {output} is no checkpoint, so --overwrite leaves it alone", hint="choose another OUTPUT")
    partial = partial_path(output)
    if partial.exists() and not (resume or overwrite):
        raise Refusal(
            f"{partial} holds an unfinished conversion", hint="finish it with --resume, or start again with --overwrite"
        )


class WorkDirectory:
    """The directory of one conversion, opened for a plan.

    Args:
        output: Where it will end up.
        plan: Everything the bytes depend on. A resumed run must bring the same.
        resume: Continue what is there, if the plan is the same.

    Attributes:
        path: The work directory.
    """

    def __init__(self, output: Path, plan: Mapping[str, Any], resume: bool) -> None:
        self._output = output
        self.path = partial_path(output)
        known = self._known_plan() if resume else None
        if known is not None and known != plan:
            differs = sorted(key for key in {*known, *plan} if known.get(key) != plan.get(key))
            raise Refusal(
                f"{self.path} was begun with other settings: {', '.join(differs)} differ",
                hint="repeat the first command with --resume, or start again with --overwrite",
            )
        if known is None and self.path.exists():
            shutil.rmtree(self.path)
        (self.path / _NOTES).mkdir(parents=True, exist_ok=True)
        (self.path / _PLAN).write_text(json.dumps(plan, indent=1), encoding="utf-8")

    def _known_plan(self) -> Any:
        try:
            return json.loads((self.path / _PLAN).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # killed before or while the plan was written: nothing was done yet
            return None

    def done(self, shard: str) -> Any | None:
        """What was noted of a finished shard, or None. A shard bears its name only once it has been verified."""
        note = self.path / _NOTES / f"{shard}.json"
        if not (self.path / shard).is_file() or not note.is_file():
            return None
        return json.loads(note.read_text(encoding="utf-8"))

    def note(self, shard: str, value: Any) -> None:
        """Keep `value` for a finished shard, so that a resumed run can still report it."""
        temporary = self.path / _NOTES / f"{shard}.tmp"
        temporary.write_text(json.dumps(value), encoding="utf-8")
        temporary.replace(temporary.with_suffix(".json"))

    def require_space(self, needed: int) -> None:
        """Fail before the first byte if the disk cannot take `needed` bytes."""
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise Failure(
                f"no space: {self.path.parent} has {free / 1e9:.2f} GB free, the conversion needs {needed / 1e9:.2f} GB",
                hint="free some, or choose an OUTPUT on another disk",
            )

    def discard(self) -> None:
        """Remove everything: the run was refused."""
        shutil.rmtree(self.path, ignore_errors=True)

    def publish(self) -> None:
        """Become OUTPUT. An OUTPUT that is to be replaced steps aside first and goes last."""
        shutil.rmtree(self.path / _NOTES)
        (self.path / _PLAN).unlink()
        old = self._output.with_name(self._output.name + ".old")
        if self._output.exists():
            shutil.rmtree(old, ignore_errors=True)
            self._output.rename(old)
        self.path.rename(self._output)
        shutil.rmtree(old, ignore_errors=True)
