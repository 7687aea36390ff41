"""Probes: what an evaluation can measure of a loaded model besides perplexity, if it is asked for.

A probe is one module with a class that has these members, and one line in `PROBES`. A field of `EvaluationSettings` asks
for it, and `eval.sections` makes its tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from eval.progress import Progress
from eval.recall import Recall
from eval.source import Source
from eval.tasks import Tasks
from eval.text import Tokens

if TYPE_CHECKING:
    from eval.evaluation import EvaluationSettings


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

    def record(self) -> dict[str, Any]:
        """Conditions of the figures besides the model, as in report.json."""


PROBES: tuple[type[Probe], ...] = (Recall, Tasks)
