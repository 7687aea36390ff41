"""The life of an output, from the lock to the publication: what a conversion and a healing have alike.

A command says what is its own by a `Task`; `carry_out` does the rest, in this order: lock OUTPUT, read the texts, find what an
earlier run has finished, open the work directory, make the checkpoint, evaluate it, write its provenance and its card, publish.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from attention.errors import Failure, Interrupted, Refusal
from attention.formats import rounding_of
from attention.spec import AttentionSpec
from convert.output.destination import Output, check_output, read_provenance
from convert.output.lock import exclusive
from convert.output.provenance import Clock, write_card, write_provenance
from convert.output.workdir import WorkDirectory
from eval.inputs.reader import fingerprint
from eval.inputs.source import Source
from eval.inputs.text import Text, Tokens
from eval.quality.evaluation import prepare, report_of
from eval.quality.origin import is_cached_in, stated_cache
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress

_log = logging.getLogger("kvfold")


class Made(NamedTuple):
    """What a task has made in its work directory.

    Attributes:
        provenance: conversion.json, without what `carry_out` adds: `evaluation` and `run`.
        seen: The text that the checkpoint was fitted to, which would flatter an evaluation; None if that is not compared.
    """

    provenance: dict[str, Any]
    seen: Tokens | None = None


class Task(Protocol):
    """A command that makes a checkpoint, once its texts are read.

    Attributes:
        noun: For messages: "conversion".
        labels: The names of its models and of its result in reports.
    """

    noun: ClassVar[str]
    labels: ClassVar[tuple[str, ...]]

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether OUTPUT holds what the task would make.

        Raises:
            Refusal: It holds something else.
        """

    @abstractmethod
    def idle(self) -> None:
        """Called instead of `make`, where an earlier run has made it all."""

    @abstractmethod
    def check(self) -> None:
        """Refuse what headers of weights show to be impossible, before anything is written."""

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """Everything that the result's bytes depend on, which `--resume` compares."""

    @abstractmethod
    def source_files(self) -> dict[str, Any]:
        """The fingerprints of the files that it reads."""

    @abstractmethod
    def make(self, work: WorkDirectory) -> Made:
        """Write the checkpoint into the work directory, all but its provenance and its card."""

    @abstractmethod
    def card(self, provenance: dict[str, Any]) -> str:
        """The text of README.md, from the provenance without its `run`: it holds nothing that differs between runs."""


@dataclass(frozen=True)
class Held:
    """A held-out text to evaluate on, and how.

    Attributes:
        text: The text.
        settings: How.
    """

    text: Text
    settings: EvaluationSettings


def carry_out(
    output: Output,
    models: tuple[Source, ...],
    begin: Callable[[Tokens | None], Task],
    held_out: Held | None,
    progress: Progress,
    published: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Make a checkpoint at OUTPUT.

    Args:
        output: OUTPUT, and how to write it.
        models: The checkpoints that are read, the source first. The result is evaluated beside them.
        begin: Reads the texts; it is given the tokens to evaluate on, if there are any, so that it can warn of an overlap.
        held_out: The text to evaluate on; its figures go into the provenance and the card.
        progress: Called with the progress of each stage.
        published: Called when OUTPUT is complete, before the work directory, by which `--resume` recognises it, is removed.

    Returns:
        The content of conversion.json.

    Raises:
        KvfoldError: OUTPUT is unchanged; the work directory stays only if `--resume` can use it.
    """
    path, resume, overwrite = output.path, output.resume, output.overwrite
    with exclusive(path):
        clock, require_unchanged = Clock(), watched(models)
        evaluated = prepare(models, held_out.text, held_out.settings)[1] if held_out else None
        task = begin(evaluated)
        if resume and not overwrite and task.is_finished():
            _log.warning("%s is finished already, there is nothing to do", path)
            task.idle()
            published()
            return read_provenance(path)
        task.check()
        for source in models:  # again, now that no other run writes
            check_output(path, source.directory, overwrite, resume)
        with explained(task.noun, path), WorkDirectory.opened(path, task.inputs(), resume, overwrite) as work:
            if work.published:  # an earlier run was stopped after OUTPUT appeared
                provenance = read_provenance(path)
                if not isinstance(provenance.get("recipe"), dict):
                    hint = "rerun with --overwrite and without --resume"
                    raise Refusal(
                        f"OUTPUT {path} exists already, and its conversion.json is damaged: it has no recipe", hint=hint
                    )
                task.idle()
            else:
                provenance, seen = task.make(work)
                if held_out:
                    write_provenance(work.path, provenance)  # the report reads method, text and healing from it
                    provenance |= {"evaluation": _evaluated(task, models, work, held_out, seen, progress)}
                write_card(work.path, task.card(provenance))
                provenance |= {"run": clock.run(path, task.source_files())}
                write_provenance(work.path, provenance)
                try:
                    require_unchanged()
                except Failure:
                    work.discard()  # no run can go on from a mixture
                    raise
                work.publish()
            published()
            work.discard()
            return provenance


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
    """What raises `Failure` once a weight file of the models is not as it is now: work is not to read two states of one."""

    def found() -> dict[str, list[int]]:
        return {str(model.files / name): stat for model in models for name, stat in fingerprint(model.files).items()}

    before = found()

    def require_unchanged() -> None:
        now = found()
        if changed := sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
            raise Failure(
                f"{changed[0]} has changed since this run began, so what was made of it is of no use",
                hint="begin again once nothing writes to the model any more",
            )

    return require_unchanged


def _formats(provenance: dict[str, Any], models: tuple[Source, ...]) -> tuple[str, ...]:
    """The format of the cache that the result was made for, if it was, and if the caches of all models can have it."""
    form = stated_cache(provenance)
    if form is None or rounding_of(form) is None:
        return ()
    for model in (model for model in models if is_cached_in(model, form)):
        if not AttentionSpec.from_config(model.config).takes(form):
            _log.warning("evaluated without caches in %s, which %s cannot have", form, model.reference)
            return ()
    return (form,)


def _evaluated(
    task: Task, models: tuple[Source, ...], work: WorkDirectory, held_out: Held, seen: Tokens | None, progress: Progress
) -> dict[str, Any]:
    """The report on the models and the result in the work directory, whose name does not get into it."""
    work.keep()  # the weights are complete even if the evaluation fails
    result = Source.parse(str(work.path), models[0].trust_remote_code)
    settings = replace(held_out.settings, cache_dtypes=_formats(read_provenance(work.path), (*models, result)))
    labelled = [replace(one, label=label) for one, label in zip((*models, result), task.labels, strict=True)]
    try:
        report = report_of(labelled, held_out.text, settings, seen, progress)
    except (Refusal, Failure) as error:
        raise Failure(
            f"the {task.noun} is done, its evaluation failed: {error}",
            hint="the same command with --resume and without --evaluate publishes it",
        ) from error
    for entry in report["models"]:
        entry["path"] = "OUTPUT" if entry["path"] == result.reference else entry["path"]
    return report
