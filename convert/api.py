"""The Python API, which the command line calls too: `from convert import gqa, mqa, mla, heal, sweep, plan, inspect`.

Arguments have the names and defaults of the options. Functions return objects, raise `Refusal` or `Failure`, print nothing
and warn through the logger "kvfold".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attention.errors import Refusal
from attention.spec import dtype_bytes
from convert import methods
from convert.planning.sizes import parse_budget, parse_bytes, parse_count, parse_latent, parse_time, parse_tokens
from convert.planning.texts import DEFAULT, OneText, TextGiven, texts_of
from eval.api import contexts_of, read_text
from eval.inputs.arguments import checked
from eval.inputs.source import Source
from eval.inputs.text import about_tokens
from eval.terminal.progress import Progress, silent

if TYPE_CHECKING:
    from convert.execute.run import Conversion
    from convert.healing.plan import HealPlan
    from convert.healing.run import Healing
    from convert.output.place import Output
    from convert.planning.base import Plan
    from convert.planning.calibration import CalibrationOptions
    from convert.planning.describe import Facts
    from convert.planning.latent import LatentRequest
    from convert.sweeping import Sweep

MAX_SHARD_SIZE = 5 * 10**9


@checked
def gqa(
    model: str | Path,
    output: str | Path,
    *,
    groups: int,
    method: str | None = None,
    grouping: str = "contiguous",
    text: TextGiven | None = None,
    dataset: str | None = None,
    no_text: bool = False,
    calibration_tokens: int | None = None,
    calibration_context: int | None = None,
    max_context: int | None = None,
    refit: bool | None = None,
    refine: int | None = None,
    heal: int | str | None = None,
    evaluate: OneText | None = None,
    dtype: str | None = None,
    engine: str | None = None,
    device: str = "auto",
    seed: int = 0,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Conversion:
    """Convert a checkpoint to grouped-query attention.

    Args:
        model: Directory, GGUF file or Hub id, with an optional `@revision`.
        output: The directory to create.
        groups: KV heads of the result; must divide those of the model.
        method: How heads are merged, one of `convert.methods.GROUPED`; None for "aligned". A named one may lose any amount.
        grouping: Which heads share a group: "contiguous" or "similar".
        text: Calibration text: a UTF-8 file, a list of strings, or "self" for what the model writes itself; several with their
            shares of the tokens as a mapping, such as `{"self": 1, "code.txt": 2}`.
            None for "self", where a method uses text.
        dataset: A named dataset, whose training split is used; beside `text` with a share of 1.
        no_text: Calibrate on no text: from weights alone, which ruins most models.
        calibration_tokens: Tokens to use, in blocks spread evenly over each text; None for 32768, or for 65536 of the model's
            own text alone.
        calibration_context: Tokens per block; None for 2048, or for 512 of the model's own text alone; at most the model's
            limit.
        max_context: Tokens of the longest context that the result is for; None for `calibration_context`, or 2048, or the
            model's limit.
        refit: Refit queries, keys, values (GQA) and outputs by least squares; None: if there is text and the method uses it.
        refine: Steps of gradient descent that then fit each layer to its source.
        heal: Tokens of the text, a number or "64k", that the result is distilled on at the end; 0 for none; None for
            as many as are calibrated on, up to 65536, where the model trains in memory and the method uses text, but in
            sweeps, which heal only if asked to.
        evaluate: Held-out text to measure perplexity on: a UTF-8 file, or a list of strings.
        dtype: "float32", "bfloat16" or "float16" to store floats in; None keeps each tensor's own.
        engine: What has to run the result, one of `convert.hosts.engines.ENGINES`; None for nothing in particular.
        device: "auto", "cpu", "cuda", "cuda:1", …
        seed: For methods that draw numbers, and the order in which refinement takes blocks of text.
        max_shard_size: Bytes of a weight file, or "5GB".
        overwrite: Replace a checkpoint at `output`.
        resume: Finish an interrupted run with the same arguments.
        force: Publish the result, however much it loses.
        dry_run: Only plan; read no weights.
        trust_remote_code: Run Python code that comes with the checkpoint.
        progress: Called as `progress(stage, done, total, unit)`.

    Raises:
        Refusal: Wrong as seen from the arguments and the config.
        Failure: Weights, text or machine.
        NotPublished: The result is of no use by a check at the end, and neither a method nor `force` was given.
    """
    from convert.planning.grouped import plan_grouped

    source = Source.parse(str(model), trust_remote_code)
    calibration = _calibration(
        text, dataset, no_text, calibration_tokens, calibration_context, max_context, refit, refine, heal
    )
    where = _output(output, dtype, max_shard_size, overwrite, resume, engine)
    _require_range("seed", seed, 0, 2**32 - 1)
    how = methods.load_grouped(method or methods.GROUPED[0])
    planned = plan_grouped("gqa", source, groups, how, seed, device, where, calibration, grouping)
    planned = replace(planned, accepts_any_loss=force or method is not None)
    return _carried_out(planned, evaluate, dry_run, progress)


@checked
def mqa(
    model: str | Path,
    output: str | Path,
    *,
    method: str | None = None,
    text: TextGiven | None = None,
    dataset: str | None = None,
    no_text: bool = False,
    calibration_tokens: int | None = None,
    calibration_context: int | None = None,
    max_context: int | None = None,
    refit: bool | None = None,
    refine: int | None = None,
    heal: int | str | None = None,
    evaluate: OneText | None = None,
    dtype: str | None = None,
    engine: str | None = None,
    device: str = "auto",
    seed: int = 0,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Conversion:
    """Convert a checkpoint to multi-query attention: one KV head. Arguments and errors as for `gqa`."""
    from convert.planning.grouped import plan_grouped

    source = Source.parse(str(model), trust_remote_code)
    calibration = _calibration(
        text, dataset, no_text, calibration_tokens, calibration_context, max_context, refit, refine, heal
    )
    where = _output(output, dtype, max_shard_size, overwrite, resume, engine)
    _require_range("seed", seed, 0, 2**32 - 1)
    how = methods.load_grouped(method or methods.GROUPED[0])
    planned = plan_grouped("mqa", source, 1, how, seed, device, where, calibration)
    planned = replace(planned, accepts_any_loss=force or method is not None)
    return _carried_out(planned, evaluate, dry_run, progress)


@checked
def mla(
    model: str | Path,
    output: str | Path,
    *,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    kv_budget: str | int | float | None = None,
    method: str | None = None,
    freqfold: int | None = None,
    pad_rank: bool = False,
    q_lora_rank: int | None = None,
    portable: bool = False,
    per_layer_ranks: bool = False,
    text: TextGiven | None = None,
    dataset: str | None = None,
    no_text: bool = False,
    calibration_tokens: int | None = None,
    calibration_context: int | None = None,
    max_context: int | None = None,
    refit: bool | None = None,
    refine: int | None = None,
    heal: int | str | None = None,
    evaluate: OneText | None = None,
    dtype: str | None = None,
    engine: str | None = None,
    device: str = "auto",
    seed: int = 0,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Conversion:
    """Convert a checkpoint to multi-head latent attention, or one that kvfold made to a smaller latent.

    Args as of `gqa`, and:
        kv_lora_rank: Channels of the latent, including the constant ones of the output class.
        qk_rope_head_dim: Dims of the rotary key that all heads share.
        kv_budget: Instead of both: a share of the model's cache ("12.5%", 0.125), or bytes per token ("4KB", 4096).
        method: How keys and values are factored, one of `convert.methods.LATENT`; None for "weighted".
        freqfold: For methods that fold: how many neighbouring frequencies count as one; None for the fewest.
        pad_rank: Allow a rank beyond full size; channels of zeros fill it up.
        q_lora_rank: The rank of a latent of queries, including its constant channels; None for queries of full rank.
        portable: Write neither biases nor a list of frequencies, for engines' own DeepSeek classes; needs text.
        per_layer_ranks: Let the text choose the rank of each layer, so that all together cache no more; in kvfold's class.

    Raises:
        Refusal: Wrong as seen from the arguments and the config.
        Failure: Weights, text or machine.
    """
    from convert.planning.latent import LatentRequest, plan_latent

    source = Source.parse(str(model), trust_remote_code)
    share, size = _budget(kv_budget)
    sizes = kv_lora_rank, qk_rope_head_dim, share, size
    wanted = LatentRequest(*sizes, freqfold, pad_rank, q_lora_rank, portable, per_layer_ranks)
    calibration = _calibration(
        text, dataset, no_text, calibration_tokens, calibration_context, max_context, refit, refine, heal
    )
    where = _output(output, dtype, max_shard_size, overwrite, resume, engine)
    _require_range("seed", seed, 0, 2**32 - 1)
    how = methods.load_latent(method or methods.LATENT[0])
    planned = plan_latent(source, wanted, how, calibration, device, where, seed)
    planned = replace(planned, accepts_any_loss=force or method is not None)
    return _carried_out(planned, evaluate, dry_run, progress)


@checked
def heal(
    converted: str | Path,
    output: str | Path,
    *,
    teacher: str | Path | None = None,
    text: TextGiven | None = None,
    dataset: str | None = None,
    tokens: int | str | None = None,
    time: float | str | None = None,
    effort: str = "quick",
    context: int | None = None,
    batch_tokens: int | str | None = None,
    micro_batch_tokens: int | str | None = None,
    lr: float | str = "auto",
    train: str = "attention",
    lora_rank: int | None = None,
    ce: float = 0.0,
    top_k: int | None = None,
    teacher_cache: str | Path | None = None,
    eval_every: int | str | None = None,
    checkpointing: bool = False,
    track: str | None = None,
    evaluate: OneText | None = None,
    device: str = "auto",
    seed: int = 0,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Healing:
    """Distil the source into a converted checkpoint, end to end.

    Args:
        converted: The checkpoint to heal: a directory or a Hub id.
        output: The directory to create.
        teacher: The model that it was converted from; None for the one that its conversion.json names.
        text: Text to train on: a UTF-8 file, a list of strings, "self" for what the teacher writes, or several of these names
            with their shares. Without text and dataset, the teacher writes it.
        dataset: A named dataset, whose training split is used, too.
        tokens: Tokens to train on, a number or "20M"; None for those of `effort`. A shorter text is used again.
        time: Instead of `tokens`: as many as are expected to take so many seconds here, or "1h".
        effort: "quick", "standard" or "thorough": 20, 200 or 2,000 million tokens; beyond 2 billion parameters 50, 500 or
            3,000.
        context: Tokens per block; None for min(2048, the models' limit).
        batch_tokens: Tokens per step, over all processes; None for a thousandth of `tokens`, at least a block, at most 65536.
        micro_batch_tokens: Tokens per forward pass; None for 4096.
        lr: The learning rate; "auto" tries three or more, each for 2 % of the steps, where there are 150 or more.
        train: "attention", with the norms before it, "all", or "lora": thin matrices beside those of attention, by peft.
        lora_rank: The rank of these; None for 16.
        ce: The weight of the cross-entropy beside the KL to the teacher.
        top_k: How many of the teacher's probabilities count; None for all.
        teacher_cache: A directory to keep these in, so that the teacher is not in memory beside the student.
        eval_every: Tokens from one point of the curve to the next; None for a tenth of all.
        checkpointing: Compute layers again in the backward pass: slower, with less memory.
        track: The tracker of accelerate that figures go to, such as "tensorboard" or "wandb"; files go to `output`.logs.
        evaluate: Held-out text to measure perplexity on in blocks of `context`, which decides nothing: a UTF-8 file, or a list
            of strings.
        device: "auto", "cpu", "cuda", "cuda:1", …
        seed: For the order of blocks.
        overwrite: Replace a checkpoint at `output`.
        resume: Finish an interrupted run with the same arguments.
        dry_run: Only plan; read the text, but no weights.
        trust_remote_code: Run Python code that comes with the checkpoints.
        progress: Called as `progress(stage, done, total, unit)`.

    Raises:
        Refusal: Wrong as seen from the arguments and the configs.
        Failure: Weights, text or machine.
    """
    from convert.healing import run
    from convert.healing.plan import HealOptions, plan_heal
    from convert.healing.texts import TrainingTexts

    counts = {
        "tokens": tokens,
        "batch_tokens": batch_tokens,
        "micro_batch_tokens": micro_batch_tokens,
        "eval_every": eval_every,
    }
    sizes = {name: parse_count(size) if isinstance(size, str) else size for name, size in counts.items()}
    for name, number in (sizes | {"top_k": top_k, "lora_rank": lora_rank}).items():
        _require_range(name, 1 if number is None else number, 1)
    _require_range("context", 2 if context is None else context, 2)
    _require_range("ce", ce, 0)
    _require_range("seed", seed, 0, 2**32 - 1)
    try:
        rate = None if lr == "auto" else float(lr)
    except ValueError:
        raise Refusal(f"lr is {lr!r}; it must be a number, or auto") from None
    _require_range("lr", 1.0 if rate is None else rate, 1e-12, 1.0)
    seconds = _seconds(time, tokens)
    options = HealOptions(
        texts_of(text, dataset) or DEFAULT,
        effort=effort,
        context=context,
        lr=rate,
        train=train,
        lora_rank=lora_rank,
        ce=ce,
        top_k=top_k,
        teacher_cache=None if teacher_cache is None else Path(teacher_cache),
        checkpointing=checkpointing,
        track=track,
        **sizes,
    )
    source = Source.parse(str(converted), trust_remote_code)
    where = _output(output, None, MAX_SHARD_SIZE, overwrite, resume, None)
    planned = plan_heal(source, None if teacher is None else str(teacher), options, where, device, seed)
    if seconds is not None:
        planned = _within(seconds, planned, about_tokens(evaluate))
    if dry_run:
        texts = TrainingTexts.read(planned)
        expected = run.expected_duration(planned, texts, about_tokens(evaluate))
        return run.Healing(planned, texts.known.passes(planned.steps, planned.batch), None, expected)
    held_out = None if evaluate is None else read_text(evaluate, None, "test")
    return run.execute(planned, held_out, progress)


def _seconds(time: float | str | None, tokens: int | str | None) -> float | None:
    if time is None:
        return None
    if tokens is not None:
        raise Refusal(f"tokens {tokens} and time {time} contradict each other", hint="give one of them")
    seconds = parse_time(time) if isinstance(time, str) else time
    _require_range("time", seconds, 1e-3)
    return seconds


def _within(seconds: float, plan: HealPlan, evaluated: int) -> HealPlan:
    """The plan with the tokens that it has time for; with those that it was begun with, if it is resumed."""
    from convert.healing.plan import sized
    from convert.healing.timed import tokens_of_begun, tokens_within

    def of(tokens: int) -> HealPlan:
        options = replace(plan.options, tokens=tokens)
        return sized(plan.converted, plan.teacher, options, plan.output, plan.device, plan.seed)

    begun = tokens_of_begun(plan.output) if plan.output.resume else None
    return of(begun or tokens_within(seconds, of, evaluated))


@checked
def sweep(
    model: str | Path,
    output: str | Path,
    *,
    evaluate: OneText,
    groups: Sequence[int] | None = None,
    mla: Sequence[str | tuple[int, int]] | None = None,
    methods: Sequence[str] | None = None,
    protocol: str = "paper",
    context: int | Sequence[int] | None = (),
    max_tokens: int | None = None,
    text: TextGiven | None = None,
    dataset: str | None = None,
    no_text: bool = False,
    calibration_tokens: int | None = None,
    calibration_context: int | None = None,
    max_context: int | None = None,
    refit: bool | None = None,
    refine: int | None = None,
    heal: int | str | None = None,
    dtype: str | None = None,
    engine: str | None = None,
    device: str = "auto",
    seed: int = 0,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    made: Callable[[Plan], object] = lambda plan: None,
) -> Sweep:
    """Convert a checkpoint to many targets by many methods, and compare them in one report.

    Args as of `gqa` and `eval.evaluate`, and:
        output: A directory for one subdirectory per result, and `report/`.
        evaluate: Held-out text that all results are measured on.
        groups: KV heads of GQA targets.
        mla: MLA targets: "512+64" or (512, 64), or budgets such as "12.5%". With no groups either: halves of the model's KV
            heads, and 25 % and 12.5 % of its cache.
        methods: Names; None for all that can run, without controls.
        made: Called with the plan of each result when it is complete.

    Raises:
        Refusal: Wrong as seen from the arguments and the config.
        Failure: Weights, text or machine.
    """
    from convert import sweeping
    from eval.quality.settings import EvaluationSettings

    source = Source.parse(str(model), trust_remote_code)
    where = _output(output, dtype, max_shard_size, overwrite, resume, engine)
    _require_range("seed", seed, 0, 2**32 - 1)
    calibration = _calibration(
        text, dataset, no_text, calibration_tokens, calibration_context, max_context, refit, refine, heal
    )
    latents = None if mla is None else tuple(dict.fromkeys(map(_latent, mla)))
    chosen = (None if groups is None else tuple(dict.fromkeys(groups)), latents, None if methods is None else tuple(methods))
    plans = sweeping.plans_for(source, sweeping.Wanted(*chosen, calibration, where, device, seed))
    directory = where.path / sweeping.REPORT
    settings = EvaluationSettings(protocol, contexts_of(context), max_tokens, "auto", device)
    if dry_run:
        tokens = next((plan.calibration.about_tokens for plan in plans if plan.calibration), 0)
        evaluated = min(about_tokens(evaluate), max_tokens or sys.maxsize)
        seconds = sweeping.expected_durations(plans, tokens, evaluated, settings)
        return sweeping.Sweep(plans, None, directory, seconds)
    done: list[Plan] = []

    def finished(plan: Plan) -> None:
        done.append(plan)
        made(plan)

    held_out = read_text(evaluate, None, "test")
    found = sweeping.sweep(plans, held_out, settings, progress, finished)
    return sweeping.Sweep(done, found, directory)


@checked
def plan(
    model: str | Path,
    *,
    batch: int = 1,
    context: int | None = None,
    dtype: str | None = None,
    gpus: Mapping[str, float] | None = None,
    gpu_share: float = 0.9,
    engine: str | None = None,
    trust_remote_code: bool = False,
) -> Facts:
    """KV memory of each target, and the GPUs that it fits on; reads only the config.

    Args:
        model: Directory, GGUF file or Hub id.
        batch: Sequences at once.
        context: Tokens per sequence; None for the model's limit.
        dtype: The dtype of weights and cache; None for the model's own.
        gpus: Gigabytes by name; None for the known GPUs.
        gpu_share: The share of a GPU's memory that may be used.
        engine: Show only what this engine runs, one of `convert.hosts.engines.ENGINES`.
        trust_remote_code: Run Python code that comes with the checkpoint.

    Returns:
        A dict of numbers; `str()` of it is a table for people.

    Raises:
        Refusal: The model cannot be read.
    """
    from convert.hosts.engines import engine_of
    from convert.planning.describe import capacity
    from eval.machine.capacity import GPUS

    source = Source.parse(str(model), trust_remote_code)
    size = source.max_positions or 2048 if context is None else context
    _require_range("batch", batch, 1)
    _require_range("context", size, 1)
    _require_range("gpu_share", gpu_share, 1e-6, 1)
    for name, gigabytes in (gpus or {}).items():
        _require_range(f"memory of {name}", gigabytes, 1e-6, 1e9)
    return capacity(source, dtype or source.dtype, batch, size, gpus or GPUS, gpu_share, engine_of(engine))


@checked
def inspect(model: str | Path, *, trust_remote_code: bool = False) -> Facts:
    """A model's attention and what it can be converted to; reads only the config.

    Returns:
        A dict of numbers; `str()` of it is a table for people.

    Raises:
        Refusal: The model cannot be read.
    """
    from convert.planning.describe import inspection

    return inspection(Source.parse(str(model), trust_remote_code))


def _output(
    output: str | Path, dtype: str | None, max_shard_size: int | str, overwrite: bool, resume: bool, engine: str | None
) -> Output:
    from convert.hosts.engines import engine_of
    from convert.output.place import Output

    size = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    _require_range("max_shard_size", size, 1)
    if dtype is not None:
        dtype_bytes(dtype)
    engine_of(engine)
    return Output(Path(output), dtype, size, overwrite, resume, engine)


def _calibration(
    text: TextGiven | None,
    dataset: str | None,
    no_text: bool,
    tokens: int | None,
    context: int | None,
    max_context: int | None,
    refit: bool | None,
    refine: int | None,
    heal: int | str | None,
) -> CalibrationOptions:
    from convert.planning.calibration import CalibrationOptions

    healed = parse_tokens(heal) if isinstance(heal, str) else heal
    least_of = {"calibration_tokens": 1, "calibration_context": 2, "max_context": 2, "refine": 1, "heal": 0}
    for (name, least), value in zip(least_of.items(), (tokens, context, max_context, refine, healed), strict=True):
        _require_range(name, least if value is None else value, least)
    texts = texts_of(text, dataset)
    return CalibrationOptions(texts, tokens, context, refit, refine or 0, max_context, no_text, healed)


def _require_range(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Refuse what the command line's options refuse."""
    if not least <= value <= most:
        raise Refusal(f"{name} is {value}; it must be at least {least}" + (f" and at most {most}" if most < math.inf else ""))


def _carried_out(planned: Plan, evaluate: OneText | None, dry_run: bool, progress: Progress) -> Conversion:
    from convert.execute.run import Conversion, execute, expected_duration, works_of
    from convert.healing.closing import heal_result

    if dry_run:
        tokens = planned.calibration.about_tokens if planned.calibration else 0
        (work,) = works_of([planned], tokens, about_tokens(evaluate))
        return Conversion(planned, None, expected_duration(planned, work))

    held_out = None if evaluate is None else read_text(evaluate, None, "test")
    return execute(planned, held_out, progress, heal=heal_result)


def _budget(given: str | int | float | None) -> tuple[float | None, int | None]:
    """A budget as (share, bytes); one of them is None."""
    if given is None:
        return None, None
    return parse_budget(f"{100 * given:.12g}%" if isinstance(given, float) else str(given))


def _latent(given: str | tuple[int, int]) -> LatentRequest:
    from convert.planning.latent import LatentRequest

    return LatentRequest(*(given if isinstance(given, tuple) else parse_latent(given)))
