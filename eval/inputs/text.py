"""Texts for evaluation and calibration: a file or a named dataset, encoded once, with a hash of its tokens.

Perplexity on the text that a model was calibrated on is too low, so the overlap of texts is measured.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attention.errors import Failure, Refusal, one_line
from attention.spread import evenly_spread

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvfold")
OWN_TEXT = Path("calibration", "own-text.safetensors")  # in a checkpoint: what its source wrote to calibrate on
OneText = str | Path | Sequence[str]  # a file, or strings
TextGiven = OneText | Sequence[str | Path]  # with a path among them: several texts
SELF = "self"  # what a model writes itself, as the name of a text; a file of that name is ./self

_MOST, _MOST_PIPED = 2**32, 2**24  # bytes of a file, and of a pipe
WARN_ABOVE = 0.01  # overlap: texts of one language share some runs
_RUN = 32  # tokens; different texts hardly share a run of this length
_MARK = "\ufeff"  # before a text, by which some editors tell its encoding

_PIECE = 2**20  # characters that are encoded at a time
_OVERLAP = 2**13  # characters that two pieces share
_SURE = 0.75  # share of these; in the others, before a cut, tokens of both may be wrong
_ALIKE = 32  # tokens in a row that are the same in both
_UNSURE = 256  # tokens before a cut that do not count
_CHARACTERS = 8  # per token, as a first guess


@dataclass(frozen=True)
class Text:
    """A named piece of plain text.

    Attributes:
        name: For people.
        text: All of it.
    """

    name: str
    text: str

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise Failure(f"{self.name} is empty", hint="give a text of some thousand words")


@dataclass(frozen=True)
class Tokens:
    """A text encoded by one tokenizer.

    Attributes:
        name: The name of the text.
        ids: `[tokens]`, int64, without special tokens: the whole text, its start, or blocks of it (`spread`).
        text_bytes: UTF-8 bytes of the whole text.
        per_byte: Tokens per byte of the encoded part.
        bos: The id of the begin-of-sequence token if the tokenizer adds one to a text, else None.
    """

    name: str
    ids: torch.Tensor
    text_bytes: int
    per_byte: float
    bos: int | None

    @property
    def hash(self) -> str:
        """`sha256:` and the hex digest of the ids as little-endian int32."""
        return "sha256:" + hashlib.sha256(self.ids.numpy().astype("<i4").tobytes()).hexdigest()

    def blocks(self, context: int) -> torch.Tensor:
        """`[n, context]`, as many whole blocks as there are."""
        return self.ids[: len(self.ids) // context * context].view(-1, context)

    def spread(self, count: int, context: int) -> Tokens:
        """At most `count` tokens in whole blocks of `context`, spread evenly over the tokens within reach.

        Neighbouring blocks are about the same things, so blocks from all over a text show more of what a model does.
        """
        blocks, taken = self._spread(count, context)
        return replace(self, ids=blocks[taken].flatten())

    def beside(self, count: int, context: int, wanted: int) -> Tokens | None:
        """About `wanted` tokens, at least a block, that `spread` does not take; None if it takes all."""
        blocks, taken = self._spread(count, context)
        if not (others := sorted(set(range(len(blocks))) - set(taken))):
            return None
        chosen = evenly_spread(min(len(others), max(1, wanted // context)), len(others))
        return replace(self, ids=blocks[[others[index] for index in chosen]].flatten())

    def _spread(self, count: int, context: int) -> tuple[torch.Tensor, list[int]]:
        """All blocks within reach, `[n, context]`, and the indices of those that `spread` takes."""
        blocks = replace(self, ids=self.ids[: reach(count)]).blocks(context)
        return blocks, evenly_spread(min(count // context, len(blocks)), len(blocks))


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Parts of several texts as one; a single part stays as it is."""
    import torch

    if len(parts) == 1:
        return parts[0]
    ids, size = torch.cat([part.ids for part in parts]), sum(part.text_bytes for part in parts)
    return Tokens(" and ".join(part.name for part in parts), ids, size, len(ids) / max(1, size), None)


# name → (Hub id, configuration, column, separator of its rows), as in the perplexity tables of papers.
_DATASETS = {"wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "text", "\n\n")}
DATASETS = tuple(_DATASETS)

_REACH, HEALED_ON = 2**19, 2**21  # tokens of a text to calibrate and to heal on: encoding takes time and memory


def reach(count: int) -> int:
    """Tokens of a text, from its start, that blocks with `count` tokens in all may come from."""
    return max(_REACH, count)


def read_file(path: Path) -> Text:
    """A UTF-8 text file, as it is but for a byte order mark: line ends stay.

    Raises:
        Failure: The file cannot be read, is not UTF-8, is empty, or is larger than any text that is needed.
    """
    try:
        regular = path.is_file()
        size = path.stat().st_size if regular else _MOST_PIPED + 1  # a pipe or a device may have no end
        with path.open("rb") as file:
            data = file.read(size) if size <= _MOST else b""
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from None
    if size > _MOST or (not regular and len(data) == size):
        most, hint = (_MOST, "split it") if regular else (_MOST_PIPED, "write what is wanted of it into a file: head -c 16M")
        raise Failure(f"{path} has more than {most:,} bytes", hint=hint)
    reason, place = "a NUL", data.find(b"\0")  # UTF-16 and binary files may pass as UTF-8
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        reason, place = error.reason, error.start
    if place >= 0:
        raise Failure(f"{path} is not UTF-8 text: {reason} at byte {place}", hint="convert it: iconv -f ENCODING -t UTF-8")
    if text.startswith(_MARK):
        _log.warning("%s begins with a byte order mark, which is left out", path.name)
    if "\r\n" in text[:_PIECE]:
        _log.warning("%s has the line ends of Windows (CR LF), which stay: models read few texts like that", path.name)
    return Text(path.name, text.removeprefix(_MARK))


def text_of(given: OneText) -> Text:
    """A text from the path of a UTF-8 file, or from a list of strings.

    Raises:
        Failure: The text cannot be read, or is empty.
    """
    if isinstance(given, str | Path):
        return read_file(Path(given))
    strings = list(given)
    return Text(f"{len(strings)} strings", "\n\n".join(strings))


def load_dataset(name: str, split: Literal["test", "train"] = "test") -> Text:
    """A named dataset (`DATASETS`), through the `datasets` package: "test" to evaluate on, "train" to calibrate on.

    Raises:
        Refusal: There is no dataset of that name.
        Failure: The package is missing, or the dataset cannot be loaded.
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
    except Exception as error:  # any error of the network, the Hub or the cache
        said = f"cannot load the dataset {repository}: {one_line(error)}"
        raise Failure(said, hint="download it once, or use --text FILE") from None
    return Text(f"{name} ({configuration}, {split})", joint.join(rows))


def tokenize(text: Text, tokenizer: Any, first: int | None = None) -> Tokens:
    """Encode a text, as if as a whole; the tokenizer says whether BOS precedes it.

    Args:
        text: The text to encode.
        tokenizer: A tokenizer of transformers.
        first: How many tokens to keep, from the start; None for all. No more of the text is read than these need.

    Raises:
        Failure: The text has fewer than two tokens.
    """
    ids, size = encoded(text.text, tokenizer, first)
    if len(ids) < 2:
        raise Failure(f"{text.name} has {len(ids)} token(s), and it takes at least 2 to predict one", hint="give a longer text")
    whole = len(text.text.encode())
    return Tokens(text.name, ids[:first], whole, len(ids) / size, bos_before_texts(tokenizer))


def encoded(text: str, tokenizer: Any, first: int | None = None) -> tuple[torch.Tensor, int]:
    """The ids of a text, int64, as of the text as a whole, and the UTF-8 bytes of what was encoded.

    Encoding takes about a hundred times the text's size, so it goes piece by piece. A cut changes the tokens around it. So
    pieces overlap, and the second one takes over where both have had the same tokens for a while: from there on, a tokenizer
    gives what it would give without the cut.

    Args:
        text: The text.
        tokenizer: A tokenizer of transformers. One that does not say where its tokens begin gets all at once; for some tokens,
            twice as much as before until it is enough.
        first: How many tokens are wanted, from the start; more may come. None for all.
    """
    import torch

    fast, needed = getattr(tokenizer, "is_fast", False), None if first is None else first + _UNSURE
    start, end = 0, _PIECE if fast else len(text)
    if needed is not None:
        end = min(_PIECE, _CHARACTERS * needed)
    done, count, skipped = list[torch.Tensor](), 0, 0  # `skipped` tokens of this piece are done already
    ids, places = _encoded(text[start:end], tokenizer, fast)
    while end < len(text) and (needed is None or count + len(ids) - skipped < needed):
        if not fast:
            end *= 2
            ids, places = _encoded(text[:end], tokenizer, fast)
            continue
        next_start, next_end = max(start, end - _OVERLAP), end + _PIECE
        after, after_places = _encoded(text[next_start:next_end], tokenizer, fast)
        sure = end - next_start - round((1 - _SURE) * _OVERLAP)
        here = [start + place - next_start for place in places[skipped:]]
        joint = _joint(ids[skipped:], here, after, after_places, sure)
        if joint is None:  # begin this piece again, with both in it
            ids, places = _encoded(text[start:next_end], tokenizer, fast)
        else:
            before, behind = joint
            done.append(torch.tensor(ids[skipped : skipped + before]))
            start, ids, places, skipped, count = next_start, after, after_places, behind, count + before
        end = next_end
    return torch.cat([*done, torch.tensor(ids[skipped:], dtype=torch.int64)]), len(text[:end].encode())


def _encoded(text: str, tokenizer: Any, fast: bool) -> tuple[list[int], list[int]]:
    """The ids, and where each begins in the text if the tokenizer says so."""
    offsets = {"return_offsets_mapping": True} if fast else {}
    found = tokenizer(text, add_special_tokens=False, verbose=False, **offsets)
    return found["input_ids"], [start for start, _ in found.get("offset_mapping", ())]


def _joint(ids: list[int], starts: list[int], after: list[int], after_starts: list[int], sure: int) -> tuple[int, int] | None:
    """Behind how many tokens of each the second piece takes over; None where they never agree for long enough.

    `ids` of the first piece begin at `starts`, and `after` of the second at `after_starts`, both counted from the start of the
    second; `sure` characters of what both share are far enough from the end.
    """
    places = list(zip(starts, ids, strict=True))
    others = [place for place in zip(after_starts, after, strict=True) if place[0] < sure]
    indices = {place: index for index, place in enumerate(others)}
    for i, place in enumerate(places):
        if (j := indices.get(place)) is None:
            continue
        run = others[j : j + _ALIKE]
        if len(run) == _ALIKE and run == places[i : i + _ALIKE]:
            return i + _ALIKE, j + _ALIKE
    return None


def bos_before_texts(tokenizer: Any) -> int | None:
    """The id of BOS if the tokenizer puts it before a text; some know a BOS that they put nowhere."""
    bos: int | None = tokenizer.bos_token_id
    return bos if tokenizer("a")["input_ids"][:1] == [bos] else None


def overlap(evaluated: torch.Tensor, seen: torch.Tensor) -> float:
    """The share of `evaluated` ids `[n]`, cut into runs of 32 tokens, that occurs anywhere in `seen` ids `[m]`.

    A text of fewer tokens is one run. Memory grows with n only.
    """
    run = min(_RUN, len(evaluated))
    runs = list(_runs(evaluated, run, run))
    wanted = set(runs)
    found = {part for part in _runs(seen, run, 1) if part in wanted}
    return sum(part in found for part in runs) / len(runs)


def warn_of_overlap(evaluated: Tokens, texts: Iterable[Tokens], what: str) -> None:
    """Warn, before the work, of text that is to be evaluated on and is also to be learned from.

    Args:
        evaluated: What perplexity will be measured on.
        texts: What is learned from.
        what: What the texts are for: "calibration" or "training".
    """
    for seen in texts:
        if (share := overlap(evaluated.ids, seen.ids)) > WARN_ABOVE:
            _log.warning(
                "%s shares %.0f%% of its runs with the %s text %s: its perplexity will be flattered",
                evaluated.name, 100 * share, what, seen.name,
            )  # fmt: skip


def _runs(ids: torch.Tensor, length: int, stride: int) -> Iterator[bytes]:
    raw, size = ids.numpy().astype("<i4").tobytes(), 4
    for start in range(0, len(ids) - length + 1, stride):
        yield raw[start * size : (start + length) * size]
