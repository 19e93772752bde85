"""Runs orders, a step at a time, without ever blocking the engine thread.

Orders of one process set form a lane and run one after the other, in the total order,
which is the same on all ranks; lanes advance independently of each other. Owned by the
engine thread.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..collectives.channel import Channel
    from ..transport.base import Pending
    from .host_plane import HostPlane
    from .protocol import Order
    from .queue import Submission


STEPS_AT_ONCE = 16  # of a lane; then control messages get their turn


class Ended(NamedTuple):
    """An order that has come to its end here, with its result or its exception."""

    order: Order
    batch: list[Submission]
    result: Any
    error: Exception | None


class _Running:
    """An order at the head of its lane, or waiting in it."""

    __slots__ = ("batch", "channel", "order", "pending", "steps")

    def __init__(
        self,
        order: Order,
        batch: list[Submission],
        channel: Channel,
        steps: Generator[Pending | None, None, Any],
    ) -> None:
        self.order = order
        self.batch = batch
        self.channel = channel
        self.steps = steps
        self.pending: Pending | None = None

    def advance(self) -> Ended | bool:
        """Take one step; its end, or whether a step could be taken."""
        try:
            if self.pending is not None and not self.pending.test():
                return False
            self.pending = next(self.steps)
        except StopIteration as end:
            return Ended(self.order, self.batch, end.value, None)
        except Exception as error:  # whatever it is, every rank must hear
            self.channel.cancel()
            return Ended(self.order, self.batch, None, error)
        return True


class Executor:
    """The lanes, and the data plane that their orders use."""

    def __init__(self, plane: HostPlane) -> None:
        """Run orders on `plane`."""
        self._plane = plane
        self._lanes: dict[int, deque[_Running]] = {}

    def start(self, order: Order, batch: list[Submission]) -> None:
        """Put an order at the end of its lane."""
        channel = self._plane.channel(order.number)
        steps = self._plane.run(order, batch, channel)
        lane = self._lanes.setdefault(order.process_set, deque())
        lane.append(_Running(order, batch, channel, steps))

    @property
    def busy(self) -> bool:
        """Say whether any order has not ended."""
        return any(self._lanes.values())

    def advance(self) -> tuple[bool, list[Ended]]:
        """Take some steps in each lane that can take one.

        Returns:
            Whether any step was taken, and the orders that came to their end.
        """
        progress, ended = False, []
        for lane in self._lanes.values():
            for _ in range(STEPS_AT_ONCE):
                outcome = lane[0].advance() if lane else False
                if outcome is False:
                    break
                progress = True
                if isinstance(outcome, Ended):
                    lane.popleft()
                    ended.append(outcome)
        return progress, ended

    def abort(self, number: int) -> list[Submission]:
        """Give up an order that failed elsewhere; returns its batch if it still ran."""
        for lane in self._lanes.values():
            for running in lane:
                if running.order.number == number:
                    lane.remove(running)
                    running.steps.close()
                    running.channel.cancel()
                    return running.batch
        return []
