"""Many targets and methods from one source: one survey, one evaluation, one report."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attention.errors import Failure, Interrupted, Refusal
from convert import methods
from convert.calibration import Calibration, calibration_tokens
from convert.checkpoint import Reader
from convert.execute import execute, inputs_of
from convert.methods.grouped import GroupedMethod
from convert.methods.latent import LatentMethod
from convert.methods.text import TextUse
from convert.plan import Output, Plan, plan_grouped, readable
from convert.plan_latent import LatentSize, plan_latent
from convert.workdir import check_output, partial_path
from eval import report
from eval.evaluate import Settings, evaluate, prepare
from eval.source import Source
from eval.text import Text, Tokens

_SHARES = (0.25, 0.125)  # of the source's cache, if no latent is named
_LEDGER = "sweep.json"
_CONTROL = "random"  # ruins every model: only where it is asked for


@dataclass(frozen=True)
class Wanted:
    """What a sweep is to make.

    Attributes:
        groups: KV heads of GQA; None, with no latents either, for halves of the source's.
        latents: Sizes of MLA; None, with no groups either, for shares of the source's cache.
        methods: Names; None for all of them that can run, but for the control.
        calibration: Text for those that use it. Steps beyond a method (`--refine`, …) go to methods of our own alone.
        output: DIR, and how it is written.
        device: As on the command line.
        seed: Likewise.
    """

    groups: tuple[int, ...] | None
    latents: tuple[LatentSize, ...] | None
    methods: tuple[str, ...] | None
    calibration: Calibration
    output: Output
    device: str = "auto"
    seed: int = 0


def plans_for(source: Source, wanted: Wanted, quiet: bool = False) -> list[Plan]:
    """One plan for each target and method, in the order of the report.

    Raises:
        Refusal: Something that was asked for by name cannot be done. What was not asked for is left out.
    """
    plans: list[Plan] = []
    named = any(given is not None for given in (wanted.latents, wanted.groups, wanted.methods))
    for name, plan in _all(source, wanted):
        output = _output(wanted.output, name)
        check_output(output.path, source.directory, output.overwrite, output.resume)
        try:
            plans.append(plan(output))
        except Refusal as refusal:
            if named:
                raise
            if quiet:
                continue
            print(f"note: {name} is left out: {refusal}", file=sys.stderr)
    if not plans:
        raise Refusal(f"there is nothing to convert {source.reference} to", hint="see `convert inspect`")
    return plans


def sweep(plans: Sequence[Plan], calibrate_on: Text | None, evaluate_on: Text, settings: Settings) -> dict[str, Any]:
    """Convert by every plan, evaluate the results beside their source, and write the report.

    Args:
        plans: From `plans_for`. Results that an earlier sweep finished by the same plan stay.
        calibrate_on: The text that their calibration speaks of.
        evaluate_on: Held-out text.
        settings: Of the evaluation.

    Returns:
        The report, as it is written to DIR/report.

    Raises:
        KvfoldError: What is finished stays, for a resumed sweep.
    """
    directory, source = plans[0].output.path.parent, plans[0].source
    prepare([source], evaluate_on, settings)  # whatever is wrong with the text is wrong before the work
    try:
        directory.mkdir(parents=True, exist_ok=True)
        ledger = _Ledger(directory, calibrate_on)
        for plan in plans:
            if not ledger.has(plan):
                execute(plan, None, calibrate_on if plan.calibration else None, settings.quiet, directory / "survey")
                ledger.note(plan)
        results = [Source.parse(str(plan.output.path), source.trust_remote_code) for plan in plans]
        found = evaluate([source, *results], evaluate_on, settings)
        report.write(found, directory / "report")
    except KeyboardInterrupt:
        raise Interrupted("interrupted", hint="the same command with --resume finishes the sweep") from None
    except OSError as error:
        raise Failure(
            f"the sweep into {directory} stopped: {error}", hint="mend that, then repeat the command with --resume"
        ) from None
    shutil.rmtree(directory / "survey", ignore_errors=True)
    return found


def _all(source: Source, wanted: Wanted) -> list[tuple[str, Callable[[Output], Plan]]]:
    """The name of each result, and its plan for an output of that name."""
    heads, everything = _kv_heads(source), wanted.groups is None and wanted.latents is None
    groups = [heads >> i for i in range(1, heads.bit_length()) if heads % (1 << i) == 0] if everything else wanted.groups
    latents = [LatentSize(kv_share=share) for share in _SHARES] if everything else wanted.latents
    return [
        *(
            (f"gqa-{n}-{m.name}", _grouped(source, wanted, n, m))
            for n in groups or ()
            for m in map(methods.load_grouped, _chosen(methods.GROUPED, wanted))
        ),
        *(
            (f"mla-{_size_name(size)}-{m.name}", _latent(source, wanted, size, m))
            for size in latents or ()
            for m in map(methods.load_latent, _chosen(methods.LATENT, wanted))
            if m.text is not TextUse.NEEDED or wanted.calibration.given or wanted.methods
        ),
    ]


def _grouped(source: Source, wanted: Wanted, groups: int, method: GroupedMethod) -> Callable[[Output], Plan]:
    text = _calibration(method, wanted)
    return lambda output: plan_grouped("gqa", source, groups, method, wanted.seed, wanted.device, output, text)


def _latent(source: Source, wanted: Wanted, size: LatentSize, method: LatentMethod) -> Callable[[Output], Plan]:
    text = _calibration(method, wanted)
    return lambda output: plan_latent(source, size, method, text, wanted.device, output, wanted.seed)


def _calibration(method: GroupedMethod | LatentMethod, wanted: Wanted) -> Calibration:
    text = wanted.calibration
    if method.text is TextUse.IGNORED:
        return Calibration()
    return text if method.text is TextUse.USED else Calibration(text.given, text.tokens, text.context)


def _chosen(known: Sequence[str], wanted: Wanted) -> list[str]:
    if wanted.methods is None:
        return [name for name in known if name != _CONTROL]
    return [name for name in known if name in wanted.methods]


def _kv_heads(source: Source) -> int:
    return readable(source).spec(source.config).num_kv_heads


def _size_name(size: LatentSize) -> str:
    if size.kv_lora_rank is not None:
        return f"{size.kv_lora_rank}+{size.qk_rope_head_dim}"
    return f"{size.kv_share:.4%}".rstrip("0%").rstrip(".") + "%" if size.kv_share else f"{size.kv_bytes}B"


def _output(output: Output, name: str) -> Output:
    """That of one result: a resumed sweep may replace what a sweep made."""
    path = output.path / name
    return replace(output, path=path, overwrite=output.overwrite or (output.resume and name in _noted(output.path)))


def _noted(directory: Path) -> dict[str, Any]:
    """What the finished results of a sweep in DIR were made from, by name."""
    try:
        found = json.loads((directory / _LEDGER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _Ledger:
    """What the finished results of a sweep were made from, in DIR, so that a resumed one makes none of them twice.

    Args:
        directory: DIR.
        calibrate_on: The text that plans speak of.
    """

    def __init__(self, directory: Path, calibrate_on: Text | None) -> None:
        self._path, self._text, self._entries = directory / _LEDGER, calibrate_on, _noted(directory)
        self._tokens: dict[tuple[int | None, int | None], Tokens | None] = {}

    def has(self, plan: Plan) -> bool:
        """Whether a resumed sweep finds what the plan would make."""
        path = plan.output.path
        return (
            plan.output.resume
            and (path / "conversion.json").is_file()
            and not partial_path(path).exists()
            and self._entries.get(path.name) == self._inputs(plan)
        )

    def note(self, plan: Plan) -> None:
        self._entries[plan.output.path.name] = self._inputs(plan)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._entries, indent=1), encoding="utf-8")
        temporary.replace(self._path)

    def _inputs(self, plan: Plan) -> Any:
        calibration = plan.calibration
        key = (calibration.tokens, calibration.context) if calibration else (None, None)
        if key not in self._tokens:
            self._tokens[key] = calibration_tokens(plan.source, calibration, self._text)
        return json.loads(json.dumps(inputs_of(plan, Reader(plan.source.files), self._tokens[key])))
