"""Options that commands no longer have, with what to do instead, for the line that whoever gives one reads."""

from __future__ import annotations

_TASKS = "run lm-eval on `attention.load`, as docs/evaluation.md shows"
_TEACHER = "the teacher is in memory; --checkpointing and --micro-batch-tokens take less of it, and FSDP 2 divides both models"

OPTIONS = {
    "--grouping": "each group has heads that stand side by side",
    "--largest-batch": "`convert plan` counts what fits",
    "--limit": _TASKS,
    "--q-lora-rank": "queries have full rank, in a latent of their own where --engine llama.cpp needs one",
    "--task-path": _TASKS,
    "--tasks": _TASKS,
    "--teacher-cache": _TEACHER,
    "--top-k": _TEACHER,
}
