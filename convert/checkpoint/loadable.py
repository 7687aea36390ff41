"""Checks whether transformers would load a checkpoint completely, by its config and the headers of its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention.errors import Failure
from convert.checkpoint.loading import ClassTensors, empty_model
from eval.inputs.misfits import OTHER_MODEL, instead_of, of_a_kind
from eval.inputs.reader import TensorInfo


def require_loadable(config: Any, infos: Mapping[str, TensorInfo], what: str) -> None:
    """Compare every tensor name, shape and dtype of a checkpoint with its class, by transformers' own rules.

    Args:
        config: The checkpoint's config.
        infos: The infos of its tensors by name.
        what: The name of the checkpoint in messages.

    Raises:
        Failure: A tensor is missing or unknown, has another shape, or holds integers where the class needs floats.
    """
    model = empty_model(config)
    tensors, kind = ClassTensors(model, infos), type(model).__name__
    if tensors.missing:
        others = f" and {len(tensors.missing) - 1} others" if tensors.missing[1:] else ""
        tied = bool(getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False))
        said, step = instead_of(tensors.missing[0], tensors.unexpected, tied)
        raise Failure(f"{what} lacks {tensors.missing[0]}{others}, which {kind} with this config has{said}", hint=step)
    if tensors.unexpected:
        others = f" and {len(tensors.unexpected) - 1} others" if tensors.unexpected[1:] else ""
        name, whose, step = of_a_kind(tensors.unexpected) or (tensors.unexpected[0], "", OTHER_MODEL)
        known = f"which {kind} with this config has not"
        raise Failure(f"{what} has tensor {name}{others}, {f'{whose}, ' if whose else ''}{known}", hint=step)
    for wrong in tensors.mismatched:
        raise wrong.failure()
    floating = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for name in tensors.names:
        for source in tensors.sources(name) if name in floating else ():
            if not infos[source].is_float:
                kept = str(infos[source].dtype).removeprefix("torch.")
                raise Failure(
                    f"{source} holds {kept}, which means nothing without its scales",
                    hint="convert the original checkpoint, in float32, bfloat16 or float16, then quantise",
                )
