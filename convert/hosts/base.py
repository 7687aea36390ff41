"""A host is the model class that carries a converted attention exactly. Users read "output class"."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attention.auto import config_of
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import FAMILIES, Family

CLASSES = ("stock", "kvfold")  # as on the command line


class Host(ABC):
    """One output class: writes its config, and refuses with a reason what the class cannot represent.

    Names and tensors follow the class's own layout, which is a family.

    Attributes:
        name: Its name, for plans and the support matrix.
        loads_in: The software that loads the result: "transformers".
        served_by: The engines that serve the result, for the support matrix.
        runs: The engines of `convert.hosts.engines` that run the result, whatever its source (`engines`).
        opened_by: A sentence for the model card: what loads the result exactly.
        remarks: Sentences for the model card: what to know when running the result.
        replaces: What happened to a tensor of the source's attention that the class has no name for, for conversion.json.
        families: The families whose blocks it can carry if the config allows it.
        code: Files of Python that the result is loaded with, which are copied beside its weights: kvfold's class. Some
            of its layers may stay as they are, and it keeps a source's projections with QK-norm or clamp, and has what is new
            behind them.
        portable: Whether it has neither biases nor a list of frequencies. Its latents then have a nearly constant norm
            (`convert.methods.portable_norm`), its frequencies are one geometric ladder, and its head is never tied.
        eager: Whether vLLM starts only with --enforce-eager: it does not compile transformers' LongRoPE.
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
    code: tuple[Path, ...] = ()
    portable: bool = False
    eager: bool = False
    keeps_sinks: bool = False

    def reads_projections(self, family: Family) -> bool:
        """Whether what it holds of such a source is behind its projections (`attention.record.HeadProjections`)."""
        return bool(self.code) and family.needs_projections

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


class StockClass(Host):
    """A class of transformers that holds sources of other types, by their blocks.

    Attributes:
        blocks: Whose decoder blocks it has, for refusals.
        architecture: Its name in config.json, by which engines choose their code. Their classes compute a GELU, whatever the
            config says. Another activation gets another name: by that, vLLM runs transformers' modules, and others refuse.
        carried: The fields of a source's config that its own keeps.
    """

    blocks: str
    architecture: str
    carried: tuple[str, ...]

    @abstractmethod
    def refuses_config(self, family: Family, target: AttentionSpec) -> str | None:
        """As `refuses`, of a family that it is for."""

    @abstractmethod
    def own(self, family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        """The fields of config.json that are not of its source's."""

    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        if family.model_type in self.families:
            return self.refuses_config(family, target)
        known = ", ".join(self.families)
        return f"{family.model_type} does not have {self.blocks} decoder blocks (the class can hold {known})"

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        config = family.config
        activation = getattr(config, "activation_function", None) or config.hidden_act
        return {
            "architectures": [self.architecture if activation in _GELUS else TRANSFORMERS],
            "model_type": self.name,
            **{key: raw[key] for key in ("dtype", "torch_dtype") if key in raw},  # the dtype as it is written
            **{key: getattr(config, key) for key in self.carried if hasattr(config, key)},
            **self.own(family, target, rotary),
        }


_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # exact or not
TRANSFORMERS = "TransformersForCausalLM"  # the architecture of what no engine's own class computes
