"""Parses numbers as users write them: 5GB, 12.5%, 512+64, 20M, 90min, 1e-4."""

import re

from attention.errors import Refusal
from eval.arguments import parse_count

_SECONDS = {"S": 1, "MIN": 60, "H": 3600, "D": 86400}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """Parse 5GB, 500MB, 1.5GiB, … as bytes.

    Raises:
        Refusal: `text` is not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([KMG]?i?B)\s*", text, re.IGNORECASE | re.ASCII)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise Refusal(f"invalid size {text!r}: give a number and a unit, as in 5GB or 500MB")
    return size


def parse_tokens(text: str) -> int:
    """Parse a number of tokens as `parse_count` does; "0" is none."""
    return 0 if text.strip() == "0" else parse_count(text)


def parse_time(text: str) -> float:
    """Parse 90min, 1h, 1.5d, 300s as seconds.

    Raises:
        Refusal: It is not a time above 0.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h|d)\s*", text, re.IGNORECASE | re.ASCII)
    seconds = float(match[1]) * _SECONDS[match[2].upper()] if match else 0.0
    if not seconds:
        raise Refusal(f"{text!r} is not a time: give a number above 0 and a unit, as in 90min, 1h or 2d")
    return seconds


def parse_rate(text: str) -> float | None:
    """Parse a learning rate; "auto" is None.

    Raises:
        Refusal: It is neither that nor a number above 0 and up to 1.
    """
    try:
        rate = None if text == "auto" else float(text)
    except ValueError:
        rate = 0.0
    if rate is not None and not 0 < rate <= 1:
        raise Refusal(f"invalid learning rate {text!r}: give auto, or a number above 0 and up to 1, as in 1e-4")
    return rate


def parse_budget(text: str) -> float:
    """Parse a share of the source's cache (12.5%), a float, or bytes per token (4096, 4KB), an int.

    Raises:
        Refusal: It is neither.
    """
    text = text.strip()
    percent = re.fullmatch(r"(\d{1,3}(?:\.\d{1,30})?)\s*%", text, re.ASCII)
    if percent and 0 < float(percent[1]) <= 100:
        return float(percent[1]) / 100
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"\d+(\.\d+)?\s*[KMG]?i?B", text, re.IGNORECASE | re.ASCII):
        return parse_bytes(text)
    raise Refusal(
        f"invalid budget {text!r}: give a share of the source's cache above 0 and up to 100 %, as in 12.5%, or bytes per "
        "token, as in 4096 or 4KB"
    )


def parse_latent(text: str) -> tuple[int | None, int | None, float | None]:
    """Parse a size of MLA, R+P or a budget, as (R, P, budget); what is not given is None.

    Raises:
        Refusal: It is neither.
    """
    if match := re.fullmatch(r"\s*(\d{1,9})\s*\+\s*(\d{1,9})\s*", text, re.ASCII):
        return int(match[1]), int(match[2]), None
    return None, None, parse_budget(text)
