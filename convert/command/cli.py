"""The command line: each command makes one call of the API and prints the result. Data goes to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import click

import convert
from attention.errors import Failure, Interrupted, KvfoldError, Refusal
from convert.arguments import options
from convert.command import parameters, removed
from convert.launch import is_first, require_alone
from eval import options as measured
from eval.terminal.escapes import printable, printable_lines, shell_line


class Commands(click.Group):
    """A group that turns known errors into one line, a hint and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # what its encoding lacks; stderr escapes that
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            if instead := removed.OPTIONS.get(error.option_name):
                raise click.UsageError(f"{error.option_name} was removed: {instead}", error.ctx) from None
            raise
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

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and (instead := removed.COMMANDS.get(args[0])):
            ctx.fail(f"{args[0]} was removed: {instead}")
        return super().resolve_command(ctx, args)

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


def _show(facts: Any, text: str, as_json: bool) -> None:
    with contextlib.redirect_stdout(click.get_current_context().meta.get("kvfold.stdout", sys.stdout)):
        try:
            click.echo(json.dumps(facts, indent=2) if as_json else printable_lines(text))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            raise Failure(
                f"stdout cannot be written: {error.strerror}", hint="what the command wrote to files is whole"
            ) from None


def _console(given: dict[str, Any]) -> Any:
    """Remove the options for stderr from `given`, and return the progress callback. Libraries print to stderr from here on."""
    context = click.get_current_context()
    context.meta["kvfold.stdout"] = sys.stdout
    context.with_resource(contextlib.redirect_stdout(sys.stderr))
    from convert.command.console import console

    verbose, quiet = given.pop("verbose"), given.pop("quiet")
    context.meta["kvfold.verbose"] = verbose  # shared with the group, which handles errors
    return console(verbose, quiet)


def _converted(name: str, given: dict[str, Any]) -> None:
    """Call a conversion of the API with a command's options, and print its result."""
    as_json, progress = given.pop("as_json"), _console(given)
    done = getattr(convert, name)(given.pop("model"), given.pop("output"), progress=progress, **given)
    _show(done.as_dict(), str(done), as_json)


@main.command()
@parameters.model
@parameters.output
@parameters.of(options.Gqa)
def gqa(**given: Any) -> None:
    """Convert MODEL to grouped-query attention.

    Merges its KV heads into N heads, and writes the result to OUTPUT. --dry-run says what loads it.

    Example: convert gqa --groups 8 meta-llama/Llama-2-7b-hf llama-2-7b-gqa8
    """
    _converted("gqa", given)


@main.command()
@parameters.model
@parameters.output
@parameters.of(options.Mqa)
def mqa(**given: Any) -> None:
    """Convert MODEL to multi-query attention.

    The same as gqa --groups 1.

    Example: convert mqa ./my-model my-model-mqa
    """
    _converted("mqa", given)


@main.command()
@parameters.model
@parameters.output
@parameters.of(options.Mla)
def mla(**given: Any) -> None:
    """Convert MODEL to multi-head latent attention.

    Factors its keys and values through a latent of rank R, and keeps a RoPE key of P dims. Writes the result to OUTPUT as
    DeepSeek-V3 without experts, which stock transformers loads, and caches at that size. A MODEL that kvfold made so gets a
    smaller latent.

    Example: convert mla --kv-lora-rank 448 --qk-rope-head-dim 128 --dtype bfloat16 meta-llama/Llama-2-7b-hf llama-2-7b-mla
    """
    _converted("mla", given)


@main.command()
@click.argument("converted")
@parameters.output
@parameters.of(options.Heal)
def heal(as_json: bool, **given: Any) -> None:
    """Train CONVERTED until it predicts as its source does, and write the result to OUTPUT.

    Distils the source, the teacher, into CONVERTED: every token's predictions are compared. CONVERTED stays the class that it
    is, with the same cache. Without --text, the teacher writes the text. A part of it is held out; it chooses the learning rate
    and the weights.

    Example: convert heal my-model-mla my-model-mla-healed --text train.txt --tokens 20M --evaluate held-out.txt
    """
    progress = _console(given)
    done = convert.heal(given.pop("converted"), given.pop("output"), progress=progress, **given)
    if is_first():  # of several processes, one reports
        _show(done.as_dict(), str(done), as_json)


@main.command(name="eval")
@parameters.models
@parameters.of(measured.Evaluate)
def evaluate(models: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Measure perplexity and KV bytes per token of MODELs.

    The first MODEL is the source. The others are compared with it: loss in nats, KL and top-1 agreement.

    Example: convert eval ./my-model my-model-gqa8 --text held-out.txt --output report
    """
    from eval import evaluate
    from eval.report import quality as report

    quiet, output, progress = given["quiet"], given["output"], _console(given)
    found = evaluate(models, progress=progress, **given)
    _show(found, report.to_markdown(found), as_json)
    _written(output, "report.html", quiet)


@main.command()
@parameters.models
@parameters.of(measured.Bench)
def bench(models: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Measure speed and memory of MODELs side by side.

    Time of a prefill and of a decode step, bytes of the cache and, on a GPU, peak memory, on random tokens. MLA models decode
    over their latent, GQA models packed.

    Example: convert bench ./my-model my-model-mla --context 512,2048,8192 --output speed
    """
    from eval import bench
    from eval.speed.bench import to_markdown

    quiet, output, progress = given["quiet"], given["output"], _console(given)
    found = bench(models, progress=progress, **given)
    _show(found, to_markdown(found), as_json)
    _written(output, "bench.json", quiet)


@main.command(name="sweep")
@parameters.model
@click.argument("output", metavar="DIR", type=parameters.Directory(path_type=Path))
@parameters.of(options.Sweep)
def sweep_command(model: str, output: Path, as_json: bool, **given: Any) -> None:
    """Convert MODEL to many targets with many methods, and compare them.

    Collects the statistics of the text once for all of them, and once for pca. DIR/report plots perplexity against KV bytes
    per token. Without --groups and --mla, the targets are a half, a quarter, … of MODEL's KV heads, and MLA at 25 % and
    12.5 % of its cache. Text goes to the methods that use it; --refit and --refine go to aligned and weighted only.

    Example: convert sweep ./my-model sweep --groups 8,4,1 --mla 448+64 --text calibrate.txt --evaluate held-out.txt
    """
    quiet, progress = given["quiet"], _console(given)

    def made(plan: Any) -> None:
        if not quiet:
            click.echo(f"made: {printable(str(plan.output.path))} ({plan.target.spec.kind})", err=True)

    done = convert.sweep(model, output, progress=progress, made=made, **given)
    _show(done.as_dict(), str(done), as_json)
    if not given["dry_run"]:
        _written(done.report_directory, "report.html", quiet)


@main.command()
@parameters.model
@parameters.of(options.Plan)
def plan(model: str, as_json: bool, **given: Any) -> None:
    """Show the KV memory of each target, and the GPUs that it fits on.

    Reads only the config of MODEL.

    Example: convert plan meta-llama/Llama-2-7b-hf --batch 16 --context 4096 --gpu A6000=48
    """
    _console(given)
    facts = convert.plan(model, **given)
    _show(facts, str(facts), as_json)


@main.command()
@parameters.model
@parameters.of(options.Inspect)
def inspect(model: str, as_json: bool, **given: Any) -> None:
    """Show what MODEL is and what it can become.

    Heads, RoPE, biases, family, output classes and cache. Reads only the config.

    Example: convert inspect Qwen/Qwen2.5-7B@main
    """
    _console(given)
    facts = convert.inspect(model, **given)
    _show(facts, str(facts), as_json)


@main.command()
@parameters.output
@parameters.plain
def refresh(output: Path, as_json: bool, **given: Any) -> None:
    """Renew the code that lies beside the weights of OUTPUT.

    OUTPUT is a result of kvfold's class: with modeling_kvfold.py in its directory, which runs where kvfold is not installed.
    A release of transformers may need newer code. Weights and all else stay as they are.

    Example: convert refresh my-model-mla
    """
    _console(given)
    facts = convert.refresh(output)
    _show(facts, str(facts), as_json)


@main.command()
@parameters.plain
def families(as_json: bool, **given: Any) -> None:
    """List the families that can be converted.

    For each target, shows the class that holds the result.

    Example: convert families
    """
    from convert.planning.describe import support, support_text

    rows = support()
    _show(rows, support_text(rows), as_json)


@main.command(context_settings={"allow_interspersed_args": False})
@click.argument("result", type=click.Path(exists=True, path_type=Path))
@parameters.output
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
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


@main.command()
@click.option(
    "--output",
    type=parameters.Directory(file_okay=False, path_type=Path),
    default="kvfold-demo",
    show_default=True,
    help="Directory for the results and the report.",
)
@parameters.plain
def demo(output: Path, as_json: bool, **given: Any) -> None:
    """Convert and evaluate the bundled model.

    Converts a small MHA checkpoint to GQA, MQA and MLA, evaluates the results and writes a report. Needs no network, and
    takes about two minutes.

    Example: convert demo
    """
    from convert.demo.showcase import showcase
    from eval.report import quality as report

    found, page = showcase(output, _console(given))
    _show(found, report.to_markdown(found), as_json)
    click.echo(f"report: {page}", err=True)


def _written(directory: Path | None, page: str, quiet: bool) -> None:
    """Say where a report is."""
    if directory is not None and not quiet:
        click.echo(f"report: {printable(str(directory / page))}", err=True)


if __name__ == "__main__":
    main(prog_name="convert")
