"""The plans of a sweep: one for each target and method."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from attention.errors import Refusal
from convert import methods
from convert.methods.text import Method, TextUse
from convert.output.destination import check_output
from convert.planning.allowed import convertible
from convert.planning.base import Plan, Request
from convert.planning.calibration import CalibrationOptions, require_consistent
from convert.planning.plans import plan_grouped, plan_latent
from convert.planning.sizes import LatentSize

_log = logging.getLogger("kvfold")
_SHARES = (0.25, 0.125)  # of the source's cache, if no latent is given
REPORT = "report"  # in DIR


def plans_for(
    request: Request,
    groups: Sequence[int] | None = None,
    latents: Sequence[LatentSize] | None = None,
    names: Sequence[str] | None = None,
) -> list[Plan]:
    """One plan per target and method, in the order of the report.

    Args:
        request: What the user asks for; its output is DIR. At least one method must use its text. `--refit` applies to our
            own methods only.
        groups: KV heads of GQA; if None and `latents` is None too, halves of the source's.
        latents: Sizes of MLA; if None and `groups` is None too, shares of the source's cache.
        names: Of methods; None for all that can run.

    Raises:
        Refusal: Something that the user named cannot be done. Defaults that do not fit the source are
            left out.
    """
    source, calibration = request.source, request.text
    require_consistent(source.max_positions, calibration)
    candidates = _candidates(request, groups, latents, names)
    names_made = [name for name, *_ in candidates]
    if twice := [name for name in names_made if names_made.count(name) > 1]:
        raise Refusal(f"two targets would both be named {twice[0]}", hint="leave one of them out")
    _require_use(calibration, [method for _, method, _ in candidates])
    if idle := sorted(set(names or ()) - {method.name for _, method, _ in candidates}):
        raise Refusal(
            f"{' and '.join(idle)} of --methods can make none of the targets",
            hint=f"for --groups there are {', '.join(methods.GROUPED)}, for --mla {', '.join(methods.LATENT)}",
        )
    plans: list[Plan] = []
    for name, method, plan in candidates:
        output = replace(request.output, path=request.output.path / name)
        check_output(output, source.directory)
        try:
            plans.append(plan(replace(request, output=output, text=_calibration(method, calibration))))
        except Refusal as refusal:
            if any(given is not None for given in (latents, groups, names)):
                raise
            _log.warning("%s is left out: %s", name, refusal)
    if not plans:
        raise Refusal(f"there is nothing to convert {source.reference} to", hint="see `convert inspect`")
    there = request.output.path / REPORT
    if there.exists() and not (request.output.overwrite or request.output.resume):
        raise Refusal(f"{there} exists: an earlier sweep's report", hint="choose another DIR, or replace it with --overwrite")
    return plans


def _candidates(
    request: Request, groups: Sequence[int] | None, latents: Sequence[LatentSize] | None, names: Sequence[str] | None
) -> list[tuple[str, Method, Callable[[Request], Plan]]]:
    """The possible results: the name of the directory of each, the method that makes it, and what plans it."""
    heads = convertible(request.source).spec.num_kv_heads
    if groups is None and latents is None:
        groups = [heads >> i for i in range(1, heads.bit_length()) if heads % (1 << i) == 0]
        latents = [LatentSize(budget=share) for share in _SHARES]
    candidates: list[tuple[str, Method, Callable[[Request], Plan]]] = [
        (f"gqa-{n}-{m.name}", m, partial(plan_grouped, command="gqa", groups=n, method=m))
        for n in groups or ()
        for m in map(methods.load_grouped, methods.GROUPED)
    ]
    candidates += [
        (f"mla-{_size_name(size)}-{m.name}", m, partial(plan_latent, size=size, method=m))
        for size in latents or ()
        for m in map(methods.load_latent, methods.LATENT)
        if m.text is not TextUse.NEEDED or not request.text.no_text or names
    ]
    return [candidate for candidate in candidates if names is None or candidate[1].name in names]


def _require_use(wanted: CalibrationOptions, made_by: Iterable[Method]) -> None:
    """Refuse text that no method of the sweep uses, and steps that none takes."""
    uses = {method.text for method in made_by}
    steps = replace(wanted, texts=(), tokens=None, context=None, max_context=None).flags  # beyond a method
    for idle, enough in ((wanted.flags, TextUse.USED in uses or TextUse.NEEDED in uses), (steps, TextUse.USED in uses)):
        if idle and uses and not enough:
            known: list[Method] = [*map(methods.load_grouped, methods.GROUPED), *map(methods.load_latent, methods.LATENT)]
            ours = [method.name for method in known if method.text is TextUse.USED]  # with text, they can take these steps
            raise Refusal(
                f"no method of this sweep has any use for {idle}", hint=f"leave it out, or add {' or '.join(ours)} to --methods"
            )


def _calibration(method: Method, text: CalibrationOptions) -> CalibrationOptions:
    if method.text is TextUse.IGNORED:
        return CalibrationOptions()
    if method.text is TextUse.USED:
        return replace(text, heal=text.heal or 0)
    return CalibrationOptions(text.texts, text.tokens, text.context, no_text=text.no_text)


def _size_name(size: LatentSize) -> str:
    if size.kv_lora_rank is not None:
        return f"{size.kv_lora_rank}+{size.qk_rope_head_dim}"
    return f"{size.budget}B" if isinstance(size.budget, int) else f"{size.budget:.4%}".rstrip("0%").rstrip(".") + "%"
