"""Lists the removed options and commands, each with its replacement."""

_OUTPUT = "name OUTPUT and the options: `convert run RESULT OUTPUT [OPTIONS]`"
_TASKS = "run lm-eval on `attention.load`, as docs/evaluation.md shows"
_TEACHER = "the teacher is in memory; --checkpointing and --micro-batch-tokens take less of it, and FSDP 2 divides both models"

COMMANDS = {"cache": "nothing is kept between runs; delete ~/.cache/kvfold, which earlier versions made"}
OPTIONS = {
    "--allow-paths": _OUTPUT,
    "--ce": "the loss is the KL to the teacher alone",
    "--compile": "steps are measured without torch.compile",
    "--effort": "give --tokens: 20M is the default, and 200M or 2B go further",
    "--freqfold": "pca folds as few frequencies as --qk-rope-head-dim allows",
    "--grouping": "each group has heads that stand side by side",
    "--largest-batch": "`convert plan` counts what fits",
    "--limit": _TASKS,
    "--max-perplexity-ratio": "compare the perplexities that --json prints",
    "--per-layer-ranks": "--keep-layers leaves layers as they are, which keeps copying",
    "--q-lora-rank": "queries have full rank, in a latent of their own where --engine llama.cpp needs one",
    "--refine": "--heal loses less in the same time",
    "--set": _OUTPUT,
    "--task-path": _TASKS,
    "--tasks": _TASKS,
    "--teacher-cache": _TEACHER,
    "--text-shares": "each text gives as many tokens",
    "--top-k": _TEACHER,
}
