"""The Plan of a conversion. Everything that can be refused without weights is refused before a Plan exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attention.calibrated import Calibrated
from attention.errors import Refusal
from attention.formats import rounding_of
from attention.spec import AttentionSpec
from convert.families.base import unmodelled_fields
from convert.families.reading import family_for
from convert.methods.text import ASSUMED_CONTEXT, Method, TextUse
from convert.output.provenance import Recipe
from convert.planning.bounds import rotary_dim
from convert.planning.positions import limited

if TYPE_CHECKING:
    from attention.formats import Format
    from attention.rope import Rotary
    from convert.families import Family
    from convert.families.base import Traits
    from convert.hosts import Host
    from convert.hosts.engines import CacheOption, Engine
    from convert.output.destination import Output
    from convert.planning.calibration import Calibration, CalibrationOptions
    from convert.planning.targets import Target
    from eval.inputs.source import Source


@dataclass(frozen=True)
class Request:
    """What a user asks of a conversion besides its target.

    Attributes:
        source: The checkpoint to convert.
        output: Where the result goes.
        calibration: The options for calibration text.
        device: Where layers run and are changed, as on the command line.
        seed: For what the model writes, and the order in which refinement takes blocks of text.
        accepts_any_loss: Whether the result is published however much it loses: the user has named a method, or forced it.
        accepts_a_copy: Whether the result may be the source itself.
        checks: Whether the result is compared with its source at the end. A sweep evaluates all of its results instead.
    """

    source: Source
    output: Output
    calibration: CalibrationOptions
    device: str = "auto"
    seed: int = 0
    accepts_any_loss: bool = False
    accepts_a_copy: bool = True
    checks: bool = True


@dataclass(frozen=True)
class Plan:
    """A validated conversion, as data.

    Attributes:
        request: What the user asks for.
        family: The family that reads the source's attention.
        target: The attention to convert it to.
        calibration: How calibration text is used; None without text.
        runs_on: The device on which layers run and are changed.
        remarks: Notes for the user besides those of the target.
    """

    request: Request
    family: Family
    target: Target
    calibration: Calibration | None
    runs_on: str
    remarks: tuple[str, ...] = ()

    @property
    def source(self) -> Source:
        """The checkpoint to convert."""
        return self.request.source

    @property
    def output(self) -> Output:
        """Where the result goes."""
        return self.request.output

    @property
    def device(self) -> str:
        """Where layers run and are changed, as on the command line."""
        return self.request.device

    @property
    def seed(self) -> int:
        """For what the model writes, and the order in which refinement takes blocks of text."""
        return self.request.seed

    @property
    def before(self) -> AttentionSpec:
        """The sizes of the source's attention."""
        return self.target.before

    @property
    def context(self) -> int:
        """The tokens of a sequence at which KV bytes per token count."""
        return self.source.longest_context

    def sized(self, ranks: Sequence[int] | None) -> AttentionSpec:
        """The sizes of the result, with the ranks that a text has chosen for its layers, if it has."""
        return replace(self.target.spec, layer_ranks=tuple(ranks)) if ranks else self.target.spec

    def kv_bytes_per_token(self, after: AttentionSpec) -> tuple[float, float]:
        """Of the source's cache, and of that of a result with the sizes `after`."""
        source = self.before.bytes_per_token(self.source.dtype, self.context)
        return source, after.bytes_per_token(self.cache_dtype, self.context)

    @property
    def checks(self) -> bool:
        """Whether the result is compared with its source at the end."""
        return self.request.checks and not self.target.copies

    @property
    def from_weights_alone(self) -> bool:
        """Whether its method would use text, and has none."""
        return self.calibration is None and not self.target.copies and self.target.method.text is TextUse.USED

    @property
    def reads_text(self) -> bool:
        """Whether layers are converted by the calibration text: not if it is only there to heal the result."""
        text = self.calibration
        return text is not None and (text.in_sequence or self.target.method.text is not TextUse.IGNORED)

    @property
    def reads_projections(self) -> bool:
        """Whether what it makes is behind the source's projections (`attention.record.Projections`)."""
        return self.target.host.reads_projections(self.family)

    @property
    def channels(self) -> int:
        """How many numbers a token's statistics are about: those of a layer's input, or of all heads' keys and values."""
        return self.family.dims_of_heads if self.reads_projections else self.source.decoder.hidden_size

    @property
    def cache_dtype(self) -> str:
        """The dtype by which the bytes of the result's cache are counted."""
        return self.target.cache_dtype or self.output.dtype or self.source.dtype

    @property
    def calibrated(self) -> Calibrated | None:
        """For how many positions the result is calibrated; None if that is for all that its source has.

        GQA, and MLA with all rotary dims, keep the whole RoPE: these hold where the source does. So does what is calibrated
        for all that its layers see.
        """
        if (of := self.source.run_positions) is None:
            return None
        before, found = self.source.calibrated, of
        if not self.target.copies and self.target.spec.qk_rope_head_dim < self._rotary_dims:
            found = self.calibration.max_context if self.calibration else ASSUMED_CONTEXT
            seen = [self.family.window(layer) or of for layer in range(self.before.num_layers)]
            found = found if found < max(seen) else of
        found = min(found, before.positions if before else of)
        return Calibrated(found, of, found) if found < of else None

    @property
    def _rotary_dims(self) -> int:
        """The rotary dims of all keys that the result replaces by one RoPE key; 0 if it keeps heads."""
        return self.before.rotary_keys * rotary_dim(self.family) if self.target.spec.kv_lora_rank else 0

    def config(self, spec: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        """The result's config.json, for its sizes and the rotary embedding of its RoPE key, if it has one."""
        made, calibrated = self.target.config(self.source.raw, self.family, spec, rotary), self.calibrated
        return limited(made, calibrated.positions, calibrated.of) if calibrated and not self.target.copies else made

    @property
    def rounding(self) -> Format | None:
        """The format through whose rounding the result is made; None for a dtype."""
        return rounding_of(self.cache_dtype)

    @property
    def applied_method(self) -> str | None:
        """The method's name, or None if nothing changes."""
        return None if self.target.copies else self.target.method.name

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: the target's, then on windows, then the remarks, then the source's."""
        windows = self.before.window_note(self.context)
        return (*self.target.notes, *([windows] if windows else ()), *self.remarks, *self.source.notes)

    @property
    def layer_steps(self) -> tuple[str, ...]:
        """The steps that follow the method in each layer, by their names in `convert.execute.steps`."""
        refit = self.calibration is not None and self.calibration.refit
        return self.target.layer_steps(refit)

    @property
    def steps(self) -> list[str]:
        """The names of what happens to each layer, in order, and then to the whole result."""
        text, copies, dtype = self.calibration, self.target.copies, self.output.dtype
        taken = {
            "fit to outputs": text is not None and text.refit and not copies,
            "refine": text is not None and text.refine > 0 and not copies,
            "cast": dtype not in (None, self.source.dtype),
            "heal": bool(text and text.heal) and not copies,
        }
        ours = [] if copies else [self.target.method.name, *self.layer_steps]
        return [*ours, *(name for name, happens in taken.items() if happens)]

    @property
    def recipe(self) -> Recipe:
        """The command that repeats the result."""
        text = self.calibration.as_recipe() if self.calibration else {"no_text": True} if self.from_weights_alone else {}
        options = {
            "model": location_of(self.source),
            **self.target.recipe(),
            "method": self.target.method.name,
            "seed": self.seed,
            **({"dtype": self.output.dtype} if self.output.dtype else {}),
            **({"engine": self.output.engine} if self.output.engine else {}),
            "max_shard_size": _with_unit(self.output.max_shard_size),
            **text,
            **({"trust_remote_code": True} if self.source.trust_remote_code else {}),
        }
        return Recipe(self.target.command, options)

    def as_dict(self, ranks: Sequence[int] | None = None) -> dict[str, Any]:
        """The plan for `--json`, with the ranks of its layers once they are chosen: numbers stay numbers."""
        target, before, after = self.target, self.before, self.sized(ranks)
        held = self.kv_bytes_per_token(after)
        return {
            "command": target.command,
            "model": self.source.reference,
            "family": self.family.model_type,
            "source": before.kind,
            "target": after.kind,
            "query_heads": before.num_heads,
            "kv_heads_before": before.num_kv_heads,
            **target.facts(),
            "method": self.applied_method,
            "steps": self.steps,
            "calibration": self.calibration.as_options() if self.calibration else None,
            "output_class": target.host.name,
            "loads_in": target.host.loads_in,
            "model_type": target.host.layout(self.family).model_type,
            "cache_dtype": self.cache_dtype,
            "kv_bytes_per_token_before": held[0],
            "kv_bytes_per_token_after": held[1],
            **({"kv_context": self.context} if before.is_cut(self.context) else {}),
            "calibrated_positions": self.calibrated.positions if self.calibrated else None,
            "output": str(self.output.path),
            "notes": list(self.notes),
        }


def require_change(plan: Plan) -> Plan:
    """The plan, unless it would only copy its source, and the user does not accept a copy.

    Raises:
        Refusal: The result has the source's sizes, and its dtype.
    """
    if not plan.target.copies or "cast" in plan.steps or plan.request.accepts_a_copy:
        return plan
    reference, before = plan.source.reference, plan.before
    if before.kv_lora_rank:
        raise Refusal(f"{reference} is {before.kind} already", hint="give a smaller size, or copy it with --force")
    heads = before.num_kv_heads
    fewer = ", ".join(str(groups) for groups in range(heads - 1, 0, -1) if heads % groups == 0)
    step = f"choose {' or '.join(fewer.rsplit(', ', 1))}" if fewer else "make a latent of it with `convert mla`"
    raise Refusal(f"{reference} has {heads} KV head{'s' if fewer else ''} already", hint=f"{step}, or copy it with --force")


def location_of(source: Source) -> str:
    """Where a checkpoint is, for a recipe that is read from another directory."""
    path = source.gguf.path.absolute() if source.gguf else source.directory.resolve() if source.directory else None
    return str(path) if path else f"{source.repository}@{source.commit}"


def _with_unit(size: int) -> str:
    """`size` bytes in the largest unit that divides it: 5000000000 is "5GB"."""
    unit, name = next((u, n) for u, n in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"), (1, "B")) if size % u == 0)
    return f"{size // unit}{name}"


def readable(source: Source) -> Family:
    """The family of a source, by its config; it may be quantised.

    Raises:
        Refusal: It needs its own code, is no decoder alone, or belongs to no known family.
    """
    _refuse_foreign(source)
    family = family_for(source.config)
    if source.raw.get("per_layer_config"):
        raise Refusal(
            f"{source.reference} has layers with settings of their own (per_layer_config), which kvfold does not read yet",
            hint="`convert families` lists the types that can be read",
        )
    _refuse_stray_heads(source, family)
    if reason := family.unreadable:
        raise Refusal(f"{source.reference} cannot be read: {reason}", hint="`convert eval` measures it all the same")
    return family


def convertible(source: Source) -> Family:
    """The family of a source whose weights can be read, too.

    Raises:
        Refusal: As of `readable` or `quantisation`; or it is quantised.
    """
    family = readable(source)
    if kind := quantisation(source):
        raise Refusal(f"{source.reference} is quantised ({kind})", hint=_dequantised_by(kind))
    return family


def _refuse_foreign(source: Source) -> None:
    """Refuse what transformers has no class for, and a decoder that needs an encoder."""
    name = source.model_type
    if source.needs_code:  # which is not run to find this out
        raise Refusal(
            f"model type {name!r} cannot be read: its class is code of its own (auto_map in config.json), and kvfold reads "
            "classes of transformers",
            hint="`convert families` lists what can be read; `convert eval --trust-remote-code` runs that code to measure it",
        )
    if getattr(source.decoder, "is_causal", True) is False:
        raise Refusal(
            f"{source.reference} reads text both ways (is_causal is false in config.json)",
            hint="choose a model that reads forwards: only such a model has a KV cache",
        )
    if getattr(source.config, "is_encoder_decoder", False):
        raise Refusal(
            f"{source.reference} is an encoder–decoder (model type {name!r}): its decoder attends to an encoder's states, too",
            hint="choose a decoder-only model; `convert families` lists the model types that can be read",
        )


# By quant_method: the class of transformers by which a model is loaded dequantised.
_DEQUANTISE = {"compressed-tensors": "CompressedTensorsConfig", "fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


def quantisation(source: Source) -> str | None:
    """By what a source is quantised, as its config says; None if it is not.

    Raises:
        Refusal: As `Source.refuse_stale_quantisation`, of files on this machine.
    """
    if source.directory:
        source.refuse_stale_quantisation()
    return source.quantisation[0] if source.quantisation else None


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


def _refuse_stray_heads(source: Source, family: Family) -> None:
    """Refuse a number of KV heads that the class ignores, because nothing else would: all sizes would follow from it."""
    if not family.has_heads or family.shares_heads or family.needs_code:
        return
    heads, own = source.decoder.num_attention_heads, family.class_kv_heads
    if (stray := getattr(source.decoder, "num_key_value_heads", None)) not in (None, own):
        have = f"each of its {heads} query heads has keys and values of its own"
        raise Refusal(
            f"config.json of {source.reference} sets num_key_value_heads to {stray}, which {family.model_type} ignores: "
            + (have if own == heads else f"its {heads} query heads share {own}"),
            hint="remove that key",
        )


def stored_dtype(source: Source, output: Output) -> str:
    """The dtype of a result's weights, which its cache is kept in, too.

    Raises:
        Refusal: It would be float64, which no engine serves.
    """
    dtype = output.dtype or source.dtype
    if dtype == "float64":
        raise Refusal(
            f"{source.reference} is stored in float64, which no engine serves a model in",
            hint="give --dtype float32, bfloat16 or float16",
        )
    return dtype


def require_stored(engine: Engine, cache_dtype: str | None, caches: Sequence[CacheOption], untried: bool = False) -> None:
    """Refuse a format of the cache that is not among those that an engine stores, or that was not tried."""
    stored = [cache.form for cache in caches if cache.tried or untried]
    if rounding_of(cache_dtype) is not None and cache_dtype not in stored:
        raise Refusal(
            f"it is not known whether {engine.name} stores caches in {cache_dtype}",
            hint=f"choose {', '.join(stored)}, or leave out --engine" if stored else "leave out --engine or --cache-dtype",
        )


def host_of(
    hosts: Sequence[Host],
    family: Family,
    source: Source,
    target: AttentionSpec,
    engine: Engine | None = None,
    hint: str | None = None,
) -> Host:
    """The first output class that can carry a target.

    Args:
        hosts: The classes, in order of preference: `HOSTS` of "gqa", "mqa" or "mla", or `PORTABLE`.
        family: The source's family.
        source: The checkpoint to convert.
        target: The sizes of the result.
        engine: What has to run it; sizes of latents are not asked here.
        hint: The next step if no class can.

    Raises:
        Refusal: No class can; the message gives the reason of each.
    """
    refusals = []
    for host in hosts:
        reason = unfit(host, family, target, engine)
        if reason is None:
            return host
        refusals.append(f"{host.name}: {reason}")
    carried = "MLA" if target.kv_lora_rank else target.kind
    raise Refusal(f"no output class carries {carried} of {source.reference}: {'; '.join(refusals)}", hint=hint)


def unfit(host: Host, family: Family, target: AttentionSpec, engine: Engine | None) -> str | None:
    """Why an output class cannot carry a target, or an engine does not run it; None if nothing is in the way."""
    if family.traits.sinks and not host.keeps_sinks:
        return "its heads have sinks (logits of their own in every softmax), and those of the class have none"
    if reason := host.refuses(family, target):
        return reason
    if target.layer_ranks is not None and not host.ranks_per_layer:
        return "the latents of its layers have one rank"
    if engine and engine.name not in host.engines(family):
        return f"{engine.name} does not run it, as far as was tried"
    return None


def text_notes(method: Method, text: Calibration | None, traits: Traits) -> Sequence[str]:
    """Notes about missing text that the method could use, and about a refit that the source rules out."""
    if text is None and method.text is TextUse.USED:
        return [f"no calibration text: {method.name} uses weights and norm gains alone, which ruins most models"]
    if text and text.refit and (hiding := unmodelled_fields(traits)):
        return [f"only outputs are refitted: {' and '.join(hiding)} changes what heads attend to"]
    return []
