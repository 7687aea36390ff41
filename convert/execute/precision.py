"""Measures which layers copy: rounding these few costs nearly all of copying, so that formats keep their latents precise."""

import logging

import torch

from attention.encoded_forward import require_cache, rounding_cache
from attention.errors import Failure, KvfoldError
from attention.formats import FORMATS
from attention.versions import CACHE
from convert.execute.job import Job
from convert.planning.base import lacks_room
from eval.inputs.loading import load
from eval.inputs.text import Tokens
from eval.machine.device import memory_for
from eval.quality.perplexity import Batch, Score, logits_of
from eval.terminal.progress import stage

_log = logging.getLogger("kvfold")
_ROWS, _RUN = 8, 32  # texts, and the tokens of each that come back
_FORM = FORMATS["int2"]  # so coarse that layers that copy stand out: by int4, errors of others come near


def precise_layers(job: Job) -> tuple[int, ...]:
    """Measure what rounding keys and values of one layer of the source at a time costs copies of runs of the calibration text.

    Returns:
        As many layers as formats keep precise, those first that cost most (KL). () if there are none, without a text, or if
        the source does not run in this memory: caches then take those of `AttentionSpec.format_of`.
    """
    count, costs = job.spec.count_precise(_FORM), dict[int, float]()
    if job.text is None or not count:
        return ()
    try:
        costs = _costs(job, _copies(job.text.tokens, job.plan.source.max_positions))
    except KvfoldError as error:
        _log.warning("which layers copy was not measured, and caches of few bits keep some past the middle precise: %s", error)
    return tuple(sorted((layer for layer in costs if costs[layer] > 0), key=lambda layer: -costs[layer])[:count])


def _costs(job: Job, batch: Batch) -> dict[int, float]:
    """By layer that will have a latent, what rounding its keys and values costs copies."""
    source, device, costs = job.plan.source, job.plan.runs_on, dict[int, float]()
    if missing := lacks_room(source.config, device):
        raise Failure(missing)
    with (
        stage(job.progress, "round layers", len(job.spec.unbounded), "layer") as done,
        memory_for("the experiment on copies", "free some"),
        load(source, "auto", str(device)) as model,
        torch.inference_mode(),
    ):
        require_cache(model, _FORM)
        exact = logits_of(model, batch)
        for layer in job.spec.unbounded:
            score, through = Score(), {"use_cache": True, CACHE: rounding_cache(_FORM, job.plan.before, [layer])}
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
