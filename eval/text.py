"""Text to evaluate on: a file or a named dataset, encoded once, with a hash of its tokens. It knows no model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attention.errors import Failure, Refusal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Text:
    """A named piece of plain text."""

    name: str
    text: str

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise Failure(f"{self.name} is empty", hint="give a text of some thousand words")


@dataclass(frozen=True)
class Tokens:
    """A text under one tokenizer.

    Attributes:
        name: The text's.
        ids: `[tokens]`, int64, without special tokens: the text, or as much of its start as is evaluated.
        text_bytes: UTF-8 bytes of the whole text.
        per_byte: Tokens per byte of what was encoded.
        bos: The id of the begin-of-sequence token if the tokenizer puts one before a text, else None.
    """

    name: str
    ids: torch.Tensor
    text_bytes: int
    per_byte: float
    bos: int | None

    @property
    def hash(self) -> str:
        """`sha256:` and the hex digest over the ids as little-endian int32."""
        return "sha256:" + hashlib.sha256(self.ids.numpy().astype("<i4").tobytes()).hexdigest()


# name → (Hub id, configuration, column, what joins its rows), as the perplexity tables of papers use it.
_DATASETS = {"wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "text", "\n\n")}
DATASETS = tuple(_DATASETS)

_CHARACTERS, _UNSURE = 8, 256  # characters of a token, at first; tokens before a cut


def read_file(path: Path) -> Text:
    """A UTF-8 text file.

    Raises:
        Failure: It cannot be read, is not UTF-8, or is empty.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:  # line ends as they are
            return Text(path.name, file.read())
    except UnicodeDecodeError as error:
        raise Failure(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", hint="convert it: iconv -t UTF-8"
        ) from None
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from None


def text_of(given: str | Path | Sequence[str]) -> Text:
    """A text as a program gives it: the path of a UTF-8 file, or a list of strings.

    Raises:
        Failure: It cannot be read, or is empty.
    """
    if isinstance(given, str | Path):
        return read_file(Path(given))
    strings = list(given)
    return Text(f"{len(strings)} strings", "\n\n".join(strings))


def load_dataset(name: str, split: Literal["test", "train"] = "test") -> Text:
    """A named dataset (`DATASETS`), through the `datasets` package: "test" to evaluate on, "train" to calibrate on.

    Raises:
        Refusal: No such name.
        Failure: The package is missing, or the dataset cannot be had.
    """
    if name not in _DATASETS:
        raise Refusal(f"no dataset {name!r} (choose {', '.join(DATASETS)})", hint="any other text: --text FILE")
    try:
        import datasets
    except ImportError:
        raise Failure("--dataset needs the package datasets", hint="pip install 'kvfold[data]', or use --text FILE") from None
    repository, configuration, column, joint = _DATASETS[name]
    try:
        rows = datasets.load_dataset(repository, configuration, split=split)[column]
    except Exception as error:  # whatever the network, the Hub or the cache raises
        reason = " ".join(str(error).split())[:200]
        raise Failure(f"cannot load the dataset {repository}: {reason}", hint="download it once, or use --text FILE") from None
    return Text(f"{name} ({configuration}, {split})", joint.join(rows))


def tokenize(text: Text, tokenizer: Any, first: int | None = None) -> Tokens:
    """Encode a text as one; whether a BOS belongs before it is asked of the tokenizer.

    Args:
        text: What is encoded.
        tokenizer: Of transformers.
        first: How many tokens are wanted, from the start; None for all. A text takes a hundred times its size to encode.

    Raises:
        Failure: It is shorter than two tokens.
    """
    import torch

    ids, encoded = _start(text.text, tokenizer, first)
    if len(ids) < 2:
        raise Failure(f"{text.name} has {len(ids)} token(s), and it takes at least 2 to predict one", hint="give a longer text")
    opening = tokenizer("a")["input_ids"][:1]
    bos = tokenizer.bos_token_id if opening == [tokenizer.bos_token_id] else None
    per_byte = len(ids) / len(encoded.encode())
    return Tokens(text.name, torch.tensor(ids[:first]), len(text.text.encode()), per_byte, bos)


def _start(text: str, tokenizer: Any, first: int | None) -> tuple[list[int], str]:
    """The ids of at least the first tokens, and what was encoded: all of the text, or well beyond them.

    A cut can change the tokens before it, so that those next to it are not counted.
    """
    end = len(text) if first is None else _CHARACTERS * (first + _UNSURE)
    while True:
        ids = tokenizer(text[:end], add_special_tokens=False, verbose=False)["input_ids"]
        if first is None or end >= len(text) or len(ids) >= first + _UNSURE:
            return ids, text[:end]
        end *= 2
