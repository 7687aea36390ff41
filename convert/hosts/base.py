"""A host is the model class that carries a converted attention exactly. Users read "output class"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from attention.rope import Rotary
    from attention.spec import AttentionSpec
    from convert.families import Family


class Host(Protocol):
    """One output class: writes its config, and refuses with a reason what the class cannot represent.

    Names and tensors follow the class's own layout, which is a family: everything it writes can be read again.
    """

    @property
    def name(self) -> str:
        """Its name, for plans and the support matrix."""

    @property
    def loads_in(self) -> str:
        """The software that loads the result: "transformers"."""

    @property
    def served_by(self) -> str:
        """The engines that serve the result, for the support matrix."""

    def engines(self, family: Family) -> frozenset[str]:
        """The engines of `convert.engines` that run what became of a source of `family`, sizes of latents aside."""

    @property
    def opened_by(self) -> str:
        """A sentence for the model card: what loads the result exactly."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences for the model card: what to know when running the result."""

    @property
    def replaces(self) -> str:
        """What happened to a tensor of the source's attention that the class has no name for, for conversion.json."""

    @property
    def families(self) -> frozenset[str]:
        """The families whose blocks it can carry if the config allows it."""

    @property
    def loading(self) -> Mapping[str, Any]:
        """The arguments that `from_pretrained` needs to load the result."""

    @property
    def code(self) -> tuple[Path, ...]:
        """Files of Python that the result is loaded with, which are copied beside its weights."""

    def layout(self, family: Family) -> Family:
        """The layout of the class's tensors for a source of `family`."""

    def refuses(self, family: Family, config: Any, target: AttentionSpec, dtype: str) -> str | None:
        """Why this class cannot carry `target` made from `config` and stored in `dtype`, or None if it can."""

    def reserved(self, kv_lora_rank: int) -> int:
        """The number of a latent's channels that the class needs for itself."""

    def full_query_rank(self, width: int) -> int | None:
        """The rank from which on a latent of queries of a model of that width loses nothing; None if the class has none."""

    def notes(self, config: Any) -> tuple[str, ...]:
        """Sentences for the plan: what carrying a source of this config costs besides its cache."""

    def config(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        """The new config.json.

        Args:
            raw: The source's config.json.
            config: The source's config with the defaults of its class.
            target: The sizes of the result.
            rotary: How the rotary key of MLA rotates; None if only sizes matter.
        """

    def sized(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec) -> Any:
        """The class's config object at the sizes of `target`, from which the shapes of its tensors follow."""
