"""Plans: what is copied, inexact or refused; sizes, budgets and what exceeds full size."""

from dataclasses import replace
from typing import Any

import pytest
from plans import TEXT, Sources, factored, grouped

from attention.errors import Refusal
from attention.formats import FORMATS as FORMAT
from attention.spec import AttentionSpec
from convert.families import family_of
from convert.hosts.latent import DEEPSEEK as HOST
from convert.output.destination import Output
from convert.planning.budget import FORMATS, LatentBounds
from convert.planning.targets import GroupedTarget, LatentTarget
from eval.inputs.source import Source


def test_a_plan_of_heads_is_its_source_its_target_and_what_to_know(source: Sources, output: Output) -> None:
    made = source()
    plan = grouped(made, output, seed=7)
    found = plan.target
    assert isinstance(found, GroupedTarget)
    assert (plan.source, plan.output, plan.seed, plan.calibration, plan.notes) == (made, output, 7, None, ())
    assert (plan.before, found.spec) == (AttentionSpec(3, 8, 4, 8), AttentionSpec(3, 8, 2, 8))
    assert (found.command, plan.recipe["groups"]) == ("gqa", 2)
    one = grouped(made, output, 1, "mqa")
    assert (one.target.command, "groups" in one.recipe) == ("mqa", False)
    assert plan.applied_method == "mean"


def test_as_many_groups_as_heads_is_a_copy(source: Sources, output: Output) -> None:
    plan = grouped(source(), output, 4)
    assert plan.target.copies
    assert plan.applied_method is None
    assert plan.notes == ("4 KV heads are what the source has: every tensor is copied bit for bit, unchanged",)
    cast = grouped(source(), Output(output.path, "bfloat16"), 4)
    assert cast.notes == ("4 KV heads are what the source has: every tensor is cast to bfloat16 and otherwise unchanged",)
    calibrated = grouped(source(), output, 4, method="aligned", text=TEXT)
    assert calibrated.calibration is None
    assert calibrated.notes[1:] == ("the calibration text is not used",)


@pytest.mark.parametrize(
    ("model_type", "method", "inexact", "costs"),
    [
        ("qwen3", "mean", False, False),
        ("qwen3", "aligned", False, True),
        ("olmo2", "mean", True, False),
        ("llama", "mean", False, False),
    ],
)
def test_norms_of_keys_are_remarked(
    model_type: str, method: str, inexact: bool, costs: bool, source: Sources, output: Output
) -> None:
    notes = grouped(source(model_type), output, method=method).target.notes
    assert any(note.startswith("inexact: keys are normalised with gains per head") for note in notes) == inexact
    assert any("normalised, which costs in this class; gqa --class kvfold" in note for note in notes) == costs


def test_a_latent_has_no_heads_to_merge(source: Sources, output: Output) -> None:
    for groups, command in ((4, "gqa"), (1, "mqa")):
        with pytest.raises(Refusal, match=r"has latent attention already \(MLA-16\+8\), and is not converted again"):
            grouped(source("deepseek_v3"), output, groups, command)


@pytest.mark.parametrize("model_type", ["olmo", "olmoe"])
def test_projections_that_are_clamped_are_averaged_alone(model_type: str, source: Sources, output: Output) -> None:
    made = source(model_type, clip_qkv=0.5)
    with pytest.raises(Refusal, match=r"are clamped to 0\.5 \(clip_qkv in config.json\), and method aligned") as caught:
        grouped(made, output, method="aligned")
    assert "--method mean" in str(caught.value.hint)
    assert grouped(made, output).target.spec.num_kv_heads == 2
    assert grouped(made, output, groups=4, method="aligned").target.copies
    assert grouped(source(model_type), output, method="aligned").applied_method == "aligned"


def target(*args: Any, **size: Any) -> LatentTarget:
    return factored(*args, **size).target


def test_a_plan_is_its_source_its_target_and_what_to_know(source: Sources, output: Output) -> None:
    made = source()  # 4 KV heads × 8, width 64
    plan = factored(made, output, seed=7, kv_lora_rank=16, qk_rope_head_dim=8)
    found = plan.target
    assert (plan.source, plan.output, plan.seed, plan.calibration) == (made, output, 7, None)
    assert plan.before == found.before == AttentionSpec(3, 8, 4, 8)
    assert found.spec == AttentionSpec(3, 8, 8, 8, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8)
    assert (found.channels, found.freqfold, found.copies) == (15, 1, False)
    assert found.notes == ("15 of 16 latent channels carry keys and values; 1 holds a constant for the norm of deepseek_v3",)


def bounds_of(made: Source) -> LatentBounds:
    return LatentBounds(made, family_of(made.model_type).of(made.config), HOST)


def test_what_does_not_rotate_is_the_full_rank(source: Sources) -> None:
    bounds = bounds_of(source())
    assert bounds.full_rank(8) == 2 * 4 * 8 - 8
    assert bounds.full_rank(32) == 32
    narrow = bounds_of(source(hidden_size=24))
    assert narrow.full_rank(8) == 24, "the width of the model, where that is less"
    assert bounds_of(source("qwen3", num_key_value_heads=8)).full_rank(4) == 124, "but for keys behind their norm"
    mixed = bounds_of(source("smollm3", no_rope_layers=[1, 0, 1], hidden_size=128))
    assert mixed.full_rank(8) == 64, "layers without positions have all of their keys in the latent"


@pytest.mark.parametrize(("channels", "rank"), [(15, 16), (16, 17), (17, 18), (18, 20), (20, 22), (21, 22), (22, 24)])
def test_constants_come_on_top(channels: int, rank: int, source: Sources) -> None:
    assert bounds_of(source()).with_reserved(channels) == rank
    assert rank - HOST.reserved(rank) >= channels
    assert all(less - HOST.reserved(less) < channels for less in range(1, rank))


def test_beyond_full_size_there_are_zeros_if_they_are_wanted(source: Sources, output: Output) -> None:
    made, whole = source(), {"kv_lora_rank": 33, "qk_rope_head_dim": 32}
    assert target(made, output, **whole).channels == 32
    padded = target(made, output, **whole | {"kv_lora_rank": 40}, pad_rank=True)
    assert (padded.channels, padded.spec.kv_lora_rank) == (32, 40)
    assert padded.notes[0].endswith("; 7 are zero, as --pad-rank allows")
    assert padded.recipe()["pad_rank"] is True
    assert "the cache is not smaller than the source's" in target(made, output, **whole).notes
    odd = target(made, output, kv_lora_rank=20, qk_rope_head_dim=8)
    assert any(note.startswith("rank 20 is not a multiple of 16") for note in odd.notes)


@pytest.mark.parametrize(("share", "dtype"), [(0.5, None), (0.25, None), (0.25, "bfloat16"), (1.0, None)])
def test_a_budget_is_counted_in_what_is_written(share: float, dtype: str | None, source: Sources, output: Output) -> None:
    spec = target(source(), replace(output, dtype=dtype), budget=share).spec
    values = 64 * share * (2 if dtype else 1)
    assert values - 2 <= spec.kv_lora_rank + spec.qk_rope_head_dim <= values
    assert spec.bytes_per_token(dtype or "float32") <= share * 768


@pytest.mark.parametrize(("rope", "fold"), [(8, 1), (4, 2), (2, 4), (16, 1), (12, 2)])
def test_a_method_that_folds_does_so_as_little_as_it_can(rope: int, fold: int, source: Sources, output: Output) -> None:
    found = target(source(), output, "pca", TEXT, kv_lora_rank=16, qk_rope_head_dim=rope)
    assert found.freqfold == fold
    inexact = f"inexact at any rank: {fold} neighbouring frequencies are taken for one"
    assert (inexact in found.notes) == (fold > 1)


WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}  # caches 1,024 numbers


@pytest.mark.parametrize(("share", "size"), [(1.0, (512, 64)), (0.53, (448, 64)), (0.5, (448, 64)), (0.4, (256, 64))])
def test_a_budget_becomes_the_nearest_size_that_the_engine_takes(
    share: float, size: tuple[int, int], source: Sources, output: Output
) -> None:
    found = target(source(**WIDE), replace(output, engine="vllm"), budget=share)
    assert (found.spec.kv_lora_rank, found.spec.qk_rope_head_dim) == size


@pytest.mark.parametrize("form", [None, "fp8", "int8", "int4", "int3", "int2"])
@pytest.mark.parametrize("share", [0.2, 0.35])
def test_a_budget_is_counted_in_the_format(form: str | None, share: float, source: Sources, output: Output) -> None:
    made = source(num_hidden_layers=2, head_dim=32)
    plan = factored(made, output, budget=share, cache_dtype=form)
    spec, budget = plan.target.spec, share * plan.before.bytes_per_token(made.dtype)
    held = spec.bytes_per_token(plan.cache_dtype)
    assert plan.cache_dtype == (form or made.dtype)
    assert held <= budget
    assert held > 0.7 * budget or spec.qk_rope_head_dim == 4 * 32  # all that the source has
    assert plan.as_dict()["kv_bytes_per_token_after"] == held
    assert plan.recipe.get("cache_dtype") == form


@pytest.mark.parametrize(("form", "kept"), [("q8_0", 320), ("q4_0", 200), ("int4", 60)])
def test_a_small_budget_gets_the_rope_key_that_the_format_takes(form: str, kept: int, source: Sources, output: Output) -> None:
    spec = factored(source(head_dim=32), output, budget=kept, cache_dtype=form).target.spec
    assert spec.bytes_per_token(form) <= kept
    with pytest.raises(Refusal) as caught:
        factored(source(head_dim=32), output, budget=30, cache_dtype=form)
    least = int(str(caught.value.hint).split()[3])
    assert 30 < least <= spec.bytes_per_token(form)
    factored(source(head_dim=32), output, budget=least, cache_dtype=form)


@pytest.mark.parametrize(("above", "formats"), FORMATS)
@pytest.mark.parametrize("changes", [{}, {"portable": True}, {"portable": True, "engine": "llama.cpp"}], ids=str)
def test_a_budget_has_a_format_by_rule(
    above: float, formats: tuple[str, ...], changes: dict[str, Any], source: Sources, output: Output
) -> None:
    """The first of its row that the engine stores, and that a portable result can have."""
    given = dict(changes)
    where, share = replace(output, engine=given.pop("engine", None)), above or 0.1
    plan = factored(source(hidden_size=256, head_dim=64), where, "weighted", TEXT, budget=share, cache_dtype="auto", **given)
    stored = [form for form in formats if not (changes and FORMAT[form].classes)]
    form = next(form for form in stored if not where.engine or form.startswith("q"))
    assert plan.cache_dtype == form
    assert plan.target.spec.bytes_per_token(form) <= share * plan.before.bytes_per_token(plan.source.dtype)
    engines = "transformers and llama.cpp" if where.engine else "transformers"
    assert f"--cache-dtype auto is {form} at this budget, which runs in {engines}" in plan.notes


def test_an_engine_whose_formats_nobody_has_tried_stores_the_dtype(source: Sources, output: Output) -> None:
    plan = factored(source(**WIDE), replace(output, engine="vllm"), budget=0.5, cache_dtype="auto")
    assert plan.cache_dtype == "float32"
    assert any(note.startswith("--cache-dtype auto is float32") for note in plan.notes)


SMALL: dict[str, Any] = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
# A source with KV heads, or with a latent (MLA-16+8); a size; the message, with its hint.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("llama", {}, {"kv_lora_rank": 16}, "give --kv-lora-rank and --qk-rope-head-dim, or --kv-budget"),
    ("llama", {}, {"budget": 0.5, "kv_lora_rank": 16}, "not both"),
    ("llama", {}, {"budget": 400, "qk_rope_head_dim": 8}, "not both"),
    ("llama", {}, {"budget": 0.5, "pad_rank": True}, "a budget never goes beyond full size"),
    ("llama", {}, {"kv_lora_rank": 16, "qk_rope_head_dim": 7}, "cannot keep 7 rotary dims"),
    ("llama", {}, {"kv_lora_rank": 16, "qk_rope_head_dim": 0}, "cannot keep 0 rotary dims"),
    ("llama", {}, {"kv_lora_rank": 16, "qk_rope_head_dim": 34}, "cannot keep 34 rotary dims of"),
    ("llama", {}, {"kv_lora_rank": 1, "qk_rope_head_dim": 8}, "a latent of rank 1 holds nothing: deepseek_v3 needs 1"),
    ("llama", {}, {"budget": 1.01}, "exceeds the 768 of"),
    ("llama", {}, {"budget": 40}, "a budget of 40 bytes per token is too small for any rank: the budget leaves 3 values"),
    ("llama", {}, {"kv_lora_rank": 35, "qk_rope_head_dim": 32}, "with 1 constant channel(s) of deepseek_v3 makes 33"),
    ("llama", {}, {"kv_lora_rank": 15, "qk_rope_head_dim": 8, "cache_dtype": "int4"},
     "a latent of 15 values cannot be cached in int4: it must be a multiple of 8"),
    ("llama", {}, SMALL | {"portable": True, "cache_dtype": "mixed"}, "a portable result cannot be made for mixed: its norm"),
    ("llama", {}, SMALL | {"cache_dtype": "auto"}, "--cache-dtype auto chooses the format of a budget"),
    ("llama", {}, {"budget": 3, "cache_dtype": "auto"}, "a budget of 3 bytes per token is too small for any rank"),
    *(("llama", {}, {"engine": "vllm", "budget": 0.5, "cache_dtype": form},
       f"no result was run in vllm with its cache in {form}") for form in ("int4", "fp8")),  # nobody has tried the latter
    ("llama", WIDE, {"engine": "vllm", "kv_lora_rank": 96, "qk_rope_head_dim": 32},
     "vllm takes latents of 256+64, 448+64 or 512+64, not of 96+32"),
    ("llama", WIDE, {"engine": "vllm", "budget": 0.25}, "the budget leaves 256 numbers per layer and token"),
    ("llama", WIDE, {"engine": "llama.cpp", "budget": 0.5}, "deepseek_v3: llama.cpp does not run it"),
    ("llama", WIDE, {"engine": "llama.cpp", "budget": 0.5}, "give --portable and --text FILE: llama.cpp runs a portable"),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
     {"kv_lora_rank": 33, "qk_rope_head_dim": 26}, "of each key's 8 dims only 6 have RoPE, which makes 24"),
    ("phimoe", {}, {"kv_lora_rank": 10**6, "qk_rope_head_dim": 3}, "does not have Llama's decoder blocks"),
    ("olmo", {"clip_qkv": 0.0}, SMALL, "clip_qkv is 0.0"),
    ("mpt", {"attn_config": {"clip_qkv": -1.0}}, {"kv_lora_rank": 16}, "attn_config.clip_qkv is -1.0"),
    ("gpt2", {}, SMALL, "has no RoPE, so it has no RoPE key of 8 dims"),
    ("gpt2", {}, {"kv_lora_rank": 65}, "rank 65 exceeds full size"),
    *(("deepseek_v3", changes, {"kv_lora_rank": 12, "qk_rope_head_dim": 8}, "has latent attention already (MLA-16+8)")
      for changes in ({"q_lora_rank": 12}, {"first_k_dense_replace": 1}, {"attention_bias": False})),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "changes", "size", "message"), REFUSED, ids=str)
def test_sizes_that_do_not_fit_are_refused(
    model_type: str, changes: dict[str, Any], size: dict[str, Any], message: str, source: Sources, output: Output
) -> None:
    size = dict(size)
    output = replace(output, engine=size.pop("engine", None))
    method, text = ("weighted", TEXT) if "portable" in size or size.get("cache_dtype") == "auto" else ("svd", None)
    with pytest.raises(Refusal) as caught:
        factored(source(model_type, **changes), output, method, text, **size)
    assert message in f"{caught.value} {caught.value.hint}"
    assert "\n" not in str(caught.value)
