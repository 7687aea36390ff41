"""Formats of cached numbers: how many bytes they take, scales included. `attention.encoding` encodes and decodes them.

A format is a plain dtype, or integers of a few bits with a scale, and mostly an offset, in float16 for each group of values of
one token, of one head or of a latent. `q8_0` and `q4_0` are what llama.cpp stores: no offsets, and heads of 64 n dims behind a
Hadamard matrix (its pull request 21038). It has none for latents. `mixed` and `mixed2` give channels of a latent, which come in
the order of their energies, fewer bits the less they hold (reverse water-filling), with a scale for each class. All
formats of four bits or fewer but q4_0 do the same with pairs of RoPE keys. These scales take a byte.

vLLM and SGLang have formats of their own. kvfold rounds as they do (`attention.served`), counts their bytes, and stores none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from attention.errors import Refusal

Part = Literal["keys", "values", "latent", "rope"]  # of a cache: keys or values of heads; a latent, the RoPE key beside it

PLAIN = ("float32", "float16", "bfloat16", "float64")  # dtypes that checkpoints have, too
_SCALE = 2  # bytes of a scale or an offset, in float16
_PACKED = 8  # integers that are packed together: as many bytes as an integer has bits


@dataclass(frozen=True)
class Format:
    """One way to store cached numbers.

    Attributes:
        name: As options name it.
        bits: Of one value, without scales; the fewest where channels differ.
        group: Values of one token that share a scale; 0 for a plain dtype.
        latent_group: The same for a latent, or for a RoPE key.
        steps: The integer that a group's value of largest magnitude is: the scale is that value over it, and there is no
            offset. 0 where groups have one.
        hadamard: Heads whose dims are a multiple of it are multiplied by a Hadamard matrix; 0 for none.
        reach: The outermost code in standard deviations, which follow from a group's largest magnitude as if it were normal;
            inf for that magnitude itself. Codes are then the middles of even steps about zero. 0 where another rule holds.
        classes: Of a latent, in the order of its channels: the share of them that a class has, and its format. Channels of a
            class share a scale. Such a format takes no heads.
        paired: Whether the classes are of a RoPE key, whose pairs (i, i + n/2) of dims come in reverse: the slowest first.
        rope: The format of the RoPE key beside a latent, if another.
        heads: The format of heads, if another, in layers that have no latent.
        precise: The format of a few layers with a latent, if another: see `AttentionSpec.format_of`.
        rule: Of `attention.served`, how an engine rounds; "" for what kvfold stores. Such a format takes heads, and latents if
            `latent_group` is not 0.
        side: Where there is a rule, bytes beside the integers, and of how many values: 0 for a whole head.
        values: The format of values of heads, if another.
        edges: Layers at either end, at most half of all, whose cache stays in bfloat16.
        engine: Whose rule it is.
    """

    name: str
    bits: int
    group: int = 0
    latent_group: int = 0
    steps: int = 0
    hadamard: int = 0
    reach: float = 0.0
    classes: tuple[tuple[float, Format], ...] = ()
    paired: bool = False
    rope: Format | None = None
    heads: Format | None = None
    precise: Format | None = None
    rule: str = ""
    side: tuple[int, int] = (0, 0)
    values: Format | None = None
    edges: int = 0
    engine: str = ""

    def outermost(self, size: int) -> float:
        """Where the outermost code is expected, as a share of the largest magnitude of `size` values; larger ones become it."""
        largest = 1.14 + 0.35 * math.log(size)  # of 8 to 512 normal numbers on average, within 2 %
        return min(_WITHIN, self.reach / largest) if self.reach < math.inf else 1.0

    def of(self, part: Part) -> Format:
        """The format of a part of a cache in this one."""
        if part == "latent":
            return self
        return (self.rope if part == "rope" else self.heads or (self.values if part == "values" else None)) or self

    def cut(self, size: int) -> list[tuple[Format, int]]:
        """The classes of a latent or a RoPE key of that size that have channels, and how many: multiples of 8 but for the last.

        Channels that are constant, fewer than 8, may be left out: the others have the same classes.
        """
        whole, shares = -(-size // _PACKED), accumulate(share for share, _ in self.classes)
        bounds = [min(size, max(1, round(share * whole)) * _PACKED) for share in shares]
        bounds[-1] = size
        cut = zip(self.classes, (0, *bounds), bounds, strict=False)
        return [(form, end - start) for (_, form), start, end in cut if end > start]

    def grouping(self, part: Part, size: int) -> tuple[int, int]:
        """How `size` values of one token, of one head or of a latent, are encoded together.

        Returns:
            The values that share a scale, 0 for a plain dtype; and those that are multiplied by a Hadamard matrix together, 1
            for none.
        """
        if self.classes or self.rule:
            return size, 1
        if part in ("latent", "rope"):
            return self.latent_group, 1
        if not self.hadamard or size % self.hadamard:
            return self.group, 1
        # of keys, the largest power of two that divides their dims
        return self.group, (size & -size if part == "keys" else self.hadamard)

    def row_bytes(self, size: int, part: Part = "values") -> int:
        """Bytes of `size` values of one token: of one head, or of a latent or its RoPE key."""
        form = self.of(part)
        if form.rule:
            return size * form.bits // 8 + form.side[0] * (size // (form.side[1] or size))
        if form.classes:
            return sum(count * own.bits // 8 + 1 for own, count in form.cut(size))  # a byte of a scale
        group, _ = form.grouping(part, size)
        scales = _SCALE if form.steps else 2 * _SCALE  # of a group, and an offset
        return size * form.bits // 8 + (scales * -(-size // group) if group else 0)

    @property
    def multiple(self) -> int:
        """What the size of a head, a latent or a RoPE key has to be a multiple of, to fill bytes, or blocks of llama.cpp."""
        return self.group if self.steps else self.side[1] or (_PACKED if self.bits < 8 else 1)

    def require(self, what: str, *sizes: int) -> None:
        """Refuse sizes of `what`, such as "head", that the format does not take."""
        if self.classes and what == "head":
            raise Refusal(
                f"heads cannot be cached in {self.name}: it is for latents, whose channels come in the order of their energies",
                hint="choose int8, int4 or another format, or convert to MLA",
            )
        if self.rule and what != "head" and not self.latent_group:
            raise Refusal(f"{self.engine} caches no {what} in {self.name}", hint="choose int4 or fp4_mx_block16, for example")
        for size in sizes:
            if self.values and size & (size - 1):
                raise Refusal(f"{self.engine} caches no {what} of {size} values in {self.name}: it must be a power of two")
            if size % self.multiple:
                below = size // self.multiple * self.multiple
                near = f"{below} or {below + self.multiple}" if below else f"{self.multiple}"
                raise Refusal(
                    f"a {what} of {size} values cannot be cached in {self.name}: it must be a multiple of {self.multiple}",
                    hint=f"one of {near} values would do; or choose int8, fp8, bfloat16, float16 or float32",
                )


# The outermost code by bits, in standard deviations, and at most as a share of the largest number. Latents are nearly normal
# behind a rotation: the best scale of normal numbers in groups of 8 to 256 is near.
_REACH, _WITHIN = {4: 2.4, 3: 2.0, 2: 1.47, 1: 0.76}, 0.94


def _classes(bits: Sequence[int], shares: Sequence[float]) -> tuple[tuple[float, Format], ...]:
    return tuple((share, Format(f"{n} bits", n, reach=_REACH.get(n, math.inf))) for share, n in zip(shares, bits, strict=True))


def _rope(*bits: int) -> Format:
    """A format of RoPE keys. What most keys have in common is in slow pairs, which turn little."""
    return Format("pairs", bits[-1], classes=_classes(bits, (0.15, 0.35, 0.5)), paired=True)


def _mixed(name: str, bits: Sequence[int], fine: Sequence[int], shares: Sequence[float]) -> Format:
    precise = Format(f"{fine[-1]} to {fine[0]} bits", fine[-1], classes=_classes(fine, shares), rope=_ROPE)
    return Format(name, bits[-1], classes=_classes(bits, shares), rope=_rope(6, 4, 3), heads=_INT4, precise=precise)


_ROPE = _rope(7, 5, 4)
_SIX = Format("6 bits", 6, classes=_classes((6,), (1.0,)), rope=_ROPE)
_INT4 = Format("int4", 4, 32, 64, rope=_ROPE, precise=_SIX)

FORMATS = {
    form.name: form
    for form in (
        Format("float64", 64),
        Format("float32", 32),
        Format("float16", 16),
        Format("bfloat16", 16),
        Format("fp8", 8),
        Format("int8", 8, 64, 64),
        _INT4,
        Format("int3", 3, 32, 64, rope=_ROPE, precise=_SIX),
        Format("int2", 2, 32, 64, rope=_ROPE, precise=_SIX),
        Format("q8_0", 8, 32, 32, steps=127, hadamard=64),
        Format("q4_0", 4, 32, 32, steps=-8, hadamard=64),
        _mixed("mixed", (5, 3, 2), (7, 5, 4), (0.2, 0.5, 0.3)),
        _mixed("mixed2", (5, 3, 2, 1), (7, 5, 4, 3), (0.1, 0.2, 0.2, 0.5)),
    )
}


def _turboquant(bits: int) -> Format:
    values = Format(f"values of {bits} bits", bits, rule="turboquant values", side=(4, 0))
    name = f"turboquant_{bits}bit_nc"
    return Format(name, bits, rule="turboquant keys", side=(2, 0), values=values, edges=2, engine="vLLM 0.33")


SERVED = {
    form.name: form
    for form in (
        Format("int4_per_token_head", 4, rule="per token and head", side=(4, 0), engine="vLLM 0.33"),
        Format("nvfp4", 4, rule="nvfp4", side=(1, 16), engine="vLLM 0.33"),
        _turboquant(4),
        _turboquant(3),
        Format("fp4_mx_block16", 4, latent_group=16, rule="mx block 16", side=(1, 16), engine="SGLang 0.5.23"),
    )
}

KNOWN_FORMATS = FORMATS | SERVED


def parts_of(latent: bool) -> tuple[Part, Part]:
    """The two parts of a layer's cache, in the order in which transformers' `Cache.update` takes them."""
    return ("latent", "rope") if latent else ("keys", "values")


def rounding_of(name: str | None) -> Format | None:
    """The format through which a cache of that name is read rounded; None for none, and for a dtype that checkpoints have.

    Raises:
        Refusal: The format is unknown.
    """
    return None if name is None or name in PLAIN else format_named(name)


def stored_format(name: str) -> Format:
    """The format with that name, in which kvfold stores a cache.

    Raises:
        Refusal: There is none, or only an engine does.
    """
    if name in SERVED:
        raise Refusal(
            f"kvfold stores no KV cache in {name}, which is {SERVED[name].engine}'s",
            hint=f"give that engine --kv-cache-dtype {name}; `convert eval --cache-dtype {name}` measures what it loses",
        )
    return format_named(name)


def format_named(name: str) -> Format:
    """The format with that name, of a cache that kvfold or an engine stores.

    Raises:
        Refusal: There is none.
    """
    if (found := KNOWN_FORMATS.get(name)) is None:
        raise Refusal(f"no KV cache is kept in {name!r} (choose {', '.join(KNOWN_FORMATS)})")
    return found
