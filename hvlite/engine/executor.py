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

    __slots__ = ("batch", "channel", "order", "pending", "steps", "stopped")

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
        self.stopped = False

    def advance(self) -> Ended | bool:
        """Take one step; its end, or whether a step could be taken."""
        if self.stopped:
            return False
        try:
            if self.pending is not None and not self.pending.test():
                return False
            self.pending = next(self.steps)
        except StopIteration as end:
            return Ended(self.order, self.batch, end.value, None)
        except Exception as error:  # whatever it is, every rank must hear
            self.stop()
            return Ended(self.order, self.batch, None, error)
        return True

    def stop(self) -> None:
        """Work no more on this order; what is coming in may still be written."""
        if not self.stopped:
            self.stopped = True
            self.steps.close()
            self.channel.cancel()


class Executor:
    """The lanes, and the data plane that their orders use.

    An order that fails, here or elsewhere, keeps its place at the head of its lane
    until every rank has stopped working on it: another rank may be writing to this
    one's memory on its behalf.
    """

    def __init__(self, plane: HostPlane) -> None:
        """Run orders on `plane`."""
        self._plane = plane
        self._lanes: dict[int, deque[_Running]] = {}
        # Orders to stop, in the order asked for, until this rank is done with them.
        self._stopping: list[int] = []

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
            Whether any step was taken, and the orders that came to their end. Those
            with an error stay in their lane until `remove`.
        """
        progress, ended = False, []
        for lane in self._lanes.values():
            for _ in range(STEPS_AT_ONCE):
                outcome = lane[0].advance() if lane else False
                if outcome is False:
                    break
                progress = True
                if isinstance(outcome, Ended):
                    ended.append(outcome)
                    if outcome.error is None:
                        lane.popleft()
        return progress, ended

    def stop(self, number: int) -> None:
        """Stop working on an order, which may have ended here or not."""
        running = self._find(number)
        if running is not None:
            running.stop()
        self._stopping.append(number)

    def stopped(self) -> list[int]:
        """Return the orders whose stop has become final here since the last call."""
        done = [number for number in self._stopping if self._settled(number)]
        self._stopping = [n for n in self._stopping if n not in done]
        return done

    def remove(self, number: int) -> list[Submission]:
        """Take a stopped order out of its lane; returns its batch, if it was there."""
        running = self._find(number)
        if running is None:
            return []
        self._lanes[running.order.process_set].remove(running)
        return running.batch

    def _settled(self, number: int) -> bool:
        running = self._find(number)
        return running is None or running.channel.settled()

    def _find(self, number: int) -> _Running | None:
        for lane in self._lanes.values():
            for running in lane:
                if running.order.number == number:
                    return running
        return None
