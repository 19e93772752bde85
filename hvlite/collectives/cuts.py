"""Cutting an array into nearly equal parts, the same way on every rank. Pure."""

from __future__ import annotations

# Parts begin at multiples of this, so that no two ranks write to one cache line, and
# vector instructions do not straddle two.
LINE_BYTES = 64


def part(count: int, parts: int, index: int, itemsize: int) -> slice:
    """Return part `index` when `count` elements are cut into consecutive `parts`.

    The parts differ by a cache line at most, and some are empty if there are few lines.
    """
    line = LINE_BYTES // itemsize
    lines = -(-count // line)
    start = lines * index // parts * line
    stop = lines * (index + 1) // parts * line
    return slice(min(start, count), min(stop, count))
