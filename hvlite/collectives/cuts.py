"""Cutting an array into nearly equal parts, the same way on every rank. Pure."""

from __future__ import annotations

from itertools import pairwise

# Parts begin at multiples of this, so that no two ranks write to one cache line, and
# vector instructions do not straddle two.
LINE_BYTES = 64


def cut(count: int, parts: int, itemsize: int) -> list[slice]:
    """Cut `count` elements into consecutive parts; some are empty if there are few."""
    line = max(LINE_BYTES // itemsize, 1)
    lines = -(-count // line)
    borders = [min(lines * part // parts * line, count) for part in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(borders)]
