"""The statistics of the source's layers on the calibration text: surveyed once, when the first layer is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attention.record import Attention
from convert.calibration.survey import survey
from convert.checkpoint.shelf import Shelf
from convert.execute.job import Job
from convert.methods.statistics import Statistics
from convert.planning.calibration import CalibrationText


class Surveyed:
    """Maps a layer to its statistics.

    Args:
        job: The conversion.
        text: Its text.
    """

    def __init__(self, job: Job, text: CalibrationText) -> None:
        self._job, self._text = job, text.surveyed()
        self._found: Callable[[int], Statistics] | None = None

    def __call__(self, layer: int) -> Statistics:
        if self._found is None:
            self._found = self._run()
        return replace(self._found(layer), context=self._text.calibration.max_context)

    def _run(self) -> Callable[[int], Statistics]:
        job, plan = self._job, self._job.plan
        spool, read, infos = job.statistics_in / "source-inputs", job.reader.__getitem__, job.reader.infos
        stream = job.stream(self._text, plan.source.config, plan.family.module, read, infos, spool)

        def record(layer: int) -> Attention:
            return job.read_layer(layer)[1]

        return survey(stream, Shelf(job.statistics_in, "source"), record, job.shows_attention, job.progress)
