"""The auto class of transformers that loads a language model: of text alone, or of pictures and text."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention import models
from attention.errors import Refusal

ADAPTER = "adapter_config.json"


def refuse_adapter(directory: Path, model: str | Path) -> None:
    """Refuse an adapter in the directory of a model: where peft is installed, transformers adds it on loading, unasked.

    Args:
        directory: Where the model lies.
        model: Its name in messages.

    Raises:
        Refusal: There is one.
    """
    if (directory / ADAPTER).is_file():
        raise Refusal(
            f"{model} holds an adapter beside its model ({ADAPTER}), which transformers adds to the weights where peft is "
            "installed",
            hint=f"merge it, or, if the weights have it already, take {ADAPTER} out",
        )


def config_of(values: Mapping[str, Any]) -> Any:
    """The transformers config of what a config.json states."""
    from transformers import AutoConfig

    models.make_known(values["model_type"])
    return AutoConfig.for_model(**copy.deepcopy(dict(values)))  # classes change what they are given


def auto_class(config: Any) -> Any:
    """`AutoModelForCausalLM` or `AutoModelForImageTextToText`: whichever has a class for the config.

    If both have one, the class that config.json names decides, and without a name the former.
    """
    import transformers

    models.make_known(config.model_type)
    found = classes_of(config)
    if len(found) > 1:
        named = config.architectures or ()
        found = {auto: classes for auto, classes in found.items() if classes[type(config)].__name__ in named} or found
    return next(iter(found), transformers.AutoModelForCausalLM)


def from_config(config: Any, **options: Any) -> Any:
    """A language model of a config, without a checkpoint's weights.

    Code that the config names (`auto_map`) is run. `eval.inputs.source.Source` keeps such names only if the user allows that.

    Args:
        config: As `Source.config` gives it, or of a class of transformers or of kvfold.
        options: As of `from_config` in transformers.
    """
    return auto_class(config).from_config(config, trust_remote_code=True, **options)


def classes_of(config: Any) -> dict[Any, Any]:
    """The auto classes of transformers that have a class for the config, and all that each of them has."""
    import transformers

    autos = {
        transformers.AutoModelForCausalLM: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.AutoModelForImageTextToText: transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    return {auto: classes for auto, classes in autos.items() if type(config) in classes}
