"""Runs the ranks of an in-memory world in one thread, a step of each in turn.

No thread, no clock, no chance: what deadlocks here always does, and is found at once,
because a round in which no rank can move is the proof.
"""

from collections.abc import Generator, Sequence
from typing import Any

from hvlite.collectives.channel import Channel
from hvlite.transport.memory import MemoryTransport

Ranks = Sequence[Generator[Any, None, Any]]


class DeadlockError(Exception):
    """No rank can go on."""


def run(ranks: Ranks) -> list[Any]:
    """Runs one generator a rank to the end of all; returns their results."""
    results, stuck = advance(ranks)
    if stuck:
        raise DeadlockError(f"ranks {sorted(stuck)} wait for each other")
    return [results[rank] for rank in range(len(ranks))]


def advance(ranks: Ranks) -> tuple[dict[int, Any], set[int]]:
    """Runs until no rank can move; returns the results so far and who is stuck.

    A rank that raises an InjectedFault counts as ended, without a result.
    """
    awaited: dict[int, Any] = dict.fromkeys(range(len(ranks)))
    results: dict[int, Any] = {}
    moved = True
    while moved:
        moved = False
        for rank in list(awaited):
            if awaited[rank] is not None and not awaited[rank].test():
                continue
            moved = True
            try:
                awaited[rank] = next(ranks[rank])
            except StopIteration as end:
                results[rank] = end.value
                del awaited[rank]
            except InjectedFault:
                del awaited[rank]
    return results, set(awaited)


def channels(world: Sequence[MemoryTransport], tag: int) -> list[Channel]:
    """Opens a channel among all ranks, on each of them."""
    return [Channel(transport, range(len(world)), tag) for transport in world]


class InjectedFault(Exception):
    """What `failing_at` raises."""


def failing_at(
    step: int, steps: Generator[Any, None, Any]
) -> Generator[Any, None, Any]:
    """Runs `steps` but raises in place of its step `step`, if it gets that far."""
    for number, pending in enumerate(steps):
        if number == step:
            steps.close()
            raise InjectedFault(step)
        yield pending
