"""The examples of docs/api.md do what they say."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from convert.demo.corpus import VALIDATION, held_out_text
from convert.demo.showcase import MODEL

API = Path(__file__).parents[1] / "docs" / "api.md"


@pytest.mark.slow
def test_the_examples_of_the_api_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after another, on the bundled checkpoint and some hundreds of tokens."""
    (tmp_path / "my-model").symlink_to(MODEL)
    (tmp_path / "calibrate.txt").write_text(held_out_text(VALIDATION)[:2000], encoding="utf-8")
    (tmp_path / "held-out.txt").write_text(held_out_text(("statistics",))[8000:10000], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("kvfold"), "handlers", [])
    blocks = re.findall(r"^```python\n(.*?)^```$", API.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    namespace: dict[str, object] = {}
    said = []
    for block in blocks:
        exec(compile(block, str(API), "exec"), namespace)
        said.append(capsys.readouterr().out)
    assert "my-model-gqa2 MHA GQA-2" in said[0]
    assert "MLA-96+32" in said[2]
    assert re.fullmatch(r"\d\.\d+ \d\.\d+\n", said[3])
    assert "sweep/report/report.html" in said[4]
    assert said[5].startswith("[8, 4, 2, 1]\nMHA ")
    assert "cannot make 3 groups from 8 KV heads" in said[7]
    assert re.match(r"fit: 0 of 6 layers\n(.*\n)*convert: (\d+) of \2 bytes\n$", said[8])


def test_every_function_has_an_example() -> None:
    import convert
    import eval as eval_package

    text = API.read_text(encoding="utf-8")
    for name in [*convert.__all__, *eval_package.__all__]:
        assert name[0].isupper() or re.search(rf"\b{name}\(", text), name
