"""The model card of a conversion whose names hold anything that a file name may hold."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from latents import SMALL, full_size
from written import ok

Make = Callable[..., Path]
Convert = Callable[..., Any]
HOSTILE = "a\n```\n# b`|<img src=x>*c* [d](e) \x1b[31m\u202e_f_"


def card_of(source: Path, convert: Convert, out: Path, *options: object) -> str:
    result = convert("gqa", source, out, "--groups", 2, *options)
    assert result.exit_code == 0, result.output
    return (out / "README.md").read_text(encoding="utf-8")


def parts(card: str) -> tuple[dict[str, Any], str, list[str]]:
    """Front matter, text and code blocks."""
    found = re.fullmatch(r"---\n(.*?)\n---\n(.*)", card, re.DOTALL)
    assert found
    blocks = re.split(r"^```\w*$", found[2], flags=re.MULTILINE)
    assert len(blocks) == 5, "two blocks of code, both closed"
    return ModelCard(card).data.to_dict(), "".join(blocks[::2]), blocks[1::2]


def test_hostile_names_stay_names(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(name=HOSTILE.replace("/", ""))
    text = tmp_path / f"{HOSTILE}.txt"
    text.write_text("Once there was a cat. It sat on the mat.\n" * 40)
    card = card_of(source, convert, tmp_path / "out", "--text", text, "--evaluate", text, "-q")
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


def test_plain_names_are_written_plainly(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(name="my-model_7b.v1")
    _, prose, (command, _) = parts(card_of(source, convert, tmp_path / "out"))
    assert "\n# GQA-2 of my-model_7b.v1\n" in prose
    assert shlex.split(command)[:4] == ["convert", "gqa", str(source), "OUTPUT"]


def test_the_card_says_which_engines_store_its_cache_in_fewer_bits(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    stored = (
        "llama.cpp stores the cache in q8_0 with `-fa on -ctk q8_0 -ctv q8_0`, or in q4_0 with `-fa on -ctk q4_0 -ctv q4_0`."
    )
    for head_dim, expected in ((32, [True, True]), (16, [True, False])):
        card = card_of(checkpoint(name=f"heads-{head_dim}", head_dim=head_dim), convert, tmp_path / f"out-{head_dim}")
        assert ["vllm stores the cache in fp8 with `--kv-cache-dtype fp8` (not tried)." in card, stored in card] == expected


def test_a_model_that_looks_like_an_option_is_a_path_in_the_command(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(name="-m")
    monkeypatch.chdir(tmp_path)
    result = convert("gqa", "--groups", 2, "--", "-m", "out")
    assert result.exit_code == 0, result.output
    _, _, (command, _) = parts((tmp_path / "out" / "README.md").read_text())
    assert shlex.split(command)[2:4] == ["./-m", "OUTPUT"]


def test_a_source_with_a_latent_is_counted_as_it_is_cached(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    model = checkpoint()
    for rank, rope_dim in ((16, 8), (12, 4)):
        size = ["--kv-lora-rank", rank, "--qk-rope-head-dim", rope_dim, "--method", "svd"]
        out = tmp_path / f"{rank}+{rope_dim}"
        result = convert("mla", model, out, *size)
        assert result.exit_code == 0, result.output
        model = out
    card = (model / "README.md").read_text()
    assert "| cached values per token and layer | 24 | 12 of the latent, 4 of the RoPE key |" in card


@pytest.mark.parametrize(
    ("front", "licence"),
    [
        ("license: mit", "mit"),
        ("license: [mit, apache-2.0]", ["mit", "apache-2.0"]),
        ('license: "mit\\n---\\n# evil"', None),
        ('license: "\\x1b[31m"', None),
        ("license: 2024-01-01", None),
        ("license: 5", None),
        ("license: {a: b}", None),
        ("license: !!bool perhaps", None),
        ("license: " + "[" * 2000, None),
        ("- mit", None),
        ("license: {", None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_only_a_licence_that_is_a_name_is_inherited(
    front: str, licence: str | list[str] | None, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = checkpoint()
    (source / "README.md").write_text(f"---\n{front}\n---\n# Source\n")
    found, _, _ = parts(card_of(source, convert, tmp_path / "out"))
    assert found.get("license") == licence


def test_evaluating_fills_the_card_and_never_the_work_directory_name(
    checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("a line of text, and another\n" * 40)
    ok(convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--evaluate", tmp_path / "text.txt", "-q"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Perplexity under protocol `paper`: text.txt, context 128" in card
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert [(m["name"], m["method"]) for m in provenance["evaluation"]["models"]] == [
        ("source", None),
        ("converted", "aligned"),
    ]
    assert ".partial" not in card + json.dumps(provenance)


def test_evaluating_fills_the_card_of_a_latent(checkpoint: Make, convert: Convert, words: Path, tmp_path: Path) -> None:
    (tmp_path / "held-out.txt").write_text("a line of text, and another\n" * 40)
    ok(convert("mla", checkpoint(), tmp_path / "out", *full_size(4, 8), "--evaluate", tmp_path / "held-out.txt", "-q"))
    source, converted = json.loads((tmp_path / "out" / "conversion.json").read_text())["evaluation"]["models"]
    assert converted["perplexity"] == pytest.approx(source["perplexity"], rel=1e-4)
    assert converted["kl_to_source"] == pytest.approx(0, abs=1e-5)
    assert (converted["kind"], converted["method"], converted["kv_bytes_per_token"]) == ("MLA-33+32", "weighted", 3 * 65 * 4)
    assert "held-out.txt, context 128" in (tmp_path / "out" / "README.md").read_text()


def test_evaluating_on_the_calibration_text_is_warned_of(
    checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    options = [*SMALL, "--method", "pca", "--text", words]
    result = ok(convert("mla", checkpoint(), tmp_path / "out", *options, "--evaluate", words))
    assert re.search(r"warning: .* shares (9\d|100)% of its runs with the calibration text", result.stderr)
    assert "of this one, which flatters these figures" in (tmp_path / "out" / "README.md").read_text()
    shown = ok(convert("eval", tmp_path / "source", tmp_path / "out", "--text", words)).stdout
    assert "Warning: out was calibrated on text that holds" in shown
