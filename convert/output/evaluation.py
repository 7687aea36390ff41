"""Evaluates a complete checkpoint in its work directory, beside the models that it was made from."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attention.errors import Failure, Refusal
from attention.formats import rounding_of
from attention.spec import AttentionSpec
from convert.output.destination import write_provenance
from convert.output.writing import Work
from eval.inputs.loading import load
from eval.inputs.source import Source
from eval.inputs.text import Text, Tokens
from eval.quality.evaluation import report_of
from eval.quality.opened import Opened, Opening
from eval.quality.origin import is_cached_in, stated_cache
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress

_log = logging.getLogger("kvfold")
_LABELS = "source", "converted", "healed"  # of the models in a report


def evaluated(
    work: Work,
    provenance: Mapping[str, Any],
    text: Text,
    settings: EvaluationSettings,
    seen: Tokens | None,
    progress: Progress,
    opening: Opening = load,
) -> dict[str, Any]:
    """The entry `evaluation` of conversion.json.

    Args:
        work: Holds the checkpoint, all but its card; kept for `--resume`.
        provenance: Of the checkpoint. The report reads method, text and healing from it.
        text: The held-out text.
        settings: How to evaluate.
        seen: The text that the checkpoint was fitted to, which would flatter an evaluation; None if that is not compared.
        progress: Called with the progress of each stage.
        opening: Loads the models.

    Raises:
        Failure: The evaluation failed. `--resume` without `--evaluate` publishes the checkpoint.
    """
    write_provenance(work.path, provenance)
    made_from = [replace(model, label=label) for label, model in zip(_LABELS, work.models, strict=False)]
    result = made_from[0].beside(work.path, _LABELS[len(made_from)])
    settings = replace(settings, cache_dtypes=_formats(provenance, (*made_from, result)))
    if settings.cache_dtypes and isinstance(opening, Opened):  # caches in a format need models of their own
        opening.free()
        opening = load
    try:
        report = report_of([*made_from, result], text, settings, seen, progress, opening)
    except (Refusal, Failure) as error:
        raise Failure(
            f"the {work.noun} is done, its evaluation failed: {error}",
            hint="the same command with --resume and without --evaluate publishes it",
        ) from error
    for entry in report["models"]:  # the name of the work directory does not get into it
        entry["path"] = "OUTPUT" if entry["path"] == result.reference else entry["path"]
    return report


def _formats(provenance: Mapping[str, Any], models: Sequence[Source]) -> tuple[str, ...]:
    """The format of the cache that the result was made for, if it was, and if the caches of all models can have it."""
    form = stated_cache(dict(provenance))
    if form is None or rounding_of(form) is None:
        return ()
    for model in (model for model in models if is_cached_in(model, form)):
        if not AttentionSpec.from_config(model.config).takes(form):
            _log.warning("evaluated without caches in %s, which %s cannot have", form, model.reference)
            return ()
    return (form,)
