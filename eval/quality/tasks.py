"""Tasks of lm-eval (the EleutherAI evaluation harness) on a model that is loaded already, with standard errors."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from attention import absorbed
from attention.errors import Failure, KvfoldError, Refusal, one_line
from attention.spec import AttentionSpec
from eval.inputs.source import Source, position_limit
from eval.inputs.text import Tokens
from eval.machine.device import input_device, memory_for, out_of_memory
from eval.quality.perplexity import finite
from eval.quality.settings import EvaluationSettings, TaskSettings
from eval.terminal.progress import Progress, stage

_log, _harness_log = logging.getLogger("kvfold"), logging.getLogger("lm_eval")
_BATCH = 8
_CONTEXT = 2048  # of prompts for models whose config names no limit
_DRAWS = 1000  # for standard errors of metrics that have no formula
# Tasks that ask what a model knows. A smaller cache harms these first, which an average over all tasks hides.
_KNOWLEDGE = ("mmlu", "cmmlu", "ceval", "agieval", "gpqa", "triviaqa", "nq_open", "webqs", "truthfulqa")


@dataclass(frozen=True)
class Tasks:
    """The probe for some models.

    Attributes:
        settings: Which tasks.
        manager: lm-eval's `TaskManager`, which finds them.
        tokenizer: The source's; the models share its vocabulary.
        context: Tokens that a prompt may have.
    """

    name: ClassVar[str] = "tasks"
    settings: TaskSettings
    manager: Any
    tokenizer: Any
    context: int

    @classmethod
    def asked(cls, settings: EvaluationSettings, sources: Sequence[Source], tokens: Tokens) -> Tasks | None:
        """See `eval.quality.probes.Probe`.

        Raises:
            Refusal: There is no task of a name.
            Failure: lm-eval is not installed, or the data of a task cannot be loaded.
        """
        wanted = settings.tasks
        if wanted is None:
            return None
        try:
            import lm_eval.tasks
        except ImportError:
            raise Failure("--tasks needs the package lm-eval", hint="pip install 'kvfold[harness]'") from None
        manager = _manager(lm_eval.tasks.TaskManager, wanted)
        return cls(wanted, manager, sources[0].tokenizer(), position_limit(sources) or _CONTEXT)

    def conditions(self) -> dict[str, Any]:
        """Conditions of the figures besides the model."""
        return {
            "lm_eval": version("lm_eval"),
            "limit": self.settings.limit,
            "context": self.context,
            "knowledge": list(_KNOWLEDGE),
        }

    def measure(self, model: Any, name: str, progress: Progress) -> dict[str, Any]:
        """Run the tasks.

        Returns:
            `{"results": {task: {metric: {"value", "stderr"}}}}`; "stderr" is None where lm-eval gives none. A name that stands
            for several tasks without one score of its own gives an entry for each of them.

        Raises:
            Failure: Logits or results are not finite, or memory does not suffice.
        """
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        room = memory_for("the tasks", "free some, or give --device cpu")
        found: dict[str, Any] = {}
        with stage(progress, f"tasks of {name}", len(self.settings.names), "task") as done, room, _decoding(model):
            with _quiet():
                harness = HFLM(pretrained=model, tokenizer=self.tokenizer, batch_size=_BATCH, max_length=self.context)
                harness._device = input_device(model)  # lm-eval takes the model's own, which is none where it is offloaded
            for task in self.settings.names:
                hint = f"does `lm-eval run --tasks {task}` work? otherwise leave it out"
                with _only_finite(model), _one_line(f"cannot run the task {task} of lm-eval on {name}", hint), _quiet():
                    result = simple_evaluate(
                        harness,
                        tasks=[task],
                        task_manager=self.manager,
                        limit=self.settings.limit,
                        bootstrap_iters=_DRAWS,
                        log_samples=False,
                    )
                found |= _results(task, result["results"] | result.get("groups", {}), name)
                done(1)
        return {"results": found}


def _manager(make: Any, wanted: TaskSettings) -> Any:
    """A task manager that knows all wanted names, whose data is there. It reads lm-eval's own thousands of files if needed.

    Raises:
        Refusal: There is no task of a name.
        Failure: A task cannot be loaded.
    """
    own = wanted.path is not None
    if own:
        _log.warning("the task files in %s can run code, and so can what lies beside them", wanted.path)
    hint = "its data comes from the Hub: run once with a network, or name tasks with local data by --task-path"
    for defaults in (False, True) if own else (True,):
        with _quiet():
            manager = make(include_path=str(wanted.path) if own else None, include_defaults=defaults)
        unknown = [name for name in wanted.names if name not in manager.all_tasks]
        if unknown and defaults:
            raise Refusal(
                f"no task {unknown[0]!r} in lm-eval {version('lm_eval')}{f' or {wanted.path}' if own else ''}",
                hint="`lm-eval ls tasks` lists its tasks; --task-path names a directory with others",
            )
        try:
            for name in [] if unknown else wanted.names:
                with _one_line(f"cannot load the task {name} of lm-eval", hint), _quiet():
                    manager.load([name])
        except Failure:
            if defaults:
                raise
            continue  # a group of one's own may have tasks of lm-eval's
        if not unknown:
            return manager
    raise AssertionError("the last manager is returned, or refused")


def _results(task: str, every: dict[str, Any], name: str) -> dict[str, dict[str, dict[str, float | None]]]:
    """The figures of a task or group or, where these have none of their own, of each task that it stands for."""
    if task in every and (whole := _figures(task, every[task], name)):
        return {task: whole}
    parts = {part: figures for part, result in every.items() if (figures := _figures(part, result, name))}
    if not parts:
        raise Failure(f"the task {task} of lm-eval gave no figures for {name}", hint="leave it out, or name its parts")
    return parts


def _figures(task: str, result: dict[str, Any], name: str) -> dict[str, dict[str, float | None]]:
    """Each metric of a task; lm-eval names them `acc,none` and `acc_stderr,none`, after the filter of answers."""
    found: dict[str, dict[str, float | None]] = {}
    for key, value in result.items():
        metric, _, chosen = key.partition(",")
        if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = result.get(f"{metric}_stderr,{chosen}")
        if not math.isfinite(value):
            raise Failure(
                f"{metric} of {task} is {value} for {name}",
                hint="evaluate in another --dtype (float32 is safest), or with a larger --limit",
            )
        label = metric if chosen == "none" else f"{metric} ({chosen})"
        known = isinstance(error, int | float) and math.isfinite(error)
        found[label] = {"value": float(value), "stderr": float(error) if known and error is not None else None}
    return found


@contextlib.contextmanager
def _one_line(what: str, hint: str) -> Iterator[None]:
    """Turn errors of lm-eval, of a task's file and of its data, which are of many classes, into a `Failure`."""
    try:
        yield
    except KvfoldError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise Failure(f"{what}: {type(error).__name__}: {one_line(error)}", hint=hint) from error


@contextlib.contextmanager
def _decoding(model: Any) -> Iterator[None]:
    """Decode over the latent where that is possible, as a served model does."""
    with contextlib.ExitStack() as stack:
        if AttentionSpec.from_config(model.config).kv_lora_rank is not None:
            try:
                stack.enter_context(absorbed(model))
            except KvfoldError as reason:
                _log.warning("%s decodes as transformers has it: %s", model.name_or_path, reason)
        yield


@contextlib.contextmanager
def _only_finite(model: Any) -> Iterator[None]:
    """Fail where logits are not finite: lm-eval would count them as wrong answers."""

    def check(module: Any, args: Any, output: Any) -> None:
        finite(output.logits, model)

    hook = model.register_forward_hook(check)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on stderr: lm-eval logs each step, draws bars, and lets git complain where it is not in a repository."""
    sys.stderr.flush()
    kept = os.dup(2)
    level = _harness_log.level
    _harness_log.setLevel(logging.ERROR)
    try:
        with Path(os.devnull).open("w") as nothing, contextlib.redirect_stderr(nothing):
            os.dup2(nothing.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        _harness_log.setLevel(level)
