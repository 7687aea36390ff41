"""What is said of checkpoints from their configs alone: with KV heads, and with a latent."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import Sources, factored, grouped
from written import Convert, Make, edit, ok, read, weights

from attention.errors import Refusal
from convert import plan
from convert.execute.describe import Conversion, PlannedConversion, _measured
from convert.families import FAMILIES, UNREAD
from convert.hosts import HOSTS
from convert.hosts.engines import engine_of
from convert.output.destination import Output
from convert.planning.calibration import CalibrationOptions
from convert.planning.describe import capacity, inspection, support, support_text
from convert.planning.texts import texts_of
from convert.sweeping import PlannedSweep
from eval.inputs.source import Source
from eval.machine.capacity import count_parameters

ROOM = {"small": 1e-3, "large": 80.0}


def test_a_source_with_kv_heads_is_inspected(source: Sources) -> None:
    found = inspection(source("qwen3"))
    assert json.loads(json.dumps(found)) == found
    expected = {
        "family": "qwen3", "attention": "GQA-4", "layers": 3, "query_heads": 8, "kv_heads": 4, "head_dim": 8,
        "groups_possible": [4, 2, 1], "kv_bytes_per_token": 768, "qk_norm": "rms, shared gains",
    }  # fmt: skip
    assert found.items() >= expected.items()
    assert not {"kv_lora_rank", "notes"} & found.keys()
    assert found["output_classes"]["gqa"] == "its own class, loads in transformers"
    latents = found["latents_possible"]
    assert len(latents) == 3
    assert all(line in str(found) for line in ("groups possible", "| qk norm", f"{', '.join(latents)}, and others"))


@pytest.mark.parametrize("key", ["quantization_config", "quantization"])
def test_what_is_quantised_is_described_with_a_note(key: str, source: Sources) -> None:
    made = source()
    edit(Path(made.reference), **{key: {"bits": 4, "group_size": 64}})
    said = "it is quantised (MLX), which a conversion refuses; all figures are of the model before that"
    for found in (inspection(made), capacity(made, "bfloat16", 1, 64, ROOM)):
        assert found["notes"] == [said]
        assert said in str(found)


def test_what_cannot_become_mla_is_told_why(source: Sources) -> None:
    made = source("hunyuan_v1_dense")
    found = capacity(made, "bfloat16", 1, 64, ROOM)
    assert not any(row["kind"].startswith("MLA") for row in found["targets"])
    assert found["mla"].startswith("none: no output class carries MLA of")
    assert "\n\nMLA: none: " in str(found)
    assert "mla: none (no output class carries MLA of" in str(inspection(made))


def test_a_source_with_a_latent_is_inspected(source: Sources) -> None:
    found = inspection(source("deepseek_v3"))
    assert json.loads(json.dumps(found)) == found
    expected = {
        "family": "deepseek_v3", "layout": "latent projections", "attention": "MLA-16+8", "kv_heads": None, "head_dim": 10,
        "kv_lora_rank": 16, "qk_nope_head_dim": 12, "groups_possible": [], "kv_bytes_per_token": 3 * 24 * 4,
    }  # fmt: skip
    assert found.items() >= expected.items()
    assert found["output_classes"]["mla"] == "none (MLA-16+8 is a latent already)"
    assert (
        found["output_classes"]["gqa"]
        == found["output_classes"]["mqa"]
        == ("none (MLA-16+8 has a latent and no KV heads to merge)")
    )
    rows = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in str(found).splitlines()}
    assert rows["kv heads"] == rows["groups possible"] == "none"


def test_what_each_target_takes(source: Sources) -> None:
    made = source()
    found = capacity(made, "bfloat16", 2, 100, ROOM)
    assert json.loads(json.dumps(found)) == found
    first, *others = found["targets"]
    assert first["kind"] == inspection(made)["attention"]
    assert first["kv_bytes"] == 2 * 100 * first["kv_bytes_per_token"]
    assert first["parameters"] == count_parameters(made.config)
    assert others
    assert all(row["kv_bytes_per_token"] < first["kv_bytes_per_token"] for row in others)
    for row in found["targets"]:
        assert row["fits"] == {"small": row["kv_bytes"] + row["weight_bytes"] <= 9e5, "large": True}
    assert f"{first['kind']} (source)" in str(found)


def test_a_cache_in_another_format_says_so_and_names_what_stores_it(source: Sources) -> None:
    found = capacity(source(), "bfloat16", 2, 100, ROOM, cache_dtype="int8")
    assert (found["dtype"], found["cache_dtype"]) == ("bfloat16", "int8")
    assert found["targets"][0]["kv_bytes_per_token"] == 3 * 2 * 4 * (8 + 4)
    assert [row["engines"] for row in found["targets"]] == [None] + [["transformers"]] * (len(found["targets"]) - 1)
    assert " in bfloat16 with a cache in int8, batch 2" in str(found)
    latents = capacity(source(head_dim=32), "bfloat16", 2, 100, ROOM, cache_dtype="mixed")  # no format of heads
    assert [str(shown).count(" (source) |") for shown in (found, latents)] == [1, 0]
    found = capacity(source(head_dim=32), "bfloat16", 2, 100, ROOM, cache_dtype="fp4_mx_block16")
    assert "with a cache of SGLang 0.5.23 (--kv-cache-dtype fp4_mx_block16, not tried), batch 2" in str(found)
    kinds = [row["kind"] for row in found["targets"]]
    in_four = [row["kind"] for row in capacity(source(), "bfloat16", 2, 100, ROOM, cache_dtype="int4")["targets"]]
    assert [kind for kind in in_four if kind.startswith("MLA")] != [kind for kind in kinds if kind.startswith("MLA")]
    with pytest.raises(Refusal, match="no result was run in vllm with its cache in int8") as caught:
        plan(source().reference, engine="vllm", cache_dtype="int8")
    assert "fp8" in str(caught.value.hint)
    with pytest.raises(Refusal, match="a head of 4 values cannot be cached in int4"):
        capacity(source(head_dim=4), "bfloat16", 2, 100, ROOM, cache_dtype="int4")


def test_engines_that_store_a_format_are_named_with_what_nobody_tried(source: Sources) -> None:
    made = source(hidden_size=512, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    for form, of_heads in (("q4_0", ["transformers", "llama.cpp"]), ("fp8", ["transformers", "vllm (not tried)"])):
        rows = capacity(made, "bfloat16", 1, 10, ROOM, cache_dtype=form)["targets"]
        found = {row["kind"]: row["engines"] for row in rows}
        assert (found["MHA"], found["MQA"]) == (None, of_heads)
        assert {engines[0] for kind, engines in found.items() if kind.startswith("MLA")} == {"transformers"}
    assert capacity(made, "bfloat16", 1, 10, ROOM, engine_of("llama.cpp"), "q8_0")["targets"]
    plain = source()  # heads of 8
    with pytest.raises(Refusal, match="a head of 8 values cannot be cached in q4_0: it must be a multiple of 32"):
        capacity(plain, "bfloat16", 1, 10, ROOM, cache_dtype="q4_0")


def test_an_engine_sees_what_it_runs(source: Sources) -> None:
    made = source(hidden_size=512, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    everything = {row["kind"]: row["engines"] for row in capacity(made, "bfloat16", 1, 10, ROOM)["targets"]}
    assert everything["MHA"] is None
    assert everything["MQA"] == ["transformers", "vllm", "llama.cpp"]
    assert "llama.cpp" not in str([engines for kind, engines in everything.items() if kind.startswith("MLA")])
    for name, latents in (("vllm", ["MLA-512+64", "MLA-448+64", "MLA-256+64"]), ("llama.cpp", [])):
        found = capacity(made, "bfloat16", 1, 10, ROOM, engine_of(name))
        assert [row["kind"] for row in found["targets"]] == ["MHA", "GQA-4", "GQA-2", "MQA", *latents]
        assert all(name in row["engines"] for row in found["targets"][1:])
        rows = [line for line in str(found).splitlines() if line.startswith(("| GQA", "| M"))]
        assert [name in row for row in rows] == [False] + [True] * (len(found["targets"]) - 1)


def test_support_has_a_row_for_each_family_and_a_reason_for_each_gap() -> None:
    every = support()
    rows = {row["family"]: row for row in every}
    assert rows.keys() == {name for name, family in FAMILIES.items() if family.has_heads}
    assert not rows.keys() & UNREAD.keys()
    assert (rows["llama"]["gqa"], rows["llama"]["mla"]) == ("its own class", "deepseek_v3, kvfold")
    assert (rows["phi"]["mla"], rows["phimoe"]["mla"]) == ("kvfold", "-")
    assert (rows["gpt2"]["gqa"], rows["gpt2"]["mqa"], rows["xglm"]["mqa"]) == ("kvfold", "gpt_bigcode, kvfold", "kvfold")
    assert {(row["family"], kind) for row in every for kind in row["refused"]} == {
        (row["family"], kind) for row in every for kind in HOSTS if row[kind] == "-"
    }
    shown = support_text(every)
    assert len(shown.split("\n\n")[0].splitlines()) == len(every) + 2
    for line in (
        "hunyuan_v1_dense to MLA: queries and keys are normalised after RoPE, and a latent holds keys before RoPE\n",
        "\nphimoe to MLA: its class scales RoPE by a factor that depends on the length",
        "\nopenai-gpt is not read: its class in transformers keeps no KV cache",
    ):
        assert line in shown
    assert "kvfold: loads in transformers, with kvfold's code; where kvfold is installed, vLLM 0.32" in " ".join(shown.split())


def test_plans_in_words(source: Sources, output: Output) -> None:
    latent = factored(source(), Output(output.path, "bfloat16"), kv_lora_rank=12, qk_rope_head_dim=8)
    text = str(PlannedConversion(latent)).splitlines()
    assert text[0] == "GQA-4 → MLA-12+8, method svd (singular vectors of the weights alone)"
    assert text[1] == "steps: svd → scale → cast to bfloat16"
    assert text[2] == "KV cache: 768 → 120 bytes per token (15.6%, kept in bfloat16, was float32)"
    assert text[-1] == f"would be written to {output.path}, loads in transformers as deepseek_v3"
    heads = grouped(source(), output)
    assert str(Conversion(heads, {})).splitlines()[-1] == f"written to {output.path}, loads in transformers as llama"
    table = str(PlannedSweep([PlannedConversion(heads), PlannedConversion(latent)]))
    assert "GQA-2" in table
    assert "MLA-12+8" in table


WINDOWS: dict[str, Any] = {
    "model_type": "gemma3_text", "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
NOTE = "the windowed layers (2 of 3, which see 20 tokens) are 22.9% of the cache at 128 tokens"


def test_windows_count_at_all_positions_or_at_the_context(source: Sources, output: Output) -> None:
    made, row = source(**WINDOWS), 2 * 4 * 8 * 4
    facts = inspection(made)
    assert facts["kv_bytes_per_token"] == (2 * 19 + 128) * row / 128 == 332
    assert (facts["kv_context"], facts["notes"]) == (128, [NOTE])
    for context in (19, 128, 1000):
        found = capacity(made, "float32", 2, context, ROOM)
        assert found["targets"][0]["kv_bytes"] == 2 * (2 * min(19, context) + context) * row
        assert found["targets"][0]["kv_bytes_per_token"] * 2 * context == found["targets"][0]["kv_bytes"]
        assert ("notes" in found) == (context > 19)
    heads = grouped(made, output, all_layers=True)
    text = str(PlannedConversion(heads)).splitlines()
    assert "KV cache: 332 → 166 bytes per token at 128 tokens (50.0%, kept in float32)" in text
    assert NOTE in text
    assert (heads.as_dict()["kv_bytes_per_token_after"], heads.as_dict()["kv_context"]) == (166, 128)
    assert "KV bytes/token at 128 tokens" in str(PlannedSweep([PlannedConversion(heads)]))
    # A share of each layer, as without windows; bytes are those of all positions.
    whole = source(**WINDOWS | {"sliding_window": 128}, name="whole")
    for share in (0.5, 0.25):
        specs = [factored(one, output, budget=share, all_layers=True).target.spec for one in (made, whole)]
        assert (specs[0].kv_lora_rank, specs[0].windows) == (specs[1].kv_lora_rank, (20, None, 20))
    assert factored(made, output, budget=166, all_layers=True).target.spec.bytes_per_token("float32", 128) <= 166
    with pytest.raises(Refusal, match=r"of 333 bytes per token exceeds the 332 of .* at 128 tokens: nothing to save"):
        factored(made, output, budget=333)


def test_layers_whose_cache_does_not_grow_stay_as_they_are(source: Sources, output: Output) -> None:
    made, row, context = source(**WINDOWS), 2 * 4 * 8 * 4, 128
    latent, heads, every = factored(made, output, budget=0.6), grouped(made, output), grouped(made, output, all_layers=True)
    assert (latent.target.spec.kept, heads.target.spec.kept, every.target.spec.kept) == ((0, 2), (0, 2), ())
    assert [plan.layout.model_type for plan in (latent, heads, every)] == ["kvfold", "kvfold", "gemma3_text"]
    assert heads.target.spec.cache_bytes("float32", context) == 2 * 19 * row + context * row // 2
    assert latent.target.spec.bytes_per_token("float32", context) <= 0.6 * 332
    assert "layers that stay as they are: 0, 2" in heads.notes
    said = "layers with a window stay as they are: 204 bytes per token at 128 tokens, and 166 with --all-layers"
    assert any(note.startswith(said) for note in heads.notes)
    with pytest.raises(Refusal, match="a budget of 66 bytes per token is too small: layers that stay take 76"):
        factored(made, output, budget=0.2)
    with pytest.raises(Refusal, match="a budget of 80 bytes per token is too small for any rank") as refused:
        factored(made, output, budget=80)
    assert "the least is 88 bytes per token at 128 tokens" in str(refused.value.hint)
    # Engines run no layers of two kinds: for them, all are converted in the source's class.
    served = grouped(made, replace(output, engine="vllm"))
    assert (served.target.spec.kept, served.layout.model_type) == ((), "gemma3_text")
    assert any(note.startswith("no class that can hold the result keeps layers with a window") for note in served.notes)
    bounded = source("mistral", sliding_window=16, name="bounded")
    assert grouped(bounded, output).target.spec.kept == (), "no layer of it grows"
    facts = inspection(made)
    assert facts["layers_that_stay"] == {"gqa": [0, 2], "mqa": [0, 2], "mla": [0, 2]}
    assert all(kind.endswith(" in 1 of 3 layers") for kind in facts["latents_possible"])
    kinds = [row["kind"] for row in capacity(made, "float32", 1, 1000, ROOM)["targets"]]
    assert kinds[:3] == ["GQA-4", "GQA-2 in 1 of 3 layers", "MQA in 1 of 3 layers"]


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ((3,), {}, "cannot keep layer 3: the model has layers 0 to 2"),
        ((-1,), {}, "cannot keep layer -1"),
        ((0, 1, 2), {}, "all layers would stay as they are"),
        ((1,), {"engine": "vllm"}, "vllm runs one kind of attention in all layers, and some are to stay as they are"),
        ((1,), {"engine": "llama.cpp"}, "llama.cpp runs one kind of attention in all layers"),
        ((1,), {"portable": True}, "its layers all have one kind of attention, and some are to stay as they are"),
    ],
)
def test_layers_that_cannot_stay_are_refused(
    layers: tuple[int, ...], options: dict[str, Any], message: str, source: Sources, output: Output
) -> None:
    where, size = replace(output, engine=options.pop("engine", None)), {"kv_lora_rank": 8, "qk_rope_head_dim": 2} | options
    with pytest.raises(Refusal, match=message):
        factored(source(), where, keep_layers=layers, **size)
    if "portable" not in options:
        with pytest.raises(Refusal, match=message):
            grouped(source(), where, keep_layers=layers)


def test_layers_stay_only_where_others_change(source: Sources, output: Output) -> None:
    with pytest.raises(Refusal, match="all 4 KV heads stay, in all layers"):
        grouped(source(), output, 4, keep_layers=(1,))
    falcon = source("falcon", new_decoder_architecture=True, num_kv_heads=4, name="falcon")
    with pytest.raises(Refusal, match="its own class caches keys and values of all query heads"):
        grouped(falcon, output, keep_layers=(1,))


def test_a_plan_shows_the_steps_beyond_the_method(source: Sources, output: Output) -> None:
    made, text = source(), CalibrationOptions(texts_of("some.txt", None), 256, 32)
    ways: list[tuple[int, str | None, CalibrationOptions, str | None]] = [
        (2, None, text, "steps: aligned → refit → fit to outputs"),
        (2, None, replace(text, refit=False), None),
        (2, "float16", CalibrationOptions(), "steps: aligned → cast to float16"),
        (2, "float32", CalibrationOptions(), None),  # its weights are float32 already
        (4, None, CalibrationOptions(), None),
    ]
    for groups, dtype, given, line in ways:
        plan = grouped(made, replace(output, dtype=dtype), groups, method="aligned", text=given)
        assert [said for said in str(PlannedConversion(plan)).splitlines() if said.startswith("steps")] == (
            [line] if line else []
        )
        assert plan.as_dict()["steps"][:1] == ([] if groups == 4 else ["aligned"])
    latent = factored(made, output, "weighted", text, kv_lora_rank=12, qk_rope_head_dim=8)
    assert latent.steps == ["weighted", "refit", "scale", "fit to outputs", "sharpen"]


def test_a_planned_latent_has_the_parameters_that_are_written(shelf: Make, convert: Convert, tmp_path: Path) -> None:
    planned = capacity(Source.parse(str(shelf())), "float32", 1, 10, ROOM)["targets"]
    half = next(row for row in planned if row["kind"].startswith("MLA"))
    ok(convert("mla", shelf(), tmp_path / "out", "--kv-budget", "50%", "--method", "svd"))
    assert half["kind"] == read(tmp_path / "out" / "conversion.json")["kind"]
    assert half["parameters"] == sum(tensor.numel() for tensor in weights(tmp_path / "out").values())


def test_a_large_loss_of_the_check_is_said_in_words() -> None:
    texts = [{"text": "its own", "tokens": 9, "loss_nats": 0.9}, {"text": "a.txt", "tokens": 8, "loss_nats": 0.01}]
    assert _measured({"check": {"texts": texts}}) == [
        "checked on text that was not fitted: +0.900 nats (perplexity × 2.5: expect text that is hardly of use) on 9 tokens of "
        "its own, +0.010 nats on 8 tokens of a.txt"
    ]
