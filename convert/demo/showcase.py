"""`convert demo`: the bundled MHA checkpoint through every conversion that there is, and into one report."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from convert.demo.corpus import VALIDATION, held_out_text
from convert.execute import execute
from convert.methods import load_grouped, load_latent
from convert.plan import Calibration, Output, plan_grouped
from convert.plan_latent import LatentSize, plan_latent
from eval import report
from eval.evaluate import Settings, evaluate
from eval.source import Source
from eval.text import Text, read_file

MODEL = Path(__file__).parent / "python-5m-mha"
_GROUPS = (("mean", 4), ("mean", 2), ("mean", 1), ("aligned", 4), ("aligned", 2), ("aligned", 1))
_SHARES = (("svd", 0.25), ("svd", 0.125), ("pca", 0.25), ("pca", 0.125))
_MODULES = ("difflib", "statistics")  # of those held out: as much as two minutes allow
_CALIBRATION_TOKENS = 32768


def showcase(output: Path, quiet: bool = False) -> tuple[dict[str, Any], Path]:
    """Convert, evaluate on library modules that were held out of training, and write the report.

    Args:
        output: Receives one directory per conversion, and `report/`; those of an earlier demo are replaced.
        quiet: No progress bars.

    Returns:
        The report, and the path of its HTML page.
    """
    source = Source.parse(str(MODEL))
    calibration = output / "calibration.txt"
    output.mkdir(parents=True, exist_ok=True)
    calibration.write_text(held_out_text(VALIDATION), encoding="utf-8")  # modules that watched the training
    converted = [_grouped(source, output, method, groups) for method, groups in _GROUPS]
    converted += [_latent(source, output, method, share, calibration) for method, share in _SHARES]
    text = Text(f"Python {platform.python_version()}: {', '.join(_MODULES)}", held_out_text(_MODULES))
    found = evaluate([source, *converted], text, Settings(device="cpu", quiet=quiet))
    return found, report.write(found, output / "report")["report.html"]


def _grouped(source: Source, output: Path, method: str, groups: int) -> Source:
    path = output / f"gqa{groups}-{method}"
    execute(plan_grouped("gqa", source, groups, load_grouped(method), 0, "cpu", Output(path, overwrite=True)), quiet=True)
    return Source.parse(str(path))


def _latent(source: Source, output: Path, method: str, share: float, text: Path) -> Source:
    """MLA at a share of the cache, calibrated where the method is."""
    path, how = output / f"mla{share:.1%}-{method}", load_latent(method)
    calibration = Calibration({"text": str(text)}, _CALIBRATION_TOKENS) if how.needs_text else Calibration()
    plan = plan_latent(source, LatentSize(kv_share=share), how, calibration, "cpu", Output(path, overwrite=True))
    execute(plan, calibrate_on=read_file(text) if how.needs_text else None, quiet=True)
    return Source.parse(str(path))
