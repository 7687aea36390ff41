"""What a checkpoint is whose tensors are not those of its config's class, by their names alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_ORIGINAL = "convert the original checkpoint, in float32, bfloat16 or float16, then quantise"
# A pattern of names that no causal LM has, whose they are, and the next step.
_KINDS = (
    (r"\.(qweight|qzeros|g_idx)$", "as GPTQ and AWQ store quantised weights", _ORIGINAL),
    (r"\.(absmax|quant_map|quant_state\..+|SCB)$", "as bitsandbytes stores quantised weights", _ORIGINAL),
    (r"\.(weight_packed|weight_scale|weight_scale_inv)$", "as quantised weights are stored", _ORIGINAL),
    (r"\.(lora_[AB]|base_layer)\.", "as PEFT names a model with an adapter", "merge it first: model.merge_and_unload()"),
    (
        r"^(score|classifier|classification_head|qa_outputs|v_head|value_head|reward_head|regression_head)\.",
        "as classifiers and reward models do",
        "convert the language model that it was trained from",
    ),
)
_HEAD = re.compile(r"^(lm_head|embed_out)\.")
_WRAPPERS = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile", "_fsdp_wrapped_module.": "FSDP"}
OTHER_MODEL = "config.json and the weights are not of the same model"


def of_a_kind(names: Iterable[str]) -> tuple[str, str, str] | None:
    """A tensor, of those that a class does not know, that tells a kind of checkpoint: its name, whose it is, the next step."""
    ordered = sorted(names)
    for pattern, whose, step in _KINDS:
        if found := next((name for name in ordered if re.search(pattern, name)), None):
            return found, whose, step
    return None


def instead_of(wanted: str, others: Collection[str], tied: bool) -> tuple[str, str]:
    """What a checkpoint has that lacks a tensor, in words to end a sentence, and the next step.

    Args:
        wanted: The name of the tensor.
        others: The names of those that its class does not know.
        tied: Whether its config ties the head to the embedding.
    """
    if found := of_a_kind(others):
        name, whose, step = found
        return f"; it has {name}, {whose}", step
    longer = next((name for name in sorted(others) if name.endswith(f".{wanted}")), None)
    if longer:
        prefix = longer.removesuffix(wanted)
        wrapper = f", as {_WRAPPERS[prefix]} does" if prefix in _WRAPPERS else ""
        code = f"save_file({{n.removeprefix({prefix!r}): t for n, t in load_file(F).items()}}, F, {{'format': 'pt'}})"
        return f"; it puts {prefix} before all names{wrapper}", f"take that off, by safetensors.torch: {code}"
    shorter = next((name for name in sorted(others) if "." in name and wanted.endswith(f".{name}")), None)
    if shorter:
        made = "save it with its head: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), and copy its tokenizer"
        headless = "convert the language model that it was made from: without a head, it predicts no tokens"
        return f"; it has {shorter}, as a base model saved without its head does", made if tied else headless
    if _HEAD.match(wanted) and not tied:
        return (
            "; config.json does not tie the head to the embedding (tie_word_embeddings is false)",
            "if the model was trained so, set tie_word_embeddings to true in config.json; else get its head",
        )
    module = wanted.rsplit(".", 2)[0] + "."
    beside = [name for name in sorted(others) if name.startswith(module)]
    if beside:
        return f"; it has {', '.join(beside[:3])} in its place", "get the config.json of these weights: this is another model's"
    return "", OTHER_MODEL
