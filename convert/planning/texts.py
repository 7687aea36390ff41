"""The texts that a command takes: files, a data set, strings of a program, what the model writes itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention.errors import Failure, Refusal
from eval.inputs.text import SELF, Text, TextGiven, Tokens, load_dataset, read_file, text_of

if TYPE_CHECKING:
    import torch

    from eval.inputs.source import Source


@dataclass(frozen=True)
class TextSource:
    """One text, as the user names it.

    Attributes:
        kind: "self", "text" (a file), "dataset" or "strings".
        name: SELF, the file's path, the data set's name, or how many strings.
        strings: Of a program.
        written: The file of what the model wrote for an earlier conversion, which is taken again.
    """

    kind: str
    name: str
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
MOST_WRITTEN = 2**20  # tokens to train on; more trains on them again, because writing takes at least as long as training


def texts_of(text: TextGiven | None, dataset: str | None) -> Texts:
    """The texts that a user gives, in order; that of a data set comes last.

    Raises:
        Refusal: A text is given twice.
    """
    found = list[TextSource]()
    if isinstance(text, str | Path):
        found.append(_named(text))
    elif text is not None and any(isinstance(one, Path) for one in text):
        found += map(_named, text)
    elif text is not None:
        found.append(TextSource("strings", str(len(text)), tuple(map(str, text))))
    if dataset is not None:
        found.append(TextSource("dataset", dataset))
    names = [one.name if one.own or one.kind != "text" else str(Path(one.name).resolve()) for one in found]
    if twice := [one.name for i, one in enumerate(found) if names[i] in names[:i]]:
        raise Refusal(f"the text {twice[0]} is given twice", hint="give it once")
    return tuple(found)


def _named(name: str | Path) -> TextSource:
    if isinstance(name, str) and name == SELF:
        return OWN
    if Path(name).suffix == ".safetensors":
        return TextSource(SELF, SELF, written=Path(name))
    return TextSource("text", str(name))


def as_options(texts: Texts, absolute: bool = False) -> dict[str, Any]:
    """The texts as options of the command line: `{"text": …, "dataset": …}`; strings by their number.

    Args:
        texts: From `texts_of`.
        absolute: Whether paths are to hold in any directory.
    """
    paths = [_path(one, absolute) for one in texts if one.kind in (SELF, "text")]
    files = {"text": paths[0] if len(paths) == 1 else paths} if paths else {}
    return files | {one.kind: one.name for one in texts if one.kind in ("strings", "dataset")}


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
    """How many of so many blocks each text gives, at least one: equally many, and fewer of the last ones.

    Raises:
        Refusal: There are fewer blocks than texts.
    """
    if blocks < len(texts):
        raise Refusal(
            f"{blocks} blocks of calibration text cannot come from {len(texts)} texts",
            hint="raise --calibration-tokens, or lower --calibration-context",
        )
    each, counts, left = -(-blocks // len(texts)), list[int](), blocks
    for others in reversed(range(len(texts))):
        counts.append(min(left - others, each))
        left -= counts[-1]
    return counts


def own_tokens(name: str, ids: torch.Tensor | None) -> Tokens:
    """What a model wrote itself, `[rows, context]`; no tokens where it has still to write."""
    import torch

    return Tokens(name, torch.empty(0, dtype=torch.int64) if ids is None else ids.flatten(), 0, 0.0, None)


def written_before(source: Source, file: Path, rows: int | None, context: int) -> torch.Tensor:
    """The text that a model wrote for an earlier run, `[n, context]`: the whole file, of `rows` rows or more, if not None.

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
    return ids.long()
