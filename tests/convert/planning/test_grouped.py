"""Plans of GQA and MQA: what is copied, what is inexact, and what is refused."""

from __future__ import annotations

import pytest
from plans import TEXT, Sources, grouped

from attention.errors import Refusal
from attention.spec import AttentionSpec
from convert.output.destination import Output
from convert.planning.targets import GroupedTarget


def test_a_plan_is_its_source_its_target_and_what_to_know(source: Sources, output: Output) -> None:
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
    assert "--method mean or first" in str(caught.value.hint)
    assert grouped(made, output).target.spec.num_kv_heads == 2
    assert grouped(made, output, groups=4, method="aligned").target.copies
    assert grouped(source(model_type), output, method="aligned").applied_method == "aligned"
