"""How many tokens a healing has time for, by the forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attention.errors import Refusal
from convert.healing.plan import HealPlan
from convert.healing.run import expected_duration
from convert.healing.texts import TrainingTexts
from convert.launch import launched_count
from convert.output.destination import Output, begun, read_provenance

_FIRST, _FACTOR, _MOST = 2**16, 16, 2**50  # tokens of the first guess; of a guess to the next, up to one that takes too long
_GUESSES, _CLOSE = 12, 0.98  # between two guesses, until one takes this share of the time
_DIGITS = 3  # of the number of tokens


def tokens_within(seconds: float, sized: Callable[[int], HealPlan], evaluated: int) -> int:
    """The tokens of the longest healing that is expected to end in time.

    Args:
        seconds: The time.
        sized: Maps a number of tokens to the plan.
        evaluated: Tokens of the text to evaluate on; 0 without.

    Raises:
        Refusal: The shortest healing takes longer, or several processes would decide.
        Failure: A text cannot be read, or is too short.
    """
    if (count := launched_count()) > 1:
        raise Refusal(
            f"{count} processes would each have a forecast of their own",
            hint="give --tokens; --time TIME --dry-run in one process says how many",
        )
    texts = TrainingTexts.read(sized(_FIRST))

    def expected(tokens: int) -> float:
        found = replace(texts, plan=sized(tokens))
        return expected_duration(found.plan, found, evaluated)

    least = sized(1).tokens  # of one step
    below, above = (least, expected(least)), (_FIRST, expected(_FIRST))
    if below[1] > seconds:
        raise Refusal(
            f"a healing of {least} tokens takes {below[1]:.0f} seconds here, longer than --time allows",
            hint="give more time, or another --device",
        )
    while above[1] <= seconds and above[0] < _MOST:
        below, above = above, (above[0] * _FACTOR, expected(above[0] * _FACTOR))
    for _ in range(_GUESSES):
        share = (seconds - below[1]) / (above[1] - below[1])  # as if it were a straight line
        tokens = _rounded(below[0] + share * (above[0] - below[0]))
        if below[1] >= _CLOSE * seconds or not below[0] < tokens < above[0]:
            break
        taken = expected(tokens)
        below, above = ((tokens, taken), above) if taken <= seconds else (below, (tokens, taken))
    return below[0]


def _rounded(tokens: float) -> int:
    """Down to a few digits."""
    unit = 10 ** max(0, len(str(int(tokens))) - _DIGITS)
    return int(tokens) // unit * unit


def tokens_of_begun(output: Output) -> int | None:
    """Those of the healing that `--resume` goes on with, whatever this machine's forecast says now; None if there is none."""
    recipe = {} if output.overwrite else read_provenance(output.path).get("recipe")
    finished = recipe.get("heal") if isinstance(recipe, dict) else None
    found = begun(output.path) or finished
    tokens = found.get("tokens") if isinstance(found, dict) else None
    return tokens if isinstance(tokens, int) else None
