"""Probes: what an evaluation can measure of a loaded model besides perplexity, if it is asked for.

A probe is one module with a class that has these members, and one line in `PROBES`. A field of `EvaluationSettings` asks
for it, and `eval.report.sections` makes its tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from eval.inputs.source import Source
from eval.inputs.text import Tokens
from eval.quality.recall import Recall
from eval.quality.settings import EvaluationSettings
from eval.quality.tasks import Tasks
from eval.terminal.progress import Progress


class Probe(Protocol):
    """One measurement, prepared for all models of an evaluation.

    Attributes:
        name: Its key in report.json.
    """

    name: ClassVar[str]

    @classmethod
    def asked(cls, settings: EvaluationSettings, sources: Sequence[Source], tokens: Tokens) -> Probe | None:
        """The probe, or None if the settings do not ask for it.

        Raises:
            KvfoldError: It is asked for, and impossible with these models or on this machine.
        """

    def measure(self, model: Any, name: str, progress: Progress) -> dict[str, Any]:
        """The figures of a loaded model, as in report.json; `name` is for messages."""

    def conditions(self) -> dict[str, Any]:
        """Conditions of the figures besides the model, as in report.json."""


PROBES: tuple[type[Probe], ...] = (Recall, Tasks)
