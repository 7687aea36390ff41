"""From the arguments of `convert gqa` and `convert mqa` to a Plan."""

from __future__ import annotations

from attention.errors import Refusal
from attention.spec import AttentionSpec
from convert import methods
from convert.checkpoint.workdir import check_output
from convert.families import Family
from convert.methods.grouped import GroupedMethod
from convert.methods.text import TextUse
from convert.planning.base import Output, Plan, host_of, readable, stored_dtype, text_notes
from convert.planning.calibration import Calibration, calibration_for
from eval.device import require_device
from eval.source import Source


def plan_grouped(
    command: str,
    source: Source,
    groups: int,
    method: GroupedMethod,
    seed: int,
    device: str,
    output: Output,
    calibration: Calibration | None = None,
    grouping: str = "contiguous",
) -> Plan:
    """Plan a conversion to `groups` KV heads.

    Raises:
        Refusal: With the reason and the next step.
    """
    require_device(device)
    family = readable(source)
    before = family.spec(source.config)
    target = before.grouped(groups)
    host = host_of(command, family, source, target, stored_dtype(source, output))
    if grouping == "similar" and method.partition is None:
        able = [name for name in methods.GROUPED if methods.load_grouped(name).partition]
        raise Refusal(
            f"method {method.name} does not say which heads are similar", hint=f"use --method {' or '.join(able)} for that"
        )
    text = calibration_for(source, family, method, calibration or Calibration(), methods.GROUPED)
    check_output(output.path, source.directory, output.overwrite, output.resume)
    notes = _notes(family, source, before, target, output.dtype, method, text)
    text = text if target != before else None  # there is nothing to calibrate in a copy
    return Plan(
        command, source, family, before, target, method, host, output, seed, device, notes, calibration=text, grouping=grouping
    )


def _notes(
    family: Family,
    source: Source,
    before: AttentionSpec,
    target: AttentionSpec,
    dtype: str | None,
    method: GroupedMethod,
    text: Calibration | None,
) -> tuple[str, ...]:
    if target == before:
        how = f"every tensor is cast to {dtype} and otherwise" if dtype else "every tensor is copied bit for bit,"
        copied = f"{before.num_kv_heads} KV heads are what the source has: {how} unchanged"
        return (copied, "the calibration text is not looked at") if text else (copied,)
    notes = list(text_notes(method, text, family.traits(source.config)))
    if method.text is not TextUse.IGNORED and family.traits(source.config).qk_norm:
        notes.append("queries and keys are normalised, so that keys are averaged and not turned towards each other")
    if family.merges_norm_gains(source.config):
        notes.append("inexact: keys are normalised with gains per head, and merged heads get the merged gains of their group")
    return tuple(notes)
