"""What a source and an output class allow: the family that reads a source, and the first class that carries a target.

Whether kvfold's class holds a type that experiments found, a small twin of full size shows: it has to lose nothing there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from attention.errors import Refusal, one_line
from attention.formats import rounding_of
from attention.spec import AttentionSpec
from convert.families.reading import family_for

if TYPE_CHECKING:
    import torch

    from attention.record import Record
    from convert.families import Family
    from convert.families.reading.twin import Twin
    from convert.hosts import Host
    from convert.hosts.engines import CacheOption, Engine
    from convert.methods.latent import LatentMethod
    from eval.inputs.source import Source

# By quant_method: the class of transformers by which a model is loaded dequantised.
_DEQUANTISE = {"compressed-tensors": "CompressedTensorsConfig", "fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
_ALIKE = 1e-4  # of the largest logit


def readable(source: Source) -> Family:
    """The family of a source, by its config; it may be quantised.

    Raises:
        Refusal: It needs its own code, is no decoder alone, or belongs to no known family.
    """
    if source.needs_code:  # which is not run to find this out
        raise Refusal(
            f"model type {source.model_type!r} cannot be read: its class is code of its own (auto_map in config.json), and "
            "kvfold reads classes of transformers",
            hint="`convert families` lists what can be read; `convert eval --trust-remote-code` runs that code to measure it",
        )
    if getattr(source.decoder, "is_causal", True) is False:
        raise Refusal(
            f"{source.reference} reads text both ways (is_causal is false in config.json)",
            hint="choose a model that reads forwards: only such a model has a KV cache",
        )
    if getattr(source.config, "is_encoder_decoder", False):
        raise Refusal(
            f"{source.reference} is an encoder–decoder (model type {source.model_type!r}): its decoder attends to an encoder's "
            "states, too",
            hint="choose a decoder-only model; `convert families` lists the model types that can be read",
        )
    family = family_for(source.config)
    if source.raw.get("per_layer_config"):
        raise Refusal(
            f"{source.reference} has layers with settings of their own (per_layer_config), which kvfold does not read yet",
            hint="`convert families` lists the types that can be read",
        )
    if stray := _stray_heads(family):
        raise Refusal(f"config.json of {source.reference} sets num_key_value_heads to {stray}", hint="remove that key")
    if reason := family.unreadable:
        raise Refusal(f"{source.reference} cannot be read: {reason}", hint="`convert eval` measures it all the same")
    return family


def trainable(source: Source) -> Family:
    """The family of a checkpoint whose weights can be read, too.

    Raises:
        Refusal: As of `readable`; or it is quantised, or says so without reason.
    """
    family = readable(source)
    if source.directory:
        source.refuse_stale_quantisation()
    if source.quantisation:
        kind, _ = source.quantisation
        raise Refusal(f"{source.reference} is quantised ({kind})", hint=_dequantised_by(kind))
    return family


def convertible(source: Source) -> Family:
    """The family of a source that can be converted.

    Raises:
        Refusal: As of `trainable`; or it has a latent, or kvfold's class.
    """
    family = trainable(source)
    if not family.has_heads or family.needs_code:
        kind = "latent attention" if family.spec.kv_lora_rank else "kvfold's class"
        raise Refusal(
            f"{source.reference} has {kind} already ({family.spec.kind}), and is not converted again",
            hint="convert the checkpoint that it was made from; `convert heal` trains it, `convert eval` measures it",
        )
    return family


def _dequantised_by(kind: str) -> str:
    """The next step for a quantised checkpoint: how it is dequantised, where that is possible."""
    original = "convert the original checkpoint, then quantise"
    if kind == "MLX":
        return f"{original}; or dequantise it: `mlx_lm.convert --hf-path MODEL --mlx-path DIR --dequantize`"
    load, save = "AutoModelForCausalLM.from_pretrained(MODEL", ".save_pretrained(DIR, save_original_format=False)"
    if config := _DEQUANTISE.get(kind):
        load = f'{load}, dtype="bfloat16", quantization_config={config}(dequantize=True))'
    elif kind == "bitsandbytes":
        load = f"{load}).dequantize()"
    else:
        return original
    return f"{original}; or dequantise it, and copy its tokenizer: {load}{save}"


def _stray_heads(family: Family) -> str | None:
    """A number of KV heads that the class ignores, and what it does instead; all sizes would follow from it."""
    if not family.has_heads or family.shares_heads or family.needs_code:
        return None
    heads, own = family.decoder.num_attention_heads, family.class_kv_heads
    if (stray := getattr(family.decoder, "num_key_value_heads", None)) in (None, own):
        return None
    have = f"each of its {heads} query heads has keys and values of its own"
    return f"{stray}, which {family.model_type} ignores: " + (have if own == heads else f"its {heads} query heads share {own}")


def require_served(dtype: str) -> None:
    """Refuse a dtype of weights, and of the cache, that no engine serves."""
    if dtype == "float64":
        raise Refusal(
            "the source is stored in float64, which no engine serves a model in",
            hint="give --dtype float32, bfloat16 or float16",
        )


def require_stored(engine: Engine, cache_dtype: str | None, caches: Sequence[CacheOption], untried: bool = False) -> None:
    """Refuse a format of the cache that is not among those that an engine stores, or that was not tried."""
    stored = [cache.form for cache in caches if cache.tried or untried]
    if rounding_of(cache_dtype) is not None and cache_dtype not in stored:
        raise Refusal(
            f"no result was run in {engine.name} with its cache in {cache_dtype}",
            hint=f"choose {', '.join(stored)}, or leave out --engine" if stored else "leave out --engine or --cache-dtype",
        )


class Kept(NamedTuple):
    """Layers that stay as they are, and whether the user named some, so that no other result will do."""

    layers: Collection[int]
    required: bool


def staying(family: Family, layers: Collection[int] = (), all_layers: bool = False) -> Kept:
    """The layers that stay as they are: those that the user names, and those with windows, whose cache does not grow.

    Where all have windows, or with `all_layers`, these are converted, too.

    Raises:
        Refusal: There is no such layer, or all would stay.
    """
    spec = family.spec
    if wrong := sorted({*layers} - {*range(spec.num_layers)}):
        raise Refusal(f"cannot keep layer {wrong[0]}: the model has layers 0 to {spec.num_layers - 1}")
    bounded = {layer for layer, window in enumerate(spec.windows or ()) if window}
    if all_layers or len(bounded) == spec.num_layers:
        bounded = set()
    if len(found := bounded | {*layers}) == spec.num_layers:
        raise Refusal("all layers would stay as they are", hint="name fewer with --keep-layers")
    return Kept(found, bool(layers))


def held_by(
    hosts: Sequence[Host],
    family: Family,
    target: AttentionSpec,
    kept: Kept,
    engine: Engine | None = None,
    hint: str | None = None,
) -> tuple[Host, AttentionSpec]:
    """The first output class that can carry a target in which layers stay, and that target.

    Where no class can keep layers that the user did not name, all are converted.

    Args:
        hosts: The classes, in order of preference: `HOSTS` of "gqa", "mqa" or "mla", or `PORTABLE`.
        family: The source's family.
        target: The sizes of the result, as if all layers were converted.
        kept: The layers that stay.
        engine: What has to run it; sizes of latents are not asked here.
        hint: The next step if no class can.

    Raises:
        Refusal: No class can; the message gives the reason of each.
    """
    keeping, refusals = target.keeping(kept.layers, family.spec.num_kv_heads), []
    for host in hosts:
        if (reason := unfit(host, family, keeping, engine)) is None:
            return host, keeping
        refusals.append(f"{host.name}: {reason}")
    if kept.layers and not kept.required:
        return held_by(hosts, family, target, Kept((), required=False), engine, hint)
    carried = "MLA" if target.kv_lora_rank else keeping.kind
    raise Refusal(f"no output class carries {carried} of this {family.model_type} model: {'; '.join(refusals)}", hint=hint)


def unfit(host: Host, family: Family, target: AttentionSpec, engine: Engine | None) -> str | None:
    """Why an output class cannot carry a target, or an engine does not run it; None if nothing is in the way."""
    if family.traits.sinks and not host.keeps_sinks:
        return "its heads have sinks (logits of their own in every softmax), and those of the class have none"
    if reason := host.refuses(family, target):
        return reason
    if target.kept and not host.code:
        return "its layers all have one kind of attention, and some are to stay as they are"
    if engine and (reason := engine.kept_objection(target)):
        return reason
    if engine and engine.name not in host.engines(family):
        return f"{engine.name} does not run it, as far as was tried"
    return None


def require_held(host: Host, family: Family, method: LatentMethod | None = None) -> None:
    """Refuse a found type that kvfold's class does not hold. Rows of types were tested.

    Args:
        host: The output class.
        family: Of the source, bound to its config.
        method: Of MLA, any: at full size each is exact. None for GQA and MQA.

    Raises:
        Refusal: The twin's logits change, or it does not run.
    """
    if family.is_row or host.kind != "kvfold":
        return
    from attention.models.modeling_kvfold import require_decoding
    from convert.families.reading.twin import Twin, near

    hint = (
        "GQA and MQA of all layers stay in its own class" if family.shares_heads else "`convert eval` measures it all the same"
    )
    try:
        twin = Twin(family.config)
        before = twin.logits(twin.text())
        made = _full_size(host, family.of(twin.config), twin, method)
        after = made(twin.text(), use_cache=False).logits
        require_decoding(made)
    except Exception as error:  # classes raise errors of many kinds
        said = f"a small model of {family.config.model_type} in {host.name}'s class does not run: {one_line(error, 200)}"
        raise Refusal(said, hint=hint) from None
    if not near(after, before, _ALIKE):
        raise Refusal(f"{host.name}'s class does not compute what {family.config.model_type} does, on a small model", hint=hint)


def _full_size(host: Host, family: Family, twin: Twin, method: LatentMethod | None) -> Any:
    """The twin in the host's class, with all its KV heads or as MLA of full size."""
    from attention.models.configuration_kvfold import KvfoldConfig
    from attention.models.modeling_kvfold import KvfoldForCausalLM
    from attention.record import Attention
    from convert.methods.latent import Allocation
    from convert.methods.statistics import Statistics

    config, spec, rotary = twin.config, family.spec, family.first_rotary
    pairs = tuple(pair for pair in range(len(rotary.frequencies)) for _ in range(spec.num_kv_heads)) if rotary else ()
    target = spec.latent(family.latent_dims(2 * len(pairs)), 2 * len(pairs)) if method else spec
    allocation = Allocation(target.kv_lora_rank or 0, pairs, rotary=rotary)
    state, layout = twin.model.state_dict(), host.layout(family)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(spec.num_layers):
        record: Record = family.split({name: state.pop(name) for name in family.shapes(layer)}, layer)
        assert isinstance(record, Attention), "experiments find heads"
        statistics = Statistics.assumed(config.hidden_size)
        if host.reads_projections(family):
            record = record.on_projected_inputs(family.traits.clip)
            assert record.projections is not None
            statistics = statistics.behind(record.projections)
        if method:
            record = method.factor(record, allocation, statistics)
        tensors |= layout.join(record, target, layer)
    tensors |= {kept: tensor for name, tensor in state.items() if (kept := layout.beside(name)) is not None}
    chosen = rotary.select(pairs, "half") if rotary and method else None
    model = KvfoldForCausalLM(KvfoldConfig(**host.config(config.to_dict(), family, target, chosen))).float().eval()
    model.load_state_dict(tensors)
    return model
