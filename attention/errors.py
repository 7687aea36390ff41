"""The errors that end a command. Each has a one-line message for the user and, where one is known, the next step as a hint."""

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of which torch's errors are full


class KvfoldError(Exception):
    """An error for the user: the message names the object, the values and the rule; `hint` says what to do next.

    Names and paths in it may come from anywhere, so line breaks, terminal escapes and bidi controls are escaped.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(_visible(message))
        self.hint = hint and _visible(hint)


class Refusal(KvfoldError, ValueError):
    """The arguments or the config are wrong; no weights were read and nothing was written (exit code 2)."""

    exit_code = 2


class Failure(KvfoldError, RuntimeError):
    """Something is wrong with the weights, the text or the machine (exit code 1)."""


class Interrupted(KvfoldError):
    """The user interrupted the command (exit code 130)."""

    exit_code = 130


class NotPublished(KvfoldError):
    """The work was done and is kept, but its result is too bad to be published without being asked for (exit code 3)."""

    exit_code = 3


def one_line(error: Exception, most: int = 200) -> str:
    """What an error of others says, in one line of at most so many characters."""
    return " ".join(_COLOURS.sub("", str(error)).split())[:most]


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
