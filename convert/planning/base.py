"""The Plan of a conversion. Everything that can be refused without weights is refused before a Plan exists.

`plan_grouped` and `plan_latent` make the target of one; `allowed` says what can become a source and a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attention.calibrated import Calibrated
from attention.errors import Refusal
from attention.rope import no_rotary
from attention.spec import AttentionSpec
from convert.families.base import CLIP
from convert.methods.text import ASSUMED_CONTEXT, TextUse
from convert.output.destination import versions, without_text
from convert.planning.positions import limited
from convert.planning.targets import GroupedTarget
from convert.planning.texts import as_options
from eval.machine.capacity import count_parameters
from eval.machine.device import compute_device, free_memory, rough, whole_memory

if TYPE_CHECKING:
    import torch

    from attention.rope import Rotary
    from convert.families import Family
    from convert.output.destination import Output
    from convert.planning.calibration import Calibration, CalibrationOptions
    from convert.planning.targets import Target
    from eval.inputs.source import Source

_BYTES = 4  # of a weight: models run in fp32 on some devices
_TO_HEAL = 20  # bytes for each weight: source and result in fp32, gradients and moments of attention, activations
_SHARE = 0.8  # of a device's memory that a healing by default may take
HEALED = 65536  # tokens by default, at most: as many as the calibration has


@dataclass(frozen=True)
class Request:
    """What a user asks of a conversion besides its target.

    Attributes:
        source: The checkpoint to convert.
        output: Where the result goes.
        text: The options for calibration text.
        keep_layers: Layers that stay as they are, besides those with windows.
        all_layers: Whether those with windows are converted, too.
        device: Where layers run and are changed, as on the command line.
        seed: For what the model writes.
        accepts_any_loss: Whether the result is published however much it loses: the user has named a method, or forced it.
        accepts_a_copy: Whether the result may be the source itself.
        checks: Whether the result is compared with its source at the end. A sweep evaluates all of its results instead.
    """

    source: Source
    output: Output
    text: CalibrationOptions
    keep_layers: tuple[int, ...] = ()
    all_layers: bool = False
    device: str = "auto"
    seed: int = 0
    accepts_any_loss: bool = False
    accepts_a_copy: bool = True
    checks: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan(Request):
    """A validated conversion, as data: a request, and what follows from it. A copy is not compared with its source.

    Attributes:
        family: The family that reads the source's attention.
        target: The attention to convert it to.
        calibration: How calibration text is used; None without text.
        runs_on: The device on which layers run and are changed.
        location: Where the source is, for a recipe that is read from another directory.
        text_given: Whether there was a text, if only for a copy, which needs none.
    """

    family: Family
    target: Target
    calibration: Calibration | None
    runs_on: torch.device
    location: str
    text_given: bool

    @classmethod
    def of(cls, request: Request, family: Family, target: Target, text: Calibration | None) -> Plan:
        """The plan of a target.

        Args:
            request: What the user asks for.
            family: The family that reads the source's attention.
            target: The attention to convert it to.
            text: How calibration text is used; None without text.

        Raises:
            Refusal: The device has no room for a model that has to write its text; or the result would be the source itself,
                and the user does not accept a copy.
        """
        device = compute_device(request.device)
        used = None if target.copies or text is None else with_room(text, request.source.config, device)
        # Pooling heads is too little work to be worth moving weights.
        pools = isinstance(target, GroupedTarget) and target.method.text is TextUse.IGNORED and used is None
        runs_on = compute_device("cpu") if pools and request.device == "auto" else device
        given = vars(request) | {"checks": request.checks and not target.copies, "location": location_of(request.source)}
        plan = cls(**given, family=family, target=target, calibration=used, runs_on=runs_on, text_given=text is not None)
        if target.copies and "cast" not in plan.steps and not request.accepts_a_copy:
            heads = plan.before.num_kv_heads
            fewer = ", ".join(str(groups) for groups in range(heads - 1, 0, -1) if heads % groups == 0)
            step = f"choose {' or '.join(fewer.rsplit(', ', 1))}" if fewer else "make a latent of it with `convert mla`"
            said = f"{plan.source.reference} has {heads} KV head{'s' if fewer else ''} already"
            raise Refusal(said, hint=f"{step}, or copy it with --force")
        return plan

    @property
    def before(self) -> AttentionSpec:
        """The sizes of the source's attention."""
        return self.target.before

    @property
    def context(self) -> int:
        """The tokens of a sequence at which KV bytes per token count."""
        return self.source.longest_context

    @property
    def kv_bytes_per_token(self) -> tuple[float, float]:
        """Of the source's cache, and of the result's."""
        source = self.before.bytes_per_token(self.source.dtype, self.context)
        return source, self.target.spec.bytes_per_token(self.cache_dtype, self.context)

    @property
    def from_weights_alone(self) -> bool:
        """Whether its method would use text, and has none."""
        return self.calibration is None and not self.target.copies and self.target.method.text is TextUse.USED

    @property
    def reads_projections(self) -> bool:
        """Whether what it makes is behind the source's projections (`attention.record.Projections`)."""
        return self.target.host.reads_projections(self.family)

    @property
    def unmodelled(self) -> list[str]:
        """Config fields that make the source's attention differ from what the logits of its records say."""
        return [field for field in self.family.traits.unmodelled if not (self.reads_projections and field == CLIP)]

    @property
    def channels(self) -> int:
        """How many numbers a token's statistics are about: those of a layer's input, or of all heads' keys and values."""
        spec = self.before
        return 2 * spec.num_kv_heads * spec.head_dim if self.reads_projections else self.source.decoder.hidden_size

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
        latent = self.target.spec.kv_lora_rank is not None
        seen = [self.family.window(layer) or of for layer in self.target.spec.changed if self.family.rotary(layer)]
        if latent and seen and self.target.spec.qk_rope_head_dim < self.before.num_kv_heads * self.rotary.dims:
            found = self.calibration.max_context if self.calibration else ASSUMED_CONTEXT
            found = found if found < max(seen) else of
        found = min(found, before.positions if before else of)
        return Calibrated(found, of, found) if found < of else None

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of the source, of no dims without RoPE."""
        return self.family.first_rotary or no_rotary()

    @property
    def layout(self) -> Family:
        """The family of the result's tensors."""
        return self.target.host.layout(self.family)

    def plain_config(self, pairs: Sequence[int] | None) -> dict[str, Any]:
        """The result's config.json as of `Host.config`, without for how many positions it is calibrated."""
        spec = self.target.spec
        rotary = self.rotary.select(pairs, "interleaved") if spec.kv_lora_rank and pairs is not None else None
        return self.target.host.config(self.source.raw, self.family, spec, rotary)

    def config(self, pairs: Sequence[int] | None) -> dict[str, Any]:
        """The result's config.json, for the frequencies of its RoPE key, if it has one."""
        made, calibrated = self.plain_config(pairs), self.calibrated
        return limited(made, calibrated.positions, calibrated.of) if calibrated and not self.target.copies else made

    @property
    def applied_method(self) -> str | None:
        """The method's name, or None if nothing changes."""
        return None if self.target.copies else self.target.method.name

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: the target's, on windows, on text that is missing, not used or cannot refit, and the source's."""
        notes, text = list(self.target.notes), self.calibration
        if windows := self.before.window_note(self.context):
            notes.append(windows)
        if kept := self.target.spec.kept:
            notes.append(f"layers that stay as they are: {', '.join(map(str, kept))}")
        if self.target.copies:
            notes += ["the calibration text is not used"] if self.text_given else []
        elif self.from_weights_alone:
            name = self.target.method.name
            notes.append(f"no calibration text: {name} uses weights and norm gains alone, which ruins most models")
        elif text and text.refit and (hiding := self.unmodelled):
            notes.append(f"only outputs are refitted: {' and '.join(hiding)} changes what heads attend to")
        return (*notes, *self.source.notes)

    @property
    def steps(self) -> list[str]:
        """The names of what happens to each layer, in order, and then to the whole result."""
        target, text, family = self.target, self.calibration, self.family
        refit, latent = text is not None and text.refit, target.spec.kv_lora_rank is not None
        taken = {
            target.method.name: True,
            "constant norm": target.host.portable,
            "balance": target.rounding is not None,
            "refit": refit,
            "queries behind a norm": target.spec.q_lora_rank is not None,
            "scale": latent,
            "fit to outputs": refit,
            "sharpen": refit and latent and any(map(family.rotary, target.spec.changed)) and not self.unmodelled,
            "cast": self.output.dtype not in (None, self.source.dtype),
            "heal": bool(text and text.heal),
        }
        return [name for name, happens in taken.items() if happens and (name == "cast" or not target.copies)]

    @property
    def recipe(self) -> dict[str, Any]:
        """The options by which `convert run` repeats the result from any directory; OUTPUT is left out."""
        text: dict[str, Any] = {"no_text": True} if self.from_weights_alone else {}
        if self.calibration:
            text = self.calibration.as_options() | as_options(self.calibration.texts, absolute=True)
        size, units = self.output.max_shard_size, ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"), (1, "B"))
        unit, name = next((unit, name) for unit, name in units if size % unit == 0)
        return {
            "model": self.location,
            **self.target.recipe(),
            "method": self.target.method.name,
            "seed": self.seed,
            **({"keep_layers": list(self.keep_layers)} if self.keep_layers else {}),
            **({"all_layers": True} if self.all_layers else {}),
            **({"dtype": self.output.dtype} if self.output.dtype else {}),
            **({"engine": self.output.engine} if self.output.engine else {}),
            "max_shard_size": f"{size // unit}{name}",
            **text,
            **({"trust_remote_code": True} if self.source.trust_remote_code else {}),
        }

    def inputs(self, texts: list[str | None]) -> dict[str, Any]:
        """All that decides the result's bytes, without its healing, which a resumed run may leave out.

        Args:
            texts: The hash of each calibration text; None for the model's own.
        """
        return {
            "command": self.target.command,
            **without_text(self.recipe),
            "heal": None,
            "device": str(self.runs_on),
            "rough_products_in": str(rough(self.runs_on)),
            "config": self.source.raw,
            "files": self.source.fingerprint,
            "calibration_hashes": texts,
            "rows_to_write": self.calibration.rows_to_write if self.calibration else 0,
            "versions": versions(),
        }

    def as_dict(self) -> dict[str, Any]:
        """The plan for `--json`: numbers stay numbers."""
        target, before, after = self.target, self.before, self.target.spec
        held = self.kv_bytes_per_token
        return {
            "command": target.command,
            "model": self.source.reference,
            "family": self.family.model_type,
            "source": before.kind,
            "target": after.kind,
            "query_heads": before.num_heads,
            "kv_heads_before": before.num_kv_heads,
            **target.facts(),
            **({"kept_layers": list(after.kept)} if after.kept else {}),
            "method": self.applied_method,
            "steps": self.steps,
            "calibration": self.calibration.as_options() if self.calibration else None,
            "output_class": target.host.name,
            "loads_in": target.host.loads_in,
            "model_type": self.layout.model_type,
            "cache_dtype": self.cache_dtype,
            "kv_bytes_per_token_before": held[0],
            "kv_bytes_per_token_after": held[1],
            **({"kv_context": self.context} if before.is_cut(self.context) else {}),
            "calibrated_positions": self.calibrated.positions if self.calibrated else None,
            "output": str(self.output.path),
            "notes": list(self.notes),
        }


def location_of(source: Source) -> str:
    """Where a checkpoint is, for a recipe that is read from another directory."""
    path = source.gguf.path.absolute() if source.gguf else source.directory.resolve() if source.directory else None
    return str(path) if path else f"{source.repository}@{source.commit}"


def with_room(calibration: Calibration, config: Any, device: Any) -> Calibration:
    """The calibration of a model, healed by default where a device has memory for that, and none was asked for or ruled out.

    Whatever else uses the memory now does not matter: the same command gives the same plan.

    Raises:
        Refusal: The model has to write its text, and does not fit in memory.
    """
    if calibration.rows_to_write and (missing := lacks_room(config, device)):
        raise Refusal(
            f"the model cannot write its own calibration text: {missing}",
            hint="calibrate on a text with --text FILE; --no-text uses weights alone, and ruins most models",
        )
    if calibration.heal is not None:
        return calibration
    needed = _TO_HEAL * count_parameters(config)
    return replace(calibration, heal=min(HEALED, calibration.tokens) if needed <= _SHARE * whole_memory(device) else 0)


def lacks_room(config: Any, device: Any) -> str | None:
    """The memory that the whole model of a config lacks on a device, or None."""
    needed, free = _BYTES * count_parameters(config), free_memory(device)
    if needed <= free:
        return None
    return f"it takes {needed / 1e9:.1f} GB, and {device} has {free / 1e9:.1f} GB free"
