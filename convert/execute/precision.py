"""Measures which latents a format keeps precise: few layers copy, and rounding their latents costs nearly all of copying."""

import logging

import torch

from attention.encoded_forward import rounding_cache
from attention.patch import pad_values
from attention.versions import CACHE, logits_kept
from convert.output.writing import Work
from convert.planning.base import Plan, lacks_room
from eval.inputs.loading import load
from eval.inputs.text import Tokens
from eval.machine.device import input_device, memory_for
from eval.quality.perplexity import Batch, Score, finite
from eval.terminal.progress import Progress, stage

_log = logging.getLogger("kvfold")
_ROWS, _RUN = 8, 32  # texts, and the tokens of each that come back
_NAME = "precise"  # in the work directory


def precise_layers(plan: Plan, work: Work, text: Tokens, progress: Progress) -> list[int]:
    """Measure what rounding the latent of one layer at a time costs copies of random runs of a text's tokens.

    Args:
        plan: Of the conversion, whose weights are written.
        work: Its work directory.
        text: Its calibration text.
        progress: Called with the layers that are done.

    Returns:
        As many layers as `mixed` keeps precise, those first that cost most (KL); none if the format keeps none, or if the
        result does not fit in memory.
    """
    form, spec = plan.target.rounding, plan.target.spec
    if form is None or not spec.count_precise(form):
        return []
    if (known := work.recall(_NAME)) is not None:
        return list(known)
    result = plan.source.beside(work.path, "the result")
    if missing := lacks_room(result.config, plan.runs_on):
        _log.warning("which layers copy was not measured, and %s keeps some past the middle precise: %s", form.name, missing)
        return []
    batch, costs = _copies(text, plan.source.max_positions), dict[int, float]()
    with (
        stage(progress, "round layers", len(spec.unbounded), "layer") as done,
        memory_for("the experiment on copies", "give --device cpu"),
        load(result, "auto", str(plan.runs_on)) as model,
        torch.inference_mode(),
    ):
        pad_values(model)

        def logits(*layers: int) -> torch.Tensor:
            kept, through = batch.ids.shape[1] - batch.first + 1, {"use_cache": True, CACHE: rounding_cache(form, spec, layers)}
            whole = model(input_ids=batch.ids.to(input_device(model)), **through, **logits_kept(model, kept)).logits
            return finite(whole[:, -kept:-1].flatten(0, 1), model)

        exact = logits()
        for layer in spec.unbounded:
            score = Score()
            score.add(batch, logits(layer), exact)
            costs[layer] = score.kl
            done(1)
    found = sorted(costs, key=lambda layer: -costs[layer])[: spec.count_precise(form)]
    work.remember(_NAME, found)
    return found


def _copies(text: Tokens, positions: int | None) -> Batch:
    """Rows of a run of the text's tokens in random order, twice as much text, and the run again, whose tokens are scored."""
    ids = text.ids
    size = min(_RUN, len(ids) // 2, (positions or len(ids)) // 4)
    between = ids[: len(ids) // (2 * size) * 2 * size].view(-1, 2 * size)[:_ROWS]
    order = torch.randint(len(ids), (len(between), size), generator=torch.Generator().manual_seed(0))
    return Batch(torch.cat((ids[order], between, ids[order]), 1), 3 * size + 1)
