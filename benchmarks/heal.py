"""What a step of healing costs beside a plain training step with the teacher's forward pass.

    python benchmarks/heal.py CONVERTED --text FILE [--teacher MODEL] [--context 512] [--batch-tokens 2048] [--rounds 5]

The plain step is what one writes first: both models' logits for the whole batch, KL, `backward`, `AdamW.step` on the same
weights. Both run in this process on the same blocks, in turns.
"""

import argparse
import copy
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from convert import heal
from convert.calibration.stream import positioned
from convert.healing.loop import distillation_of
from convert.healing.plan import HealPlan
from convert.healing.team import computes_in
from convert.healing.texts import TrainingTexts
from convert.healing.trainer import HealingTrainer

RATE = 1e-9  # so small that both ways see the same weights, and their losses agree


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("converted")
    parser.add_argument("--teacher")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as work:
        sizes: dict[str, Any] = {"context": args.context, "batch_tokens": args.batch_tokens, "lr": RATE, "device": "cpu"}
        sizes |= {"teacher": args.teacher, "text": args.text, "tokens": 4 * args.batch_tokens}
        plan = heal(args.converted, Path(work, "out"), dry_run=True, **sizes).plan
        speed(plan, args.rounds)


def speed(plan: HealPlan, rounds: int) -> None:
    """Seconds per step of both ways, in turns."""
    text = TrainingTexts.read(plan).whole()
    with distillation_of(plan) as (module, what), tempfile.TemporaryDirectory() as unused:
        other, teacher = copy.deepcopy(module.student), module.teacher
        trainer = HealingTrainer(plan, text, module, what, Path(unused))
        optimiser = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=RATE)
        order = text.order((rounds + 1) * plan.batch, plan.seed).split(plan.batch)
        seconds, plain_seconds, losses, began = list[float](), list[float](), list[float](), time.perf_counter()

        def beside(tokens: int) -> None:
            nonlocal began
            middle = time.perf_counter()
            blocks = order[len(losses)]
            with torch.autocast("cpu", torch.bfloat16, enabled=computes_in(plan) is torch.bfloat16):
                losses.append(plain(other, teacher, text.blocks[blocks], text.positions[blocks]))
            optimiser.step()
            optimiser.zero_grad()
            ended = time.perf_counter()
            seconds.append(middle - began)
            plain_seconds.append(ended - middle)
            began = ended

        trainer.run(rounds + 1, RATE, beside)
        found, expected_loss = trainer.state.log_history[-1]["train_loss"], statistics.mean(losses)
        assert abs(found - expected_loss) <= 1e-3 * abs(found) + 1e-6, f"the two losses differ: {found} and {expected_loss}"
        del seconds[0], plain_seconds[0]  # the first ones warm up
    tokens = plan.batch * plan.context
    ratio = statistics.median(a / b for a, b in zip(plain_seconds, seconds, strict=True))
    rates = [tokens / statistics.median(found) for found in (plain_seconds, seconds)]
    print(f"plain: {rates[0]:,.0f} tokens/s; heal: {rates[1]:,.0f} tokens/s")
    print(f"heal is {ratio:.2f} × as fast (median of {rounds})")


def plain(student: Any, teacher: Any, ids: torch.Tensor, positions: torch.Tensor) -> float:
    """Backward of the mean KL, by the models' own logits; returns it."""
    given = {"input_ids": ids, "use_cache": False} | positioned(positions)
    with torch.no_grad():
        expected_logits = teacher(**given).logits[:, :-1].float().log_softmax(-1)
    found = student(**given).logits[:, :-1].float().log_softmax(-1)
    loss = (expected_logits.exp() * (expected_logits - found)).sum(-1).mean()
    loss.backward()
    return float(loss.detach())


if __name__ == "__main__":
    main()
