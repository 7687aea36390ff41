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


LOOP = """
        /*0010*/                   MOV R1, c[0x0][0x28] ;
        /*0020*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R198], desc[UR60][R194.64], P3 ;
        /*0040*/                   STSM.16.M88.4 [R7], R24 ;
        /*0050*/              @P0  LDS R4, [R2] ;
        /*0060*/                   HGMMA.64x256x16.F32.BF16 R24, R184, gdesc[UR4].tnspB, R24 ;
        /*0070*/              @!P1 BRA 0x20 ;
        /*0080*/                   LDL R9, [R1] ;
        /*0090*/              @P2  BRA 0x10 ;
"""


def test_instructions_are_counted_by_what_they_move() -> None:
    pytest.importorskip("triton")
    code = script("decode_code")
    loop = code.loop_of(LOOP)
    assert [line.split()[0].split(".")[0] for line in loop] == ["HGMMA", "LDGSTS", "STSM", "LDS", "HGMMA", "BRA"]
    # Four warps, one warpgroup: 64 + 32 rows of 32 bytes; 16 bytes a lane; four 8 × 8 matrices a warp; 4 bytes a lane; 256 rows
    moved = 96 * 32 + 4 * 32 * 16 + 4 * 4 * 128 + 4 * 32 * 4 + 256 * 32
    assert code.cycles(loop, 4) == (moved / 128, 64 * (32 + 256) * 16 / 2048)
