"""The command line: each command makes one call of the API and prints the result. Data goes to stdout, all else to stderr."""

import contextlib
import errno
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import click

import convert
from attention.errors import Failure, Interrupted, KvfoldError, Refusal
from convert.arguments import options
from convert.command.parameters import CONVERTED, DEMO, DIR, MODEL, MODELS, OUTPUT, parameters
from convert.launch import is_first, require_alone
from eval import options as measured
from eval.terminal.text import printable, printable_lines, shell_line


class Command(click.Command):
    """A command that takes what its function returns, and prints it as text or JSON.

    What it returns is a dict or has `as_dict`, and its `str()` is the text; or it is `Printed`.
    """

    def invoke(self, ctx: click.Context) -> None:
        assert self.callback is not None
        given = dict(ctx.params)
        as_json, verbose, quiet = given.pop("as_json"), given.pop("verbose"), given.pop("quiet")
        arguments = [given.pop(str(one.name)) for one in self.params if isinstance(one, click.Argument)]
        ctx.meta["kvfold.verbose"] = verbose  # shared with the group, which handles errors
        with contextlib.redirect_stdout(sys.stderr):  # where libraries print
            if self.name != "families":  # which reads no model, and has no use for torch
                from convert.command.console import console

                ctx.obj = console(verbose, quiet)
            found = self.callback(*arguments, **given)
        if not is_first():  # of several processes, one reports
            return
        if not isinstance(found, Printed):
            found = Printed(found if isinstance(found, dict) else found.as_dict(), str(found))
        try:
            click.echo(json.dumps(found.facts, indent=2) if as_json else printable_lines(found.text))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            reason = f"stdout cannot be written: {error.strerror}"
            raise Failure(reason, hint="what the command wrote to files is whole") from None
        if found.page is not None and not quiet:
            click.echo(printable(f"report: {found.page}"), err=True)


class Printed(NamedTuple):
    """What a command prints: facts for `--json`, their text, and where a report is."""

    facts: Any
    text: str
    page: Path | None = None


def _progress() -> Any:
    """The progress callback of the command that runs."""
    return click.get_current_context().obj


class Commands(click.Group):
    """A group that turns known errors into one line, a hint and an exit code."""

    command_class = Command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # what its encoding lacks; stderr escapes that
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvfoldError as error:
            if ctx.meta.get("kvfold.verbose"):
                traceback.print_exc()
            click.echo(f"error: {error}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of a pipe has closed it; click ends quietly
            click.echo(f"error: {printable(str(error))}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("error: interrupted", err=True)
            ctx.exit(Interrupted.exit_code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of this file, with the main ones first


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kvfold", prog_name="kvfold")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Convert a Hugging Face checkpoint to a smaller KV cache, and measure the loss.

    MODEL is a checkpoint directory, a Hub id with an optional @revision, or a GGUF file.
    """
    if "OMP_WAIT_POLICY" not in os.environ:  # threads of GNU OpenMP wait for microseconds, and leave the cores to other work
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if ctx.invoked_subcommand != "heal":
        require_alone(f"convert {ctx.invoked_subcommand}")


@main.command(params=parameters(options.Gqa, MODEL, OUTPUT))
def gqa(*names: Any, **given: Any) -> Any:
    """Convert MODEL to grouped-query attention.

    Merges its KV heads into N heads, and writes the result to OUTPUT. --dry-run says what loads it.

    Example: convert gqa --groups 8 meta-llama/Llama-2-7b-hf llama-2-7b-gqa8
    """
    return convert.gqa(*names, progress=_progress(), **given)


@main.command(params=parameters(options.Mqa, MODEL, OUTPUT))
def mqa(*names: Any, **given: Any) -> Any:
    """Convert MODEL to multi-query attention.

    The same as gqa --groups 1.

    Example: convert mqa ./my-model my-model-mqa
    """
    return convert.mqa(*names, progress=_progress(), **given)


@main.command(params=parameters(options.Mla, MODEL, OUTPUT))
def mla(*names: Any, **given: Any) -> Any:
    """Convert MODEL to multi-head latent attention.

    Factors its keys and values through a latent of rank R, and keeps a RoPE key of P dims. Writes the result to OUTPUT as
    DeepSeek-V3 without experts, which stock transformers loads, and caches at that size.

    Example: convert mla --kv-lora-rank 448 --qk-rope-head-dim 128 --dtype bfloat16 meta-llama/Llama-2-7b-hf llama-2-7b-mla
    """
    return convert.mla(*names, progress=_progress(), **given)


@main.command(params=parameters(options.Heal, CONVERTED, OUTPUT))
def heal(*names: Any, **given: Any) -> Any:
    """Train CONVERTED until it predicts as its source does, and write the result to OUTPUT.

    Distils the source, the teacher, into CONVERTED: every token's predictions are compared. CONVERTED stays the class that it
    is, with the same cache. Without --text, the teacher writes the text. A part of it is held out; it chooses the learning rate
    and the weights.

    Example: convert heal my-model-mla my-model-mla-healed --text train.txt --tokens 20M --evaluate held-out.txt
    """
    return convert.heal(*names, progress=_progress(), **given)


@main.command(name="eval", params=parameters(measured.Evaluate, MODELS))
def evaluate(models: tuple[str, ...], **given: Any) -> Printed:
    """Measure perplexity and KV bytes per token of MODELs.

    The first MODEL is the source. The others are compared with it: loss in nats, KL and top-1 agreement.

    Example: convert eval ./my-model my-model-gqa8 --text held-out.txt --output report
    """
    from eval import evaluate
    from eval.report.quality import to_markdown

    found = evaluate(models, progress=_progress(), **given)
    return Printed(found, to_markdown(found), given["output"] and given["output"] / "report.html")


@main.command(params=parameters(measured.Bench, MODELS))
def bench(models: tuple[str, ...], **given: Any) -> Printed:
    """Measure speed and memory of MODELs side by side.

    Time of a prefill and of a decode step, bytes of the cache and, on a GPU, peak memory, on random tokens. MLA models decode
    over their latent, GQA models packed.

    Example: convert bench ./my-model my-model-mla --context 512,2048,8192 --output speed
    """
    from eval import bench
    from eval.speed.bench import to_markdown

    found = bench(models, progress=_progress(), **given)
    return Printed(found, to_markdown(found), given["output"] and given["output"] / "bench.json")


@main.command(params=parameters(options.Sweep, MODEL, DIR))
def sweep(*names: Any, **given: Any) -> Printed:
    """Convert MODEL to many targets with many methods, and compare them.

    Collects the statistics of the text once for all of them, and once for pca. DIR/report plots perplexity against KV bytes
    per token. Without --groups and --mla, the targets are a half, a quarter, … of MODEL's KV heads, and MLA at 25 % and
    12.5 % of its cache. Text goes to the methods that use it; --refit goes to aligned and weighted only.

    Example: convert sweep ./my-model sweep --groups 8,4,1 --mla 448+64 --text calibrate.txt --evaluate held-out.txt
    """
    done = convert.sweep(*names, progress=_progress(), **given)
    return Printed(done.as_dict(), str(done), None if given["dry_run"] else done.report_directory / "report.html")


@main.command(params=parameters(options.Plan, MODEL))
def plan(model: str, **given: Any) -> Any:
    """Show the KV memory of each target, and the GPUs that it fits on.

    Reads only the config of MODEL.

    Example: convert plan meta-llama/Llama-2-7b-hf --batch 16 --context 4096 --gpu A6000=48
    """
    return convert.plan(model, **given)


@main.command(params=parameters(options.Inspect, MODEL))
def inspect(model: str, **given: Any) -> Any:
    """Show what MODEL is and what it can become.

    Heads, RoPE, biases, family, output classes and cache. Reads only the config.

    Example: convert inspect Qwen/Qwen2.5-7B@main
    """
    return convert.inspect(model, **given)


@main.command(params=parameters(None, OUTPUT))
def refresh(output: Path) -> Any:
    """Renew the code that lies beside the weights of OUTPUT.

    OUTPUT is a result of kvfold's class: with modeling_kvfold.py in its directory, which runs where kvfold is not installed.
    A release of transformers may need newer code. Weights and all else stay as they are.

    Example: convert refresh my-model-mla
    """
    return convert.refresh(output)


@main.command(params=parameters(None))
def families() -> Printed:
    """List the families that can be converted.

    For each target, shows the class that holds the result.

    Example: convert families
    """
    from convert.planning.describe import support, support_text

    rows = support()
    return Printed(rows, support_text(rows))


@main.command(
    cls=click.Command,
    context_settings={"allow_interspersed_args": False},
    params=[
        click.Argument(["result"], type=click.Path(exists=True, path_type=Path)),
        OUTPUT,
        click.Argument(["options"], nargs=-1, type=click.UNPROCESSED),
    ],
)
@click.pass_context
def run(context: click.Context, result: Path, output: Path, options: tuple[str, ...]) -> None:
    """Repeat the command that made RESULT, and write to OUTPUT.

    RESULT is a directory, or the conversion.json in it. OPTIONS are those of the command that made it, and replace what
    conversion.json records. Only they allow what could do harm, as --trust-remote-code does.

    Example: convert run my-model-gqa8 again --seed 1
    """
    from convert.command import recipe

    name, *words = recipe.arguments(result, output, options, main)
    click.echo(shell_line(["convert", name, *words]), err=True)
    command = main.commands[name]
    try:
        repeated = command.make_context(name, words, context.parent)
    except click.UsageError as error:
        raise Refusal(f"convert {name}, as {result} records it: {' '.join(error.format_message().split())}") from None
    with repeated:
        command.invoke(repeated)


@main.command(params=parameters(None, DEMO))
def demo(output: Path) -> Printed:
    """Convert and evaluate the bundled model.

    Converts a small MHA checkpoint to GQA, MQA and MLA, evaluates the results and writes a report. Needs no network, and
    takes about two minutes.

    Example: convert demo
    """
    from convert.demo.showcase import showcase
    from eval.report.quality import to_markdown

    found, page = showcase(output, _progress())
    click.get_current_context().call_on_close(lambda: click.echo(f"report: {page}", err=True))  # also with --quiet
    return Printed(found, to_markdown(found))


if __name__ == "__main__":
    main(prog_name="convert")
