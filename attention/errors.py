"""The ways in which a command ends early. Each carries one line for the user and, where there is one, the next step."""


class KvfoldError(Exception):
    """An error meant for the user's eyes: what, the values, the rule; `hint` says what to do next.

    Names and paths in it may come from anywhere: line breaks, terminal escapes and bidi controls are shown escaped.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(_visible(message))
        self.hint = hint and _visible(hint)


class Refusal(KvfoldError, ValueError):
    """Wrong as seen from the arguments and the config alone: nothing was read, nothing was written (exit code 2)."""

    exit_code = 2


class Failure(KvfoldError, RuntimeError):
    """Failed on weights, text or machine (exit code 1)."""


class Interrupted(KvfoldError):
    """The user stopped it (exit code 130)."""

    exit_code = 130


class GateMissed(KvfoldError):
    """The work was done and measured worse than the caller allowed (exit code 3); `report` is what was measured."""

    exit_code = 3

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
