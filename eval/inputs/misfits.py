"""What lies in place of a checkpoint of a class, by names alone: other files, or other tensors; and what can be done."""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from attention.errors import Failure

_MERGE = (
    "merge it into its base model with PEFT, and copy the tokenizer: "
    "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(DIR)"
)
# Of a name, what the files are, and the next step; the first counts.
_LAYOUTS = (
    (r"adapter_config\.json", "an adapter", _MERGE),
    (
        r"(model\.safetensors|pytorch_model\.bin)(\.index\.json)?",
        "weights alone",
        "get config.json, and what else lies beside the weights, from where they came from",
    ),
    (
        r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)",
        "shards without an index (….index.json), which says what each of them holds",
        "get the index from where they came from",
    ),
    (
        r"consolidated\..+",
        "weights in their maker's own layout",
        "get the same model in transformers' layout: config.json and model*.safetensors",
    ),
    (r"[^/]+\.gguf", "GGUF files", "name one of them as MODEL: DIR/FILE.gguf"),
    (r"zero_to_fp32\.py", "a state of DeepSpeed", "run the zero_to_fp32.py in it, which writes weights"),
    (r"[^/]+\.safetensors", "weights under another name", "rename them to model.safetensors"),
    (r"[^/]+/config\.json", "checkpoints one level deeper", "name one of them as MODEL"),
)
_ORIGINAL = "convert the original checkpoint, in float32, bfloat16 or float16, then quantise"
# What training puts around modules, by the part that it adds to names.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "module": "DistributedDataParallel",
}
_UNWRAP = (
    "take that out of all names, by re and safetensors.torch: "
    rf"save_file({{re.sub(r'\b({'|'.join(_WRAPPERS)})\.', '', n): t for n, t in load_file(F).items()}}, F, {{'format': 'pt'}})"
)
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
OTHER_MODEL = "config.json and the weights are not of the same model"
_GATHER = (
    "DeepSpeed's ZeRO-3 leaves it so where weights are saved without being gathered: run zero_to_fp32.py of its checkpoint, "
    "or save again with stage3_gather_16bit_weights_on_model_save"
)


def names_in(directory: Path) -> list[str]:
    """The names of the files in a directory and one level deeper."""
    return sorted(
        path.relative_to(directory).as_posix() for pattern in ("*", "*/config.json") for path in directory.glob(pattern)
    )


def found_among(names: Collection[str]) -> tuple[str, str] | None:
    """The first known layout that files of these names have: in words, and the next step; None if there is none."""
    for pattern, what, step in _LAYOUTS:
        if found := [name for name in sorted(names) if re.fullmatch(pattern, name)]:
            return f"{what} ({', '.join(found[:3])}{', …' if found[3:] else ''})", step
    return None


def disagreement(
    what: str, found: Sequence[int] | None, wanted: Sequence[int], step: str = OTHER_MODEL, model: str | None = None
) -> Failure:
    """A tensor of another shape than its config says.

    Args:
        what: Its name, and what it is: "w is [3, 4]".
        found: Its shape; None if it has none.
        wanted: Its shape by the config.
        step: The next step.
        model: The name of the model, where there may be several.
    """
    said = f"{f'{model}: ' if model else ''}config.json and the weights disagree: {what}, by the config it is {list(wanted)}"
    return Failure(said, hint=_GATHER if found is not None and list(found) == [0] else step)


def of_a_kind(names: Iterable[str]) -> tuple[str, str, str] | None:
    """An unexpected tensor that identifies a known kind of checkpoint: its name, whose it is, the next step."""
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
    for part, whose in _WRAPPERS.items():
        if inside := next((name for name in sorted(others) if f".{part}." in f".{name}"), None):
            return f"; it has {inside}, as {whose} names modules", _UNWRAP
    longer = next((name for name in sorted(others) if name.endswith(f".{wanted}")), None)
    if longer:
        prefix = longer.removesuffix(wanted)
        code = f"save_file({{n.removeprefix({prefix!r}): t for n, t in load_file(F).items()}}, F, {{'format': 'pt'}})"
        return f"; it puts {prefix} before all names", f"take that off, by safetensors.torch: {code}"
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
    if beside := [name for name in sorted(others) if name.startswith(module)]:
        return f"; it has {', '.join(beside[:3])} in its place", "get the config.json of these weights: this is another model's"
    return "", OTHER_MODEL
