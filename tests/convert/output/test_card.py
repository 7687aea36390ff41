"""The model card of a conversion, whose names may hold anything that a file name may hold."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from plans import TEXT, factored, grouped
from written import Convert, Find, Make, ok

from convert.execute.describe import loading_of
from convert.output.card import command_line, inherited_licence
from convert.output.destination import Output
from eval.inputs.source import Source

HOSTILE = "a\n```\n# b`|<img src=x>*c* [d](e) \x1b[31m\u202e_f_"


def parts(card: str) -> tuple[dict[str, Any], str, list[str]]:
    """Front matter, text and code blocks."""
    found = re.fullmatch(r"---\n(.*?)\n---\n(.*)", card, re.DOTALL)
    assert found
    blocks = re.split(r"^```\w*$", found[2], flags=re.MULTILINE)
    assert len(blocks) == 5, "two blocks of code, both closed"
    return ModelCard(card).data.to_dict(), "".join(blocks[::2]), blocks[1::2]


def test_hostile_names_stay_names(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, text = checkpoint(name=HOSTILE.replace("/", "")), tmp_path / f"{HOSTILE}.txt"
    text.write_text("Once there was a cat. It sat on the mat.\n" * 40)
    given = ["--groups", 2, "--text", text, "--calibration-tokens", 256, "--evaluate", text, "--max-shard-size", "1GB", "-q"]
    ok(convert("gqa", source, tmp_path / "out", *given))
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    front, prose, (command, _) = parts(card)
    assert front["library_name"] == "transformers"
    assert not any(c != "\n" and not c.isprintable() for c in card)
    name = r"a \`\`\` # b\`\|\<img src=x\>\*c\* \[d\](e)  \[31m \_f\_".replace("# b", r"\# b")
    assert f"\n# GQA-2 of {name}\n" in prose
    assert f"Converted from {name} (GQA-4)" in prose
    assert f"Perplexity under protocol `paper`: {name}.txt, context" in prose
    assert f"tokens of {name}.txt, hash" in prose
    assert re.findall(r"^#+ .*", prose, re.MULTILINE) == [f"# GQA-2 of {name}", "## Loading"]
    assert len(command.strip().split("\n")) == 1
    shell = subprocess.run(["bash", "-c", f"printf '%s\\0' {command.strip()}"], capture_output=True, text=True, check=True)
    assert shell.stdout.split("\0")[:3] == ["convert", "gqa", str(source)]
    assert str(text) in shell.stdout.split("\0")


def test_plain_names_are_written_plainly(finished: Find) -> None:
    made = finished("heads")
    _, prose, (command, _) = parts(made.card)
    assert f"\n# GQA-2 of {made.source.name}\n" in prose
    assert "was not measured" in prose
    assert shlex.split(command)[:4] == ["convert", "gqa", str(made.source), "OUTPUT"]
    assert command_line("gqa", "-m", {"groups": 2}) == "convert gqa ./-m OUTPUT --groups 2", "a path, not an option"


def test_an_evaluation_fills_the_card_and_warns_of_the_text_that_was_fitted(finished: Find, convert: Convert) -> None:
    made = finished("heads with text")
    assert "Perplexity under protocol `paper`: text.txt, context 128" in made.card
    models = made.provenance["evaluation"]["models"]
    assert [(model["name"], model["method"]) for model in models] == [("source", None), ("converted", "aligned")]
    assert models[1]["kv_bytes_per_token"] == models[1]["kv_bytes_measured"] == 384
    assert ".partial" not in made.card + str(made.provenance)
    assert re.search(r"warning: .* shares (9\d|100)% of its runs with the calibration text", made.stderr)
    assert "of this one, which flatters these figures" in made.card
    text = made.command[made.command.index("--text") + 1]
    shown = ok(convert("eval", made.source, made.path, "--text", text, "--max-tokens", 256)).stdout
    assert f"Warning: {made.path.name} was fitted to text that holds" in shown


@pytest.mark.parametrize(("head_dim", "blocks"), [(32, True), (16, False)])
def test_the_card_says_which_engines_store_its_cache_in_fewer_bits(head_dim: int, blocks: bool, shelf: Make) -> None:
    plan = grouped(Source.parse(str(shelf(head_dim=head_dim))), Output(Path("out")))
    remarks = loading_of(plan.target.host, plan.family, plan.target.spec)["remarks"]
    (of_vllm,) = (remark for remark in remarks if remark.startswith("vllm stores the cache in fp8 with `--kv-cache-dtype fp8`"))
    assert "`--kv-cache-dtype turboquant_3bit_nc` (not tried)." in of_vllm
    stored = "q8_0 with `-fa on -ctk q8_0 -ctv q8_0`, or in q4_0 with `-fa on -ctk q4_0 -ctv q4_0`."
    assert (f"llama.cpp stores the cache in {stored}" in remarks) == blocks


def test_the_card_has_vllm_start_without_compiling_where_it_cannot(shelf: Make) -> None:
    for portable, option in ((False, " --enforce-eager"), (True, "")):
        size = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "pad_rank": True, "portable": portable}
        plan = factored(Source.parse(str(shelf(head_dim=64))), Output(Path("out")), "weighted", TEXT, **size)
        vllm, *_ = loading_of(plan.target.host, plan.family, plan.target.spec)["engines"]
        assert (vllm["objection"], vllm["command"]) == (None, f"vllm serve path/to/this/directory{option}")


@pytest.mark.parametrize(
    ("front", "licence"),
    [
        ("license: mit", "mit"),
        ("license: [mit, apache-2.0]", ["mit", "apache-2.0"]),
        ('license: "mit\\n---\\n# evil"', None),
        ('license: "\\x1b[31m"', None),
        ("license: 2024-01-01", None),
        ("license: {a: b}", None),
        ("license: !!bool perhaps", None),
        ("license: " + "[" * 2000, None),
        ("- mit", None),
        ("license: {", None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_only_a_licence_that_is_a_name_is_inherited(front: str, licence: Any, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# Source\n")
    assert inherited_licence(tmp_path) == licence
