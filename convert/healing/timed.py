"""How many tokens a healing has time for, by the forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from attention.errors import Refusal
from convert.checkpoint.workdir import begun, recorded
from convert.healing.plan import HealPlan
from convert.healing.run import expected_duration
from convert.healing.texts import GivenTexts

_FIRST, _GUESSES = 2**16, 5  # tokens; after so many, forecasts are within a few per cent of the time
_DIGITS = 2  # of the number of tokens


def tokens_within(seconds: float, sized: Callable[[int], HealPlan], evaluated: int) -> int:
    """The tokens of the longest healing that is expected to end in time.

    Args:
        seconds: The time.
        sized: Maps a number of tokens to the plan.
        evaluated: Tokens of the text to evaluate on; 0 without.

    Raises:
        Refusal: The shortest healing takes longer.
        Failure: A text cannot be read, or is too short.
    """
    texts = GivenTexts.read(sized(_FIRST))

    def expected(tokens: int) -> float:
        found = replace(texts, plan=sized(tokens))
        return expected_duration(found.plan, found.given, found.rows_to_write, evaluated)

    least = sized(1).tokens  # of one step
    if (shortest := expected(least)) > seconds:
        raise Refusal(
            f"a healing of {least} tokens takes {shortest:.0f} seconds here, longer than --time allows",
            hint="give more time, or another --device",
        )
    below, tokens = (least, shortest), _FIRST
    for _ in range(_GUESSES):
        taken = expected(tokens)
        per_token = (taken - shortest) / (tokens - least) if tokens > least else taken
        if taken <= seconds and tokens > below[0]:
            below = tokens, taken
        tokens = max(least, _rounded(least + (seconds - shortest) / max(per_token, 1e-12)))
    return below[0]


def _rounded(tokens: float) -> int:
    """Down to a few digits."""
    unit = 10 ** max(0, len(str(int(tokens))) - _DIGITS)
    return int(tokens) // unit * unit


def tokens_of_begun(output: Path) -> int | None:
    """Those of the healing that `--resume` finishes, whatever this machine's forecast says now; None if there is none."""
    found = begun(output) or (recorded(output).get("recipe") or {}).get("heal") or {}
    tokens = found.get("tokens")
    return tokens if isinstance(tokens, int) else None
