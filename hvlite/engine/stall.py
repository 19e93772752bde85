"""Who keeps whom waiting. Pure: the table of unfinished requests and the time in.

A request is stalled when some ranks submitted it and others did not, for too long. All
ranks can also be seen to wait for each other much sooner: see `circular_wait`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..messages import describe
from .agreement import by_value, name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..messages import Key


def warning(
    key: Key, missing: Iterable[int], present: Iterable[int], age_s: float
) -> str:
    """Word the report of one stalled request."""
    return (
        f"{describe(key)} has waited {age_s:.0f} s: submitted on "
        f"{name_ranks(list(present))}, missing on {name_ranks(list(missing))}. "
        f"Either those ranks are slow or they took another branch of the program"
    )


def circular_wait(waiting: Mapping[int, Key], live: Iterable[int]) -> str | None:
    """Say how the ranks wait for each other, if all of them do.

    Args:
        waiting: rank -> an unfinished request that its only thread waits for.
        live: ranks that have not left.

    Returns:
        None unless every live rank waits. Then none can submit what the others wait
        for, so none of these requests can ever finish.
    """
    if not all(rank in waiting for rank in live):
        return None
    calls = {rank: describe(key) for rank, key in waiting.items()}
    return f"ranks wait for different operations: {by_value(calls)}"
