"""What a host is: the model class that carries a converted attention exactly. People read "output class"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from attention.rope import Rotary
    from attention.spec import AttentionSpec
    from convert.families import Family


class Host(Protocol):
    """Writes one class's config, and refuses with a reason what that class cannot represent.

    Names and tensors are those of the class's own layout, a family: whatever can be written can be read again.
    """

    @property
    def name(self) -> str:
        """For plans and the support matrix."""

    @property
    def loads_in(self) -> str:
        """What opens the result: "transformers"."""

    @property
    def opened_by(self) -> str:
        """For the model card: what loads the result exactly."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """For the model card: what to know when running it."""

    @property
    def replaces(self) -> str:
        """What became of a tensor of the source's attention that the class has no name for."""

    @property
    def families(self) -> frozenset[str] | None:
        """The families whose blocks it can carry, given the right config; None for all."""

    def layout(self, family: Family) -> Family:
        """How the class keeps its tensors, if the source is of `family`."""

    def refuses(self, family: Family, config: Any, target: AttentionSpec, dtype: str) -> str | None:
        """Why this class cannot carry `target` made from `config` and stored in `dtype`, or None if it can."""

    def reserved(self, kv_lora_rank: int) -> int:
        """How many channels of a latent the class needs for itself."""

    def config(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        """The new config.json.

        Args:
            raw: The source's, as it was read.
            config: The same with the class's defaults.
            target: What is written.
            rotary: How the rotary key of MLA rotates; None where only sizes matter.
        """

    def sized(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec) -> Any:
        """The class's config object at the sizes of `target`, for the shapes of its tensors."""
