"""One operation's view of the transport: numbered peers, one tag, steps that yield.

An algorithm is a generator. Where it would wait it yields a `Pending`, and is resumed
once that has completed; where it has worked for a while it yields None, so that the
engine can serve control messages in between. It never blocks and never polls.

One tag per operation is enough: MPI matches messages between two ranks in the order
posted, and all ranks run the same program. Tags differ between operations, so that
what an aborted one left behind cannot match a later one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ..transport.base import Array, Pending, Transport

    Steps = Generator[Pending | None, None, None]

_EMPTY: Array = np.empty(0, dtype=np.uint8)


class Channel:
    """Sends and receives among `peers` (world ranks) on behalf of one operation.

    Owned by the thread that runs the operation.
    """

    def __init__(
        self,
        transport: Transport,
        peers: Sequence[int],
        tag: int,
        started: list[Pending] | None = None,
    ) -> None:
        """Open a channel; this process must be one of `peers`."""
        self._transport = transport
        self._peers = tuple(peers)
        self._tag = tag
        # Shared with the channels made by `subset`, so that one cancel() reaches all.
        self._started: list[Pending] = [] if started is None else started
        self.rank = self._peers.index(transport.rank)
        self.size = len(self._peers)

    def subset(self, indices: Sequence[int]) -> Channel:
        """Return a channel among some of the peers, given by their number here."""
        peers = [self._peers[index] for index in indices]
        return Channel(self._transport, peers, self._tag, self._started)

    def isend(self, array: Array, dest: int) -> Pending:
        """Start sending `array` to peer `dest`."""
        return self._keep(self._transport.isend(array, self._peers[dest], self._tag))

    def irecv(self, array: Array, source: int) -> Pending:
        """Start receiving from peer `source` into `array`."""
        return self._keep(self._transport.irecv(array, self._peers[source], self._tag))

    def barrier(self) -> Steps:
        """Wait until all peers are here; what they wrote before is then visible.

        Dissemination barrier (Hensgen, Finkel and Manber 1988): ceil(log2 P) rounds of
        one empty message each way. Over messages rather than a communicator's barrier,
        because it then works for any peers and can be given up when one of them fails.
        """
        distance = 1
        while distance < self.size:
            arrived = self.irecv(_EMPTY, (self.rank - distance) % self.size)
            sent = self.isend(_EMPTY, (self.rank + distance) % self.size)
            yield arrived
            yield sent
            distance *= 2

    def cancel(self) -> None:
        """Give up all transfers that this channel and its subsets have under way.

        Arrays handed to it may be used again once `settled`. Its tag must not be used
        again at all: what was sent to this rank and not received keeps its number.
        """
        for pending in self._started:
            pending.cancel()

    def settled(self) -> bool:
        """Say, after `cancel`, whether nothing more will be written to the arrays."""
        self._started[:] = [left for left in self._started if not left.test()]
        return not self._started

    def _keep(self, pending: Pending) -> Pending:
        self._started.append(pending)
        return pending


def drive(steps: Generator[Pending | None, Any, Any]) -> Any:  # noqa: ANN401  # the generator's own result
    """Run an algorithm to its end on this thread, spinning; returns its result.

    For `init()`, tests and benchmarks; the engine interleaves steps instead.
    """
    try:
        pending = next(steps)
        while True:
            while pending is not None and not pending.test():
                os.sched_yield()  # there may be more ranks than cores
            pending = next(steps)
    except StopIteration as end:
        return end.value
