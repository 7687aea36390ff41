"""Turns the arguments of `convert mla` into a Plan, all from the config; `sizes` has the numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attention.errors import Refusal
from convert import methods
from convert.families.deepseek import NormalisedLatent
from convert.families.reading import require_proved
from convert.hosts import HOSTS, PORTABLE
from convert.hosts.engines import engine_of
from convert.methods.text import TextUse
from convert.output.destination import Output
from convert.planning.base import Plan, convertible, host_of, require_stored, stored_dtype, text_notes
from convert.planning.bounds import LatentBounds, smallest_latent
from convert.planning.calibration import CalibrationOptions, calibration_for
from convert.planning.held import require_held
from convert.planning.memory import require_room_to_write, with_default_healing
from convert.planning.portable import portable_calibration, portable_hint
from convert.planning.sizes import AUTO, LatentRequest, Sizing
from eval.machine.device import compute_device, require_device

if TYPE_CHECKING:
    from attention.spec import AttentionSpec
    from convert.families import Family
    from convert.hosts import Host
    from convert.hosts.engines import Engine
    from convert.methods.latent import LatentMethod
    from convert.planning.calibration import Calibration
    from convert.planning.targets import LatentTarget
    from eval.inputs.source import Source


def plan_latent(
    source: Source,
    size: LatentRequest,
    method: LatentMethod,
    calibration: CalibrationOptions,
    device: str,
    output: Output,
    seed: int = 0,
) -> Plan:
    """Plan a conversion to multi-head latent attention.

    Args:
        source: The checkpoint to convert.
        size: Rank and rotary dims, or a budget.
        method: One of `methods.LATENT`.
        calibration: The user's calibration options.
        device: As on the command line.
        output: Where the result goes.
        seed: For what the model writes, and the order in which refinement takes blocks of text.

    Raises:
        Refusal: The conversion is not possible; with the reason and the next step.
    """
    from convert.output.destination import check_output

    require_device(device)
    family = convertible(source)
    if isinstance(family, NormalisedLatent):
        raise Refusal(
            f"{source.reference} has latent attention already ({family.spec.kind}), and kvfold makes a smaller "
            "latent only of results of its own",
            hint="convert a model that caches keys and values, or the original of a portable result",
        )
    require_proved(family)
    if size.per_layer_ranks and size.pad_rank:
        raise Refusal(
            "give either --per-layer-ranks or --pad-rank: no layer has a rank beyond full size", hint="leave out --pad-rank"
        )
    dtype, engine = stored_dtype(source, output), engine_of(output.engine)
    # Whether any latent fits the source comes first: it is what most users have to know.
    bounds = LatentBounds(source, family, _host(source, family, size, engine))
    require_held(bounds.host, family, source, method)
    if engine and size.cache_dtype != AUTO:
        require_stored(engine, size.cache_dtype, engine.caches)
    sizing = Sizing(bounds, method, engine, dtype)
    targets = sizing.targets(size)
    if engine:
        targets = _checked(engine, bounds, targets)
    check_output(output.path, source.directory, output.overwrite, output.resume)
    text = _text(source, method, calibration, bounds.host, size)
    remarks = text_notes(method, text, family.traits.behind_projections)
    if targets[0].copies:
        target, text, remarks = targets[0], None, ["the calibration text is not used"] if text else []
    else:
        target = _with_choices(sizing, size, targets, text)
    require_room_to_write(source, text, compute_device(device))
    text = with_default_healing(source, text, compute_device(device))
    return Plan(source, family, target, text, output, device, seed, tuple(remarks))


def _host(source: Source, family: Family, size: LatentRequest, engine: Engine | None) -> Host:
    """The first output class that carries a latent of the source."""
    smallest = smallest_latent(family)
    if size.per_layer_ranks:
        smallest = replace(smallest, layer_ranks=(1,) * family.spec.num_layers)
    hosts = PORTABLE if size.portable else HOSTS["mla"]
    return host_of(hosts, family, source, smallest, engine, portable_hint(family, smallest, engine))


def _checked(engine: Engine, bounds: LatentBounds, targets: list[LatentTarget]) -> list[LatentTarget]:
    """The targets, with what the engine's user should know of the first; refused if the engine does not run them."""
    for target in targets:
        require_stored(engine, target.cache_dtype, engine.stores(bounds.host, target.spec))
    first, *others = targets
    _check_engine(engine, bounds.host, bounds.family, first.spec)
    note = engine.note(bounds.before)
    return [replace(first, notes=(*first.notes, note)) if note else first, *others]


def _check_engine(engine: Engine, host: Host, family: Family, spec: AttentionSpec) -> None:
    """Refuse what the engine does not run."""
    objection = engine.objection(host, family, spec)
    if objection is None:
        return
    raise Refusal(objection, hint="give another --kv-lora-rank, or --kv-budget, which finds one")


def _text(
    source: Source, method: LatentMethod, calibration: CalibrationOptions, host: Host, size: LatentRequest
) -> Calibration | None:
    """The calibration text, if the conversion has one."""
    if host.portable:
        calibration = portable_calibration(method, calibration)
    without = [name for name in methods.LATENT if methods.load_latent(name).text is not TextUse.NEEDED]
    text = calibration_for(source, method, calibration, without)
    if size.per_layer_ranks and text is None:
        raise Refusal("--per-layer-ranks needs calibration text, by which it chooses", hint="leave out --no-text")
    return text


def _with_choices(sizing: Sizing, size: LatentRequest, targets: list[LatentTarget], text: Calibration | None) -> LatentTarget:
    """The first target, with all that the text chooses among."""
    target, *others = targets
    if others and text is None:
        raise Refusal(
            "--cache-dtype auto needs calibration text, by which it chooses", hint="leave out --no-text, or name a format"
        )
    if text is None or size.kv_lora_rank is not None or not sizing.chosen_by_text:
        return target
    if not target.spec.qk_rope_head_dim and not others:
        return target
    note = "the search starts from this split of the cache; the text decides the split, one for all layers"
    if others:
        note = f"the text decides the format, among {_listed(targets, sizing.dtype)}, and then the split of the cache"
    splits = tuple(split for start in targets for split in sizing.splits(start, size))
    return replace(target, splits=splits, notes=(*target.notes, note))


def _listed(targets: list[LatentTarget], dtype: str) -> str:
    named = [f"{target.cache_dtype or dtype} at {target.spec.kind}" for target in targets]
    return f"{', '.join(named[:-1])} and {named[-1]}"
