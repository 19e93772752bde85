"""A world inside one process: the transport of a single worker, and of most tests.

Each rank is an object that one thread (or, in tests, one generator) uses. All ranks of
a world share one lock, which guards every mailbox; nothing waits while holding it.
The same contract tests run on this transport and on MPI, so what passes here passes
there: messages from one source keep their order, a send is buffered by copying, sizes
that differ are an error on the receiving side.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .base import Array, Pending

T = TypeVar("T")
_Key = tuple[int, int]  # source and tag: what data is matched by


def make_world(size: int, nodes: Sequence[int] | None = None) -> list[MemoryTransport]:
    """Return the transports of `size` connected ranks, in rank order.

    Args:
        size: number of ranks; 1 serves a process that runs alone.
        nodes: node number of each rank; one node by default. Ranks of different nodes
            could share memory here; the numbers let tests play several machines.
    """
    numbers = (0,) * size if nodes is None else tuple(nodes)
    if len(numbers) != size:
        raise ValueError(f"{size} ranks but {len(numbers)} node numbers")
    lock = threading.Lock()
    mailboxes = [_Mailbox() for _ in range(size)]
    return [MemoryTransport(rank, numbers, mailboxes, lock) for rank in range(size)]


class MemoryTransport:
    """One rank of an in-memory world; made by `make_world`."""

    def __init__(
        self,
        rank: int,
        nodes: tuple[int, ...],
        mailboxes: list[_Mailbox],
        lock: threading.Lock,
    ) -> None:
        """Join `mailboxes`, one a rank, which all ranks guard by the same `lock`."""
        self.rank = rank
        self.size = len(nodes)
        self.nodes = nodes
        self.tags = 1 << 30
        self.description = "in-memory transport"
        self._mailboxes = mailboxes
        self._mailbox = mailboxes[rank]
        self._lock = lock

    def send(self, dest: int, payload: bytes) -> None:
        """Put a control message into the mailbox of `dest`."""
        with self._lock:
            if self._mailboxes[dest].is_open:
                self._mailboxes[dest].control.append((self.rank, bytes(payload)))

    def receive(self) -> tuple[int, bytes] | None:
        """Take the oldest control message, as (source, payload), if there is one."""
        with self._lock:
            control = self._mailbox.control
            return control.popleft() if control else None

    def isend(self, array: Array, dest: int, tag: int) -> Pending:
        """Copy `array` to where `dest` receives it, now or once it asks."""
        with self._lock:
            self._mailboxes[dest].deliver(self.rank, tag, _as_bytes(array))
        return _COMPLETE

    def irecv(self, array: Array, source: int, tag: int) -> Pending:
        """Fill `array` with what `source` has sent, or will send."""
        receive = _Receive(_as_bytes(array), self._mailbox, (source, tag), self._lock)
        with self._lock:
            self._mailbox.expect(receive)
        return receive

    def close(self, *, together: bool) -> None:
        """Drop all messages, and those still to come; `together` makes no difference.

        May be called twice.
        """
        with self._lock:
            self._mailbox.close()


class _Mailbox:
    """What has arrived for one rank, and what it waits for. Guarded by the lock."""

    def __init__(self) -> None:
        self.control: deque[tuple[int, bytes]] = deque()
        # In the order sent or posted; of one key, at most one of the two is filled.
        self.arrived: defaultdict[_Key, deque[Array]] = defaultdict(deque)
        self.expected: defaultdict[_Key, deque[_Receive]] = defaultdict(deque)
        self.is_open = True

    def deliver(self, source: int, tag: int, payload: Array) -> None:
        """Hand `payload` to the receive that waits for it, or keep a copy."""
        if not self.is_open:
            return
        receive = _take(self.expected, (source, tag))
        if receive is not None:
            receive.complete(payload)
        else:
            self.arrived[source, tag].append(payload.copy())

    def expect(self, receive: _Receive) -> None:
        """Complete `receive` with what is here, or let it wait its turn."""
        payload = _take(self.arrived, receive.key)
        if payload is not None:
            receive.complete(payload)
        else:
            self.expected[receive.key].append(receive)

    def forget(self, receive: _Receive) -> None:
        """Let `receive` match nothing any more."""
        waiting = self.expected.get(receive.key)
        if waiting and receive in waiting:
            waiting.remove(receive)
            if not waiting:
                del self.expected[receive.key]

    def close(self) -> None:
        """Forget everything, and take nothing in any more."""
        self.is_open = False
        self.control.clear()
        self.arrived.clear()
        self.expected.clear()


class _Receive:
    """A receive under way; completed by the sender's thread, tested by the owner's."""

    __slots__ = ("_array", "_done", "_error", "_lock", "_mailbox", "key")

    def __init__(
        self, array: Array, mailbox: _Mailbox, key: _Key, lock: threading.Lock
    ) -> None:
        self._array = array
        self._mailbox = mailbox
        self._lock = lock
        self._error: TransportError | None = None
        # Written last by complete(): whoever reads True sees the array filled.
        self._done = False
        self.key = key

    def complete(self, payload: Array) -> None:
        """Take `payload` in; the lock is held."""
        if payload.size == self._array.size:
            self._array[...] = payload
        else:
            source, tag = self.key
            self._error = TransportError(
                f"received {payload.size} bytes from rank {source} (tag {tag}) "
                f"where {self._array.size} were expected"
            )
        self._done = True

    def test(self) -> bool:
        """Say whether the array is filled, or no longer will be."""
        if self._done and self._error is not None:
            raise self._error
        return self._done

    def cancel(self) -> None:
        """Match nothing any more; the array is not touched after this."""
        with self._lock:
            self._mailbox.forget(self)
            self._error = None
            self._done = True


class _Complete:
    """A send: over as soon as it was started, because it is buffered."""

    __slots__ = ()

    def test(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


_COMPLETE = _Complete()


def _as_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _take(queues: dict[_Key, deque[T]], key: _Key) -> T | None:
    """Take the oldest of a queue; an empty one goes, as its tag does not come back."""
    queue = queues.get(key)
    if queue is None:
        return None
    item = queue.popleft()
    if not queue:
        del queues[key]
    return item
