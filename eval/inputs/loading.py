"""Loads what a `Source` names: its model, and a text in the tokens of its own tokenizer."""

import contextlib
import logging
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from attention.auto import auto_class, classes_of
from attention.errors import Failure, KvfoldError, Refusal, one_line
from attention.versions import keep_caps
from eval.inputs.misfits import OTHER_MODEL, disagreement, instead_of
from eval.inputs.reader import DTYPES, Reader
from eval.inputs.source import Source
from eval.inputs.text import Text, Tokens, tokenize

_log = logging.getLogger("kvfold")
_MOMENT = 10**9  # bytes of weights that load in a moment


@contextlib.contextmanager
def load(source: Source, dtype: str = "auto", device: str = "auto") -> Iterator[Any]:
    """The model of `source` in eval mode, freed when the block ends.

    On "cpu" it is loaded into main memory. Otherwise accelerate's device map spreads it over GPUs, main memory and, if needed,
    a temporary directory. Attention is computed as transformers chooses, whatever config.json says.

    Raises:
        Refusal: As `Source.refuse_stale_quantisation`.
        Failure: As `Reader`; or it cannot be loaded, completely and as it is.
    """
    source.refuse_stale_quantisation()
    if (size := sum(file.stat().st_size for file in source.files.iterdir() if file.is_file())) > _MOMENT:
        _log.info("load %s: %.1f GB", source.name, size / 1e9)
    with tempfile.TemporaryDirectory(prefix="kvfold-offload-") as offload:
        placement = {} if device == "cpu" else {"device_map": device, "offload_folder": offload}
        try:
            model, info = auto_class(source.config).from_pretrained(
                source.files,
                dtype=getattr(torch, compute_dtype(source, dtype, device)),
                trust_remote_code=source.trust_remote_code,
                config=source.config,
                attn_implementation=None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # below, with their names
                **placement,
            )
        except KvfoldError:
            raise
        except pickle.UnpicklingError as error:  # torch says how to run the code in it
            said = f"{source.reference} is pickled with more than weights, which torch does not load"
            raise Failure(said, hint="have who made it save it with save_pretrained, as safetensors") from error
        except Exception as error:  # safetensors, torch, transformers and the file system raise different classes
            if "the above report" in str(error):  # which is not shown: of tensors that become one parameter together
                said = f"the tensors of {source.reference} do not fit together as its config says"
                raise Failure(said, hint=OTHER_MODEL) from error
            said = f"cannot load {source.reference}: {type(error).__name__}: {one_line(error, 300)}"
            raise Failure(said, hint="is it whole? -v shows more") from error
        _require_whole(source, model, info)
        yield keep_caps(model).eval()


def _require_whole(source: Source, model: Any, info: Mapping[str, Any]) -> None:
    """Refuse a model with weights that its files lack: transformers fills these with random numbers and continues.

    Raises:
        Failure: A weight is missing, of another shape or of other numbers; or as `_require_forwards`.
    """
    if wrong := sorted(info["mismatched_keys"]):
        name, shape, expected = wrong[0]
        raise disagreement(f"{name} is {list(shape)}", shape, expected, model=source.reference)
    unexpected = sorted(map(str, info["unexpected_keys"]))
    if missing := sorted(map(str, info["missing_keys"])):
        said, step = instead_of(missing[0], unexpected, getattr(source.decoder, "tie_word_embeddings", False))
        said = f"{source.reference} lacks {len(missing)} of its model's weights altogether: {missing[0]}, …{said}"
        raise Failure(said, hint=step)
    if not source.quantisation:
        _require_floats(source, model, source.reader())
    if source.decoder is not source.config:
        _require_forwards(source, model)
    if unexpected:
        _log.warning(
            "%s has no use for %d tensors of %s: %s, …", type(model).__name__, len(unexpected), source.name, unexpected[0]
        )


def _require_forwards(source: Source, model: Any) -> None:
    """Refuse a model around a decoder that does not read text by itself, or not forwards.

    Raises:
        Failure: It wants more than text, or a later token changes the logits of an earlier one.
    """
    ids = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 7]], device=model.device)
    try:
        with torch.inference_mode():
            one, other = model(ids, use_cache=False).logits[:, :-1].float()
    except Exception as error:  # classes raise errors of many kinds for what they lack
        said = f"{source.reference} does not read text alone: {one_line(error, 200)}"
        raise Failure(said, hint="choose a model that does: perplexity is of text") from error
    if not torch.allclose(one, other, rtol=1e-2, atol=1e-2):
        raise Failure(
            f"{source.reference} does not read forwards: its logits depend on later tokens",
            hint="choose a model that does: perplexity is of tokens from those before them",
        )


def _require_floats(source: Source, model: Any, reader: Reader) -> None:
    """Refuse weights of other numbers, which transformers casts to floats as they are.

    Raises:
        Failure: A parameter is stored as integers or 8-bit floats; its config names no quantisation.
    """
    parameters, base = {name for name, _ in model.named_parameters()}, f"{model.base_model_prefix}."
    parameters |= {name.removeprefix(base) for name in parameters}  # as a checkpoint of the base model has them
    for name in sorted(parameters & reader.infos.keys()):
        if not reader.infos[name].is_float:
            kind = next(kind for kind, dtype in DTYPES.items() if dtype is reader.infos[name].dtype)
            raise Failure(
                f"{name} of {source.reference} is stored as {kind}, and its config names no quantisation",
                hint="the checkpoint is damaged or incomplete; get it again",
            )


def compute_dtype(source: Source, dtype: str, device: str) -> str:
    """The dtype of the forward passes of a model."""
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" or not torch.cuda.is_available() else source.dtype


def require_causal(source: Source) -> None:
    """Raise `Refusal` if the model is not a decoder-only language model."""
    known = classes_of(source.config) or "AutoModelForCausalLM" in (source.raw.get("auto_map") or {})
    if getattr(source.config, "is_encoder_decoder", False) or not known:
        raise Refusal(
            f"{source.reference} is not a decoder-only language model (model type {source.model_type!r})",
            hint="it takes a model that AutoModelForCausalLM or AutoModelForImageTextToText loads",
        )


def tokens_of(source: Source, text: Text, first: int | None = None) -> Tokens:
    """The tokens of a text, or its first ones, from a model's own tokenizer.

    Raises:
        Failure: The tokenizer cannot be loaded, or gives ids that the model does not know.
    """
    tokens = tokenize(text, source.tokenizer(), first)
    limit = source.vocabulary
    if int(tokens.ids.max()) >= limit:
        raise Failure(
            f"the tokenizer of {source.reference} makes ids up to {int(tokens.ids.max())}, its model knows {limit}",
            hint="the tokenizer's files are not this model's",
        )
    return tokens
