"""What sharing KV heads costs models with QK-norm, in their own class and in kvfold's, beside a Llama and the published way.

    python benchmarks/qk_norm.py DIR TOKENIZER --text FILE [--seconds 240] [--types llama,qwen3,…]

Small models are trained as by benchmarks/families.py, each for so many seconds of CPU time, and kept in DIR. Gains of such
young models are near one, where phases pass a norm: of types with QK-norm there is a twin that begins with log-normal gains
(σ 0.5). 16,384 tokens of the text's first half calibrate, in blocks of 256; losses, in nats over the source, are of as many
tokens of its second half.
"""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import families
import procrustes
import torch
import transformers

from convert import gqa, mla, mqa
from convert.converting import convert
from convert.families import FAMILIES
from convert.output.destination import Output
from convert.planning.base import Request
from convert.planning.calibration import CalibrationOptions
from convert.planning.plans import plan_grouped
from convert.planning.texts import texts_of
from eval import evaluate
from eval.inputs.source import Source

TYPES = "llama,qwen3,qwen3_moe,olmo2,exaone4"
TOKENS, CONTEXT = 16384, 256
GIVEN: dict[str, Any] = {
    "calibration_tokens": TOKENS, "calibration_context": CONTEXT, "heal": 0, "overwrite": True, "all_layers": True,
}  # fmt: skip
COLUMNS = ("half: Procrustes", "its class", "kvfold", "MQA: Procrustes", "its class", "kvfold", "MLA, 25 %")


@contextmanager
def uneven_gains() -> Iterator[None]:
    """Models begin with log-normal gains of their QK-norms, so that both dims of a rotary pair have different ones."""
    made = transformers.AutoModelForCausalLM.from_config

    def uneven(*args: Any, **kwargs: Any) -> Any:
        model, generator = made(*args, **kwargs), torch.Generator().manual_seed(1)
        for name, gain in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                gain.data = torch.exp(0.5 * torch.randn(gain.shape, generator=generator))
        return model

    transformers.AutoModelForCausalLM.from_config = uneven
    try:
        yield
    finally:
        transformers.AutoModelForCausalLM.from_config = made


def converted(source: Path, work: Path, calibration: str) -> Iterator[Path | None]:
    """Results in the order of COLUMNS; None where there is none."""
    normed = FAMILIES[source.name.removesuffix("-uneven")].of(Source.parse(str(source)).config).traits.qk_norm is not None
    for groups in (2, 1):
        out = work / f"{source.name}-{groups}"
        options = CalibrationOptions(texts_of([calibration], None), TOKENS, CONTEXT, refit=False, heal=0)
        target = Output(out.with_name(f"{out.name}-procrustes"), overwrite=True)
        found = Source.parse(str(source))
        convert(
            plan_grouped(Request(found, target, options, device="cpu", accepts_any_loss=True), "gqa", groups, procrustes.METHOD)
        )
        yield target.path
        for kind in ("stock", "kvfold"):
            path = out.with_name(f"{out.name}-{kind}")
            if kind == "kvfold" and not normed:
                yield None
                continue
            given = {"text": [calibration], "output_class": kind, "force": True} | GIVEN
            if groups == 1:
                mqa(source, path, **given)
            else:
                gqa(source, path, groups=groups, **given)
            yield path
    mla(source, work / f"{source.name}-mla", kv_budget="25%", text=[calibration], **GIVEN)
    yield work / f"{source.name}-mla"


def row(source: Path, work: Path, calibration: str, held_out: str) -> str:
    made = list(converted(source, work, calibration))
    paths = [path for path in made if path is not None]
    report = evaluate([source, *paths], text=[held_out], context=CONTEXT, max_tokens=TOKENS)["models"]
    losses = dict(zip(paths, (model["loss_nats"] for model in report[1:]), strict=True))
    cells = [f"{losses[path]:.4f}" if path else "–" for path in made]
    return f"| {source.name} | {report[0]['perplexity']:.2f} | {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("tokenizer", help="a checkpoint or directory with a tokenizer of few words")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--seed", type=int, default=0, help="of the training; each needs its own DIR")
    args = parser.parse_args(arguments)
    logging.getLogger("kvfold").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    tokenizer, text = transformers.AutoTokenizer.from_pretrained(args.tokenizer), args.text.read_text(encoding="utf-8")
    halves = text[: len(text) // 2], text[len(text) // 2 :]
    print(f"| source | perplexity | {' | '.join(COLUMNS)} |\n|{' --- |' * (2 + len(COLUMNS))}", flush=True)
    for model_type in args.types.split(","):
        for name in (model_type, *([f"{model_type}-uneven"] if model_type != "llama" else [])):
            source = args.directory / name
            if not (source / "model.safetensors").exists():
                if name == model_type:
                    families.train(model_type, source, tokenizer, halves[0], args.seconds, 3e-3, args.seed)
                else:
                    with uneven_gains():
                        families.train(model_type, source, tokenizer, halves[0], args.seconds, 3e-3, args.seed)
            work = args.directory / f"{name}-results"
            print(row(source, work, *halves), flush=True)


if __name__ == "__main__":
    main()
