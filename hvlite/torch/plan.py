"""Which parameters share a gradient bucket. Pure: sizes in, lists of numbers out.

Parameters are numbered in order of creation. Everything goes backwards through them,
because gradients arrive in about that order.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

# The first bucket of a kind is small, so that communication starts early.
FIRST_BUCKET_BYTES = 1 << 20


class Part(NamedTuple):
    """A parameter as the plan sees it; a bucket holds parts of one kind."""

    kind: Hashable
    nbytes: int


def partition(
    parts: Sequence[Part], groups: Iterable[Iterable[int]], limit: int
) -> list[list[int]]:
    """Put each part into one bucket.

    Args:
        parts: all of them.
        groups: numbers of parts that belong together: a bucket for each kind in it.
        limit: bytes that a bucket of the others should not exceed.
    """
    buckets = []
    left = set(range(len(parts)))
    for group in groups:
        left.difference_update(group)
        buckets += _by_kind(parts, sorted(group, reverse=True))
    return buckets + _by_size(parts, sorted(left, reverse=True), limit)


def split(count: int, groups: int) -> list[range]:
    """Split `count` numbers into groups whose lengths differ by at most one."""
    starts = [count * group // groups for group in range(groups + 1)]
    return [range(first, end) for first, end in itertools.pairwise(starts)]


def _by_kind(parts: Sequence[Part], numbers: Iterable[int]) -> list[list[int]]:
    kinds: dict[Hashable, list[int]] = {}
    for number in numbers:
        kinds.setdefault(parts[number].kind, []).append(number)
    return list(kinds.values())


def _by_size(
    parts: Sequence[Part], numbers: Iterable[int], limit: int
) -> list[list[int]]:
    """Fill one bucket of each kind at a time, closing it before it exceeds `limit`."""
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    for number in numbers:
        kind, nbytes = parts[number]
        if kind not in room:
            room[kind] = min(limit, FIRST_BUCKET_BYTES)
        elif nbytes > room[kind]:
            closed.append(filling.pop(kind))
            room[kind] = limit
        filling.setdefault(kind, []).append(number)
        room[kind] -= nbytes
    return closed + list(filling.values())
