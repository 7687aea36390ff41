"""What conversion.json and the card of a healed checkpoint say."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from convert import heal
from convert.healing.describe import card, provenance_of
from convert.healing.loop import Outcome, Point, Progressed
from convert.healing.texts import TrainingTexts


def said(path: Path, teacher: Path, text: Path, sizes: dict[str, Any], out: Path) -> str:
    """The card of a healing that nobody made."""
    plan = heal(path, out, text=text, teacher=teacher, dry_run=True, **sizes).plan
    start, end = Point(0, 0, 0.0, None, 0.5, 0.6), Point(2, 128, 1e-3, 0.4, 0.3, 0.2)
    outcome = Outcome(Progressed(1e-3, {}, [start, end]), end, {"a": torch.zeros(1)})
    texts = TrainingTexts.read(plan)
    return card(plan, provenance_of(plan, texts.facts, texts.whole(), outcome))


@pytest.mark.parametrize(
    ("left", "changes", "expected"),
    [
        (None, {}, "ordinary `llama` checkpoint"),
        ("source", {}, "as the one that it was healed"),
        (None, {"loading": {"model_type": "llama"}}, "as the one that it was healed"),
        (None, {"metadata": "x"}, "ordinary `llama` checkpoint"),
        (None, {"loading": None, "metadata": {"tags": "x"}}, "as the one that it was healed"),
    ],
    ids=str,
)
def test_the_card_says_how_to_load_it_from_the_provenance_alone(
    left: str | None, changes: dict[str, Any], expected: str, converted: Path, text: Path, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Of any shape: others may have written it."""
    path = Path(shutil.copytree(converted, tmp_path / "model"))
    (path / "README.md").unlink()
    known = json.loads((path / "conversion.json").read_text())
    kept = {left: known[left]} if left else known
    (path / "conversion.json").write_text(json.dumps(kept | changes))
    found = said(path, Path(known["recipe"]["mqa"]["model"]), text, sizes, tmp_path / "out")
    assert found.startswith("---\nlibrary_name: transformers\n")
    assert found.count("## Loading") == 1
    assert expected in found.partition("## Loading")[2]
    assert "| KL to the source, nats      | 0.5000 | 0.3000 |" in found
