"""Model cards: README.md with the front matter that the Hub reads, rendered from the provenance of a checkpoint."""

import functools
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from eval.terminal.text import markdown, shell_line

# Entries of conversion.json: the types by their keys, and the keys of an engine.
_STATED: dict[str, dict[str, Any]] = {
    "loading": {"model_type": str, "needs_code": bool, "opened_by": str, "arguments": dict, "engines": list, "remarks": list},
    "metadata": dict.fromkeys(("base_model", "library_name", "pipeline_tag", "license"), str | list | None) | {"tags": list},
}
_ENGINE = {"name", "objection", "command"}


def render(template: str, metadata: Mapping[str, Any], **data: Any) -> str:
    """The text of README.md.

    Args:
        template: The name of a template beside this file.
        metadata: From `metadata_of`.
        data: That the template names.
    """
    from huggingface_hub import ModelCardData

    front_matter = f"---\n{ModelCardData(**metadata).to_yaml()}\n---\n"
    return str(_environment().get_template(template).render(front_matter=front_matter, **data))


@functools.cache  # to compile a template takes longer than to convert a tiny model
def _environment() -> Any:
    import jinja2

    read = jinja2.FunctionLoader(lambda name: files("convert.output").joinpath(name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=read, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["markdown"] = lambda value: markdown(str(value))
    return environment


def metadata_of(base: str | None, tags: list[str], directory: Path) -> dict[str, Any]:
    """What the Hub shows of a checkpoint, as conversion.json keeps it.

    Args:
        base: The Hub's name of the source; None if it has none.
        tags: Besides "kvfold".
        directory: The source's, whose licence it inherits.
    """
    return {
        "base_model": base,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["kvfold", *tags],
        "license": inherited_licence(directory),
    }


def inherited_licence(directory: Path) -> Any:
    """The name, or the list of names, that the source's own card gives; None if it gives anything else."""
    from huggingface_hub import ModelCard

    card = directory / "README.md"
    if not card.is_file():
        return None
    try:
        licence = ModelCard.load(card, ignore_metadata_errors=True).data.get("license")
    except Exception:  # anyone may have written it, and YAML's constructors raise whatever Python does
        return None
    names = licence if isinstance(licence, list) else [licence]
    return licence if all(isinstance(name, str) and name.isprintable() for name in names) else None


def stated(provenance: Mapping[str, Any], entry: str) -> dict[str, Any] | None:
    """What conversion.json says of "loading", or to the Hub ("metadata"); None if it is not as conversions write it."""
    found, kinds = provenance.get(entry), _STATED[entry]
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        return None
    if not all(isinstance(found[key], kind) for key, kind in kinds.items()):
        return None
    named = all(isinstance(engine, dict) and engine.keys() == _ENGINE for engine in found.get("engines", []))
    return found if named else None


def command_line(command: str, model: str, options: Mapping[str, Any]) -> str:
    """A command as a person types it in a shell, with OUTPUT in place of a path.

    Args:
        command: Its name.
        model: The checkpoint that it reads.
        options: By their names in a recipe. Paths are as the user gave them: absolute ones are of no use on another machine.
    """
    shown = dict(options)
    if shown.pop("strings", None):
        shown["text"] = "TEXT"  # a program's strings are not in a file
    flags = list[str]()
    for name, value in ((name.replace("_", "-"), value) for name, value in shown.items()):
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [part for one in (value if isinstance(value, list) else [value]) for part in (f"--{name}", str(one))]
    return shell_line(["convert", command, f"./{model}" if model.startswith("-") else model, "OUTPUT", *flags])
