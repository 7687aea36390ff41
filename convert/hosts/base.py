"""A host is the model class that carries a converted attention exactly. Users read "output class"."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention.auto import config_of
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import FAMILIES, Family

CLASSES = ("stock", "kvfold")  # as on the command line


class Host(ABC):
    """One output class: writes its config, and refuses with a reason what the class cannot represent.

    Names and tensors follow the class's own layout, which is a family: everything it writes can be read again.

    Attributes:
        name: Its name, for plans and the support matrix.
        loads_in: The software that loads the result: "transformers".
        served_by: The engines that serve the result, for the support matrix.
        runs: The engines of `convert.hosts.engines` that run the result, whatever its source (`engines`).
        opened_by: A sentence for the model card: what loads the result exactly.
        remarks: Sentences for the model card: what to know when running the result.
        replaces: What happened to a tensor of the source's attention that the class has no name for, for conversion.json.
        families: The families whose blocks it can carry if the config allows it.
        loading: The arguments that `from_pretrained` needs to load the result.
        code: Files of Python that the result is loaded with, which are copied beside its weights.
        portable: Whether it has neither biases nor a list of frequencies. Its latents then have a nearly constant norm
            (`convert.methods.portable_norm`), its frequencies are one geometric ladder, and its head is never tied.
        ranks_per_layer: Whether its layers may have latents of different ranks.
        keeps_projections: Whether it keeps a source's projections with their QK-norm or clamp, and has what is new behind them.
        keeps_sinks: Whether its heads can have sinks (`attention.record.Attention`).
    """

    name: str
    loads_in: str = "transformers"
    served_by: str
    runs: frozenset[str] = frozenset({"transformers"})
    opened_by: str
    remarks: tuple[str, ...] = ()
    replaces: str
    families: Collection[str]
    loading: Mapping[str, Any] = {}
    code: tuple[Path, ...] = ()
    portable: bool = False
    ranks_per_layer: bool = False
    keeps_projections: bool = False
    keeps_sinks: bool = False

    def reads_projections(self, family: Family) -> bool:
        """Whether what it holds of such a source is behind its projections (`attention.record.HeadProjections`)."""
        return self.keeps_projections and family.needs_projections

    @property
    def kind(self) -> str:
        """One of CLASSES."""
        return "kvfold" if self.code else "stock"

    def engines(self, family: Family) -> frozenset[str]:
        """The engines of `convert.hosts.engines` that run what became of a source of `family`, sizes of latents aside.

        Of a family that is bound to no config: those that run it for some configs.
        """
        return self.runs

    def layout(self, family: Family) -> Family:
        """The layout of the class's tensors for a source of `family`: that of the model type that is its name."""
        return FAMILIES[self.name]

    @abstractmethod
    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        """Why this class cannot carry `target` of a source of `family`, or None if it can."""

    def reserved(self, kv_lora_rank: int) -> int:
        """The number of a latent's channels that the class needs for itself."""
        return 0

    def latent_size(self, kv_lora_rank: int) -> float | None:
        """The root mean square of latents with which the class rounds least; None if their size does not matter."""
        return None

    def notes(self, family: Family) -> tuple[str, ...]:
        """Sentences for the plan: what carrying a source of this family costs besides its cache."""
        return ()

    @abstractmethod
    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        """The new config.json.

        Args:
            raw: The source's config.json.
            family: The source's, bound to its config.
            target: The sizes of the result.
            rotary: How the rotary key of MLA rotates; None if only sizes matter.
        """

    def sized(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec) -> Any:
        """The class's config object at the sizes of `target`, from which the shapes of its tensors follow."""
        return config_of(self.config(raw, family, target, None))


# The activations that are a GELU, exact or not.
GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def architecture(name: str, activation: str, computed: Sequence[str] = GELUS) -> str:
    """The architecture that config.json names for a stock class: `name`, if engines' own classes compute its activation.

    Some of them compute one activation, whatever the config says. By the other name, vLLM runs transformers' modules or
    refuses, and software that does not know it refuses.

    Args:
        name: The class of transformers.
        activation: Of the MLP.
        computed: What engines' classes compute.
    """
    return name if activation in computed else "TransformersForCausalLM"


def carried(raw: Mapping[str, Any], config: Any, fields: Iterable[str]) -> dict[str, Any]:
    """Fields of a source's config that another class's keeps: the dtype as it is written, and what it has of `fields`."""
    named = {key: raw[key] for key in ("dtype", "torch_dtype") if key in raw}
    return named | {key: getattr(config, key) for key in fields if hasattr(config, key)}
