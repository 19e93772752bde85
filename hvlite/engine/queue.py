"""The one way into the engine: submissions, and the table of names in flight.

Any thread may call `put`, `wake`, `begin_waiting` and `end_waiting`; all else belongs
to the engine thread.
Guarantees: a submission is accepted whole or refused whole; once `close` returns, every
submission accepted before is in `in_flight` or was taken out of it by the engine, and
every later one is refused. A name is in flight from `put` until the engine `remove`s
it.
"""

from __future__ import annotations

import itertools
from collections import deque
from threading import Lock, RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DuplicateNameError
from ..messages import Kind, Request, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..collectives.segments import Segment
    from ..errors import HvliteError
    from ..messages import Key
    from ..transport.base import Array
    from .handles import Handle


class Part(NamedTuple):
    """The tensors of one dtype within a request, flat and C-contiguous.

    `inputs` and `outputs` cover the same elements in the same order, but may cut them
    differently: a group's results can be one array. They may be the same memory.
    """

    inputs: Sequence[Array]
    outputs: Sequence[Array]


class Submission:
    """A request with this rank's memory for it.

    `write_back` are (destination, source) copies that the engine makes last, for
    results whose own memory is not contiguous. `segment` is the node-shared memory in
    which the tensor lies, if it does.
    """

    __slots__ = ("handle", "key", "parts", "request", "segment", "since", "write_back")

    def __init__(
        self,
        request: Request,
        sequence: int,
        handle: Handle[Any],
        parts: Sequence[Part] = (),
        write_back: Sequence[tuple[Array, Array]] = (),
        segment: Segment | None = None,
    ) -> None:
        """Bind `request` to memory and handle."""
        self.request = request
        self.key = request.key(sequence)
        self.handle = handle
        self.parts = parts
        self.write_back = write_back
        self.segment = segment
        self.since = perf_counter()  # of the phase the request is in


class RequestQueue:
    """Submissions on their way to the engine thread, which sleeps on this queue."""

    def __init__(self) -> None:
        """Open an empty queue."""
        # Guards what `put` changes together with what `sleep` and `close` look at.
        # Reentrant, for a signal handler that submits while its thread is in here.
        self._lock = RLock()
        self._arrivals: deque[Submission] = deque()
        # Locked; whoever takes the sleeping thread's token unlocks it. (Not a
        # SimpleQueue: in CPython 3.11 its timed get can wait forever if the item that
        # woke it has been taken by a get_nowait.)
        self._gate = Lock()
        self._gate.acquire()
        self._asleep: list[None] = []  # one token while asleep; taken by an atomic pop
        self._closed: HvliteError | None = None
        # Written by `put` under the lock, emptied by the engine thread.
        self.in_flight: dict[Key, Submission] = {}
        # Handles in whose `wait` a caller is; set operations are atomic under the GIL.
        self.waiting: set[Handle[Any]] = set()
        self._sequences: dict[tuple[int, Kind], itertools.count[int]] = {}

    def sequence(self, process_set: int, kind: Kind) -> int:
        """Return the next number (from 1) for an unnamed request of this kind."""
        counter = self._sequences.get((process_set, kind))
        if counter is None:
            counter = self._sequences.setdefault(
                (process_set, kind), itertools.count(1)
            )
        return next(counter)

    def put(self, submission: Submission) -> None:
        """Hand a submission to the engine.

        Raises:
            DuplicateNameError: its name is in flight on this rank.
            HvliteError: the engine has ended; the error says why.
        """
        key = submission.key
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if self.in_flight.setdefault(key, submission) is not submission:
                raise DuplicateNameError(
                    f"{describe(key)} is already in flight on this rank: synchronize "
                    f"the earlier one first, or give this one another name"
                )
            self._arrivals.append(submission)
            self.wake()

    def begin_waiting(self, handle: Handle[Any]) -> None:
        """Let the engine know that a caller waits for `handle`."""
        self.waiting.add(handle)
        self.wake()

    def end_waiting(self, handle: Handle[Any]) -> None:
        """Let the engine know that the caller no longer waits."""
        self.waiting.discard(handle)

    def wake(self) -> None:
        """End the engine thread's sleep, if it sleeps."""
        try:
            self._asleep.pop()
        except IndexError:
            return
        self._gate.release()

    def sleep(self, timeout_s: float) -> None:
        """Sleep until something arrives, a wake-up, or the timeout."""
        with self._lock:
            if self._arrivals:
                return
            self._asleep.append(None)
        if self._gate.acquire(timeout=timeout_s):
            return
        try:
            self._asleep.pop()
        except IndexError:  # woken just now: leave the gate locked again
            self._gate.acquire()

    def drain(self) -> list[Submission]:
        """Return what has arrived, at most as much as was there at the call."""
        return [self._arrivals.popleft() for _ in range(len(self._arrivals))]

    def remove(self, key: Key) -> Submission | None:
        """Take a request out of flight; its name is free again."""
        return self.in_flight.pop(key, None)

    def refuse(self, error: HvliteError) -> None:
        """Refuse everything from now on with `error`; what is in flight goes on."""
        with self._lock:
            self._closed = error

    def close(self, error: HvliteError) -> list[Submission]:
        """Refuse everything from now on with `error`; return what was in flight."""
        self.refuse(error)
        remaining = list(self.in_flight.values())
        self.in_flight.clear()
        return remaining
