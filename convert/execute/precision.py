"""Measures which latents a format keeps precise: few layers copy, and rounding their latents costs nearly all of copying."""

import logging

import torch

from attention.encoded_forward import rounding_cache
from attention.errors import Failure, KvfoldError
from attention.formats import Format
from attention.patch import pad_values
from attention.spec import PRECISE
from attention.versions import CACHE
from convert.execute.job import Job
from convert.planning.base import lacks_room
from eval.inputs.loading import load
from eval.inputs.source import Source
from eval.inputs.text import Tokens
from eval.machine.device import memory_for
from eval.quality.perplexity import Batch, Score, logits_of
from eval.terminal.progress import stage

_log = logging.getLogger("kvfold")
_ROWS, _RUN = 8, 32  # texts, and the tokens of each that come back


def precise_layers(job: Job, result: Source) -> dict[str, list[int]]:
    """Measure what rounding the latent of one layer at a time costs copies of random runs of the calibration text.

    Args:
        job: The conversion.
        result: Its checkpoint, before it is healed.

    Returns:
        For config.json, as many layers as the format keeps precise, those first that cost most (KL). {} if it keeps none,
        without a text, or if the result does not run in this memory: the cache then takes those of `AttentionSpec.format_of`.
    """
    form, spec = job.plan.target.rounding, job.spec
    if form is None or job.text is None or not (count := spec.count_precise(form)):
        return {}
    if (known := job.work.recall(PRECISE)) is not None:
        return dict(known)
    costs = dict[int, float]()
    try:
        costs = _costs(job, form, result, _copies(job.text.tokens, result.max_positions))
    except KvfoldError as error:
        _log.warning("which layers copy was not measured, and %s keeps some past the middle precise: %s", form.name, error)
    layers = sorted((layer for layer in costs if costs[layer] > 0), key=lambda layer: -costs[layer])[:count]
    job.work.remember(PRECISE, found := {PRECISE: layers} if layers else {})
    return found


def _costs(job: Job, form: Format, result: Source, batch: Batch) -> dict[int, float]:
    """By layer, what rounding its latent costs copies."""
    spec, device, costs = job.spec, job.plan.runs_on, dict[int, float]()
    if missing := lacks_room(result.config, device):
        raise Failure(missing)
    with (
        stage(job.progress, "round layers", len(spec.unbounded), "layer") as done,
        memory_for("the experiment on copies", "free some"),
        load(result, "auto", str(device)) as model,
        torch.inference_mode(),
    ):
        pad_values(model)
        exact = logits_of(model, batch)
        for layer in spec.unbounded:
            score, through = Score(), {"use_cache": True, CACHE: rounding_cache(form, spec, [layer])}
            score.add(batch, logits_of(model, batch, **through), exact)
            costs[layer] = score.kl
            done(1)
    return costs


def _copies(text: Tokens, positions: int | None) -> Batch:
    """Rows of a run of the text's tokens in random order, twice as much text, and the run again, whose tokens are scored."""
    ids = text.ids
    if (size := min(_RUN, len(ids) // 2, (positions or len(ids)) // 4)) < 2:
        raise Failure(f"copies need 8 tokens of text and 8 positions, and there are {len(ids)} and {positions or 'enough'}")
    between = ids[: len(ids) // (2 * size) * 2 * size].view(-1, 2 * size)[:_ROWS]
    order = torch.randint(len(ids), (len(between), size), generator=torch.Generator().manual_seed(0))
    return Batch(torch.cat((ids[order], between, ids[order]), 1), 3 * size + 1)
