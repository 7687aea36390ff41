"""Lists the removed options and commands, each with its replacement."""

COMMANDS = {"cache": "nothing is kept between runs; delete ~/.cache/kvfold, which earlier versions made"}
OPTIONS = {
    "--ce": "the loss is the KL to the teacher alone",
    "--compile": "steps are measured without torch.compile",
    "--effort": "give --tokens: 20M is the default, and 200M or 2B go further",
    "--freqfold": "pca folds as few frequencies as --qk-rope-head-dim allows",
    "--grouping": "each group has heads that stand side by side",
    "--largest-batch": "`convert plan` counts what fits",
    "--max-perplexity-ratio": "compare the perplexities that --json prints",
    "--per-layer-ranks": "--keep-layers leaves layers as they are, which keeps copying",
    "--q-lora-rank": "queries have full rank, in a latent of their own where --engine llama.cpp needs one",
    "--refine": "--heal loses less in the same time",
    "--set": "name OUTPUT and the options: `convert run RESULT OUTPUT [OPTIONS]`",
    "--tasks": "run lm-eval on `attention.load`, as docs/evaluation.md shows",
    "--teacher-cache": "--checkpointing and a smaller --micro-batch-tokens take less memory",
    "--text-shares": "each text gives as many tokens",
    "--top-k": "--checkpointing and a smaller --micro-batch-tokens take less memory",
}
