"""The one way out of the engine: a handle per request.

Thread ownership: a handle is made by the caller, completed exactly once by whoever
takes the request out of flight (the engine thread), and read by any thread.
"""

from __future__ import annotations

import time
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ..errors import HvliteError
    from .queue import RequestQueue

T = TypeVar("T")


class Handle(Generic[T]):
    """A request under way, and later its result or its error.

    Attributes:
        waiting_since: `time.monotonic()` when the first caller began to wait, or None.
    """

    __slots__ = ("__weakref__", "_done", "_error", "_held", "_queue", "_result",
                 "waiting_since")  # fmt: skip

    def __init__(self, queue: RequestQueue) -> None:
        """Make the handle of a request that goes into `queue`."""
        self._queue = queue
        self._result: T | None = None
        self._error: HvliteError | None = None
        self._done = False  # set last: whoever sees True may read the other fields
        self._held = (
            Lock()
        )  # locked until done; a raw lock, since one is made a request
        self._held.acquire()
        self.waiting_since: float | None = None

    def poll(self) -> bool:
        """Say whether `wait` would return (or raise) at once."""
        return self._done

    def wait(self) -> T:
        """Block until the operation has ended on this rank and return its result.

        Raises:
            HvliteError: the operation failed; the same error on each rank concerned.
        """
        if not self._done:
            self.waiting_since = time.monotonic()
            self._queue.begin_waiting(self)
            try:
                with self._held:
                    pass
            finally:
                self._queue.end_waiting(self)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set before, or by complete()

    def promise(self, result: T) -> None:
        """Say, before the handle is given away, what its result will be."""
        self._result = result

    def complete(self, result: T | None = None) -> None:
        """Mark as done; with a `result`, unless it was promised."""
        if result is not None:
            self._result = result
        self._done = True
        self._held.release()

    def fail(self, error: HvliteError) -> None:
        """Mark as done with an error."""
        self._error = error
        self._done = True
        self._held.release()
