"""How text that comes from users and files is written: to a terminal, into Markdown and into a shell command.

Names of models, files and directories may hold anything: line breaks, terminal escapes, characters that turn the direction
of text, Markdown and HTML.
"""

from __future__ import annotations

import re
import shlex

# What opens or closes markup, wherever it stands; `_`, `#` and `&` only where they can.
_MARKUP = re.compile(r"[\\`*\[\]<>|~$]|(?<![^\W_])_|_(?![^\W_])|(?<!\S)#|&(?=#?\w+;)")


def printable(text: str) -> str:
    """`text` in one line, with a space for each line break, control character, bidi control and half of a surrogate pair."""
    return "".join(c if c.isprintable() else " " for c in text)


def printable_lines(text: str) -> str:
    """The same for text of several lines, whose line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def markdown(text: str) -> str:
    """`text` as one line of Markdown, or a cell of its tables, that shows it as it is."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", printable(text))


def shell_line(words: list[str]) -> str:
    r"""A command that a shell reads back as `words`, in one printable line.

    What is not printable is written as bash, zsh and ksh read it, byte by byte: `$'two\x0alines'`.
    """
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_ansi_c, word))}'" for word in words)


def _ansi_c(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    if character.isprintable():
        return character
    # A byte of a path that is not UTF-8 comes as half of a surrogate pair.
    errors = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", errors))
