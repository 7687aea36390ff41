"""The texts that a command takes: files, a data set, strings of a program, what the model writes itself; each with a share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention.errors import Failure, Refusal
from eval.inputs.text import MOST_SHARE, SELF, OneText, Text, TextGiven, load_dataset, read_file, text_of

if TYPE_CHECKING:
    import torch

    from eval.inputs.source import Source


@dataclass(frozen=True)
class TextSource:
    """One text, as the user names it.

    Attributes:
        kind: "self", "text" (a file), "dataset" or "strings".
        name: SELF, the file's path, the data set's name, or how many strings.
        share: Of the tokens, relative to the shares of the other texts.
        strings: Of a program.
        written: The file of what the model wrote for an earlier conversion, which is taken again.
    """

    kind: str
    name: str
    share: float = 1.0
    strings: tuple[str, ...] = field(default=(), repr=False, compare=False)
    written: Path | None = None

    @property
    def own(self) -> bool:
        """Whether the model writes it."""
        return self.kind == SELF

    @property
    def label(self) -> str:
        """For people."""
        return {SELF: "its own text", "strings": f"{self.name} strings"}.get(self.kind, self.name)

    def read(self) -> Text:
        """The text of a file, a data set or strings.

        Raises:
            Refusal: There is no data set of that name.
            Failure: It cannot be read, or is empty.
        """
        if self.kind == "text":
            return read_file(Path(self.name))
        return text_of(self.strings) if self.kind == "strings" else load_dataset(self.name, "train")


Texts = tuple[TextSource, ...]
OWN = TextSource(SELF, SELF)
DEFAULT: Texts = (OWN,)  # where none is given


def texts_of(text: TextGiven | None, dataset: str | None) -> Texts:
    """The texts that a user gives, in order; those of a data set come last, with a share of 1.

    Raises:
        Refusal: A text is given twice, or a share is not a number above 0 and at most `MOST_SHARE`.
    """
    given = text if isinstance(text, Mapping) else {}
    found = [_named(name, share) for name, share in given.items()] if given else [] if text is None else [_one(text)]
    if isinstance(text, Mapping) and not given:
        raise Refusal("there is no text among those given", hint="leave it out, or give a file")
    if dataset is not None:
        found.append(TextSource("dataset", dataset))
    names = [one.name if one.own or one.kind != "text" else str(Path(one.name).resolve()) for one in found]
    if twice := [one.name for i, one in enumerate(found) if names[i] in names[:i]]:
        raise Refusal(f"the text {twice[0]} is given twice", hint="give it once, with a larger share")
    for one in found:
        if not (isinstance(one.share, int | float) and 0 < one.share <= MOST_SHARE):
            raise Refusal(f"the share of {one.label} is {one.share}; it must be a number above 0 and at most {MOST_SHARE:g}")
    return tuple(found)


def _one(text: OneText | Mapping[str | Path, float]) -> TextSource:
    if isinstance(text, str | Path):
        return _named(text, 1.0)
    strings = tuple(map(str, text))
    return TextSource("strings", str(len(strings)), strings=strings)


def _named(name: str | Path, share: float) -> TextSource:
    if isinstance(name, str) and name == SELF:
        return TextSource(SELF, SELF, share)
    if Path(name).suffix == ".safetensors":
        return TextSource(SELF, SELF, share, written=Path(name))
    return TextSource("text", str(name), share)


def as_options(texts: Texts, absolute: bool = False) -> dict[str, Any]:
    """The texts as options of the command line: `{"text": …, "text_shares": …, "dataset": …}`; strings by their number.

    Args:
        texts: From `texts_of`.
        absolute: Whether paths are to hold in any directory.
    """
    named = [one for one in texts if one.kind in (SELF, "text")]
    paths = [_path(one, absolute) for one in named]
    numbers = ",".join(repr(float(one.share)).removesuffix(".0") for one in named)  # all digits, so that a recipe repeats it
    shares = {"text_shares": numbers} if len({one.share for one in texts}) > 1 else {}
    files = {"text": paths[0] if len(paths) == 1 else paths} if paths else {}
    return files | shares | {one.kind: one.name for one in texts if one.kind in ("strings", "dataset")}


def _path(one: TextSource, absolute: bool) -> str:
    if one.own:
        return SELF
    if absolute:
        return str(Path(one.name).resolve())
    return f"./{one.name}" if one.name == SELF else one.name


def names_of(texts: Texts, own: str | None = None) -> str:
    """For people; `own` is what to call the model's own."""
    return " and ".join(own if own and one.own else one.label for one in texts)


def shared_out(blocks: int, texts: Texts) -> list[int]:
    """How many of so many blocks each text gives, by its share, but at least one. What is left over goes to the first ones.

    Raises:
        Refusal: There are fewer blocks than texts.
    """
    if blocks < len(texts):
        raise Refusal(
            f"{blocks} blocks of calibration text cannot come from {len(texts)} texts",
            hint="raise --calibration-tokens, or lower --calibration-context",
        )
    whole, counts, left = sum(one.share for one in texts), list[int](), blocks
    for index, one in enumerate(texts):
        others = len(texts) - index - 1
        counts.append(min(left - others, max(1, math.ceil(blocks * one.share / whole - 1e-9))) if others else left)
        left -= counts[-1]
    return counts


def written_before(source: Source, file: Path, rows: int | None, context: int) -> torch.Tensor:
    """The text that a model wrote for an earlier run, `[rows, context]`; all of it where `rows` is None.

    Raises:
        Failure: The file cannot be read, or does not hold such rows.
    """
    import torch

    from eval.inputs.sealed import unsealed_tensors

    found = unsealed_tensors(file)
    if found is None or "ids" not in found[0]:
        raise Failure(
            f"{file} is not there, damaged, or not what a model wrote for an earlier run",
            hint="give --text self, and the model writes again",
        )
    ids = found[0]["ids"]
    fits = ids.dtype == torch.int32 and ids.ndim == 2 and ids.shape[1] == context and len(ids) >= (rows or 1)
    if not fits or not 0 <= int(ids.min()) <= int(ids.max()) < source.vocabulary:
        raise Failure(
            f"{file} holds {ids.dtype} of shape {list(ids.shape)}, where {rows or 'any'} rows of {context} tokens below "
            f"{source.vocabulary} are needed",
            hint="give --text self, and the model writes again",
        )
    return ids[:rows].long()
