"""Benchmarks run, at sizes that say nothing, and tell right from wrong."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_file
from tiny import tiny_config, tiny_model
from written import Make

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_the_benchmark_checks_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = script("decode_cuda")
    with pytest.raises(SystemExit, match="nothing was measured"):
        benchmark.main(["kernel"])
    benchmark.main(["interpret"])
    assert capsys.readouterr().out.count("relative error") == 4
    benchmark.scaling = lambda dim: 1.0 if sys._getframe(1).f_code.co_name == "expected" else 0.9
    with pytest.raises(SystemExit, match=r"wrong: .* cosine distance"):
        benchmark.main(["interpret"])


def table(said: str) -> list[list[str]]:
    """Cells of the table that a benchmark prints, without its head."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line.startswith("|")]
    return rows[2:]


def test_grouped_decoding_is_measured_both_ways() -> None:
    given = ["--groups", "16", "4", "--layers", "1", "--length", "64", "--rounds", "1", "--backend", "eager"]
    done = run_file(BENCHMARKS / "decode_grouped.py", *given)
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert [row[0] for row in rows] == ["16", "4"]
    assert [bool(cell) for cell in rows[0]] == [True, True, False] + [True, False] * 2  # MHA is not packed
    assert all(float(cell.removesuffix(" ms")) > 0 for cell in rows[1])


def test_encoded_decoding_is_measured_beside_float32(tmp_path: Path) -> None:
    tiny_model(tiny_config("llama", num_key_value_heads=1)).save_pretrained(tmp_path / "mqa")
    given = ["--length", "70", "--prompt", "70", "--rounds", "1", "--formats", "int8", "int4"]
    done = run_file(BENCHMARKS / "decode_encoded.py", str(tmp_path / "mqa"), *given)
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    for what, (milliseconds, of_none, of_float32) in {"step": rows[:3], "prefill": rows[3:]}.items():
        named = [f"mqa, {what}: {title}" for title in ("ms", "of none", "of float32")]
        assert [row[0] for row in (milliseconds, of_none, of_float32)] == named
        assert all(float(cell) > 0 for cell in milliseconds[1:])
        assert (of_none[1], of_float32[2], len(of_none)) == ("1.00", "1.00", 5)


def test_the_gain_is_measured_and_what_cannot_run_says_why(
    checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    benchmark = script("gain")
    given = [tmp_path / "gain", checkpoint(), "--contexts", 96, "--batch", 2, "--rounds", 1, "--environment", tmp_path]
    benchmark.main([*map(str, given), "--engines", "llama.cpp,transformers"])
    rows = table(capsys.readouterr().out)
    assert [row[0] for row in rows].count("transformers") == 8
    for engine, *_, bytes_per_token, sequences, _, decoded, _, why in rows:
        assert bool(decoded.strip("–")) == (engine == "transformers") == (not why), (engine, why)
        assert engine == "llama.cpp" or 0 < int(bytes_per_token) * int(sequences) <= 8e9 / 96
    again = []
    monkeypatch.setattr(benchmark, "measured", lambda row, *_: again.append(row.engine) or {"error": "again"})
    benchmark.main([*map(str, given), "--engines", "llama.cpp,transformers"])
    assert {*again} == {"llama.cpp"}, "what could not run"
