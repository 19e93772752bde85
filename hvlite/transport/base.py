"""What the engine needs of a network: a handful of verbs, none of which blocks.

Two kinds of traffic never match each other. *Control*: small byte strings, received
from whoever sent first. *Data*: arrays, matched by (source, tag) in the order posted.
An implementation is used by one thread at a time: `init()`'s caller until the engine
thread starts, the engine thread afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


class Pending(Protocol):
    """A data transfer under way."""

    def test(self) -> bool:
        """Say whether it has completed; a failed transfer raises. Never blocks."""

    def cancel(self) -> None:
        """Give up on it: a receive no longer matches, a send is left to itself.

        Data that was already coming in may still do so: from now on `test` says
        whether the array is free to be used again, and raises no more. May come after
        the end, and more than once; never raises.
        """


class Transport(Protocol):
    """`size` ranks that can send each other control messages and arrays.

    Attributes:
        rank: this process's number, 0 <= rank < size.
        size: number of ranks.
        nodes: node number of each rank; ranks of one node can share memory.
        tags: data tags 0 .. tags - 1 are usable (at least 32,767).
        description: the library underneath, for logs and `hvrun --check`.
    """

    rank: int
    size: int
    nodes: tuple[int, ...]
    tags: int
    description: str

    def send(self, dest: int, payload: bytes) -> None:
        """Send a control message; buffered, so it returns at once."""

    def receive(self) -> tuple[int, bytes] | None:
        """Return the next control message as (source, payload), None if none is here.

        Messages from one source arrive in the order sent.
        """

    def isend(self, array: Array, dest: int, tag: int) -> Pending:
        """Start sending a C-contiguous array; it must not change until complete."""

    def irecv(self, array: Array, source: int, tag: int) -> Pending:
        """Start receiving into a C-contiguous array of exactly the sent size."""

    def close(self, *, together: bool) -> None:
        """Release everything; `together` if all ranks close now, as a collective."""
