"""A rank's own side of the negotiation. Pure: no MPI, no threads, no clock.

It knows which requests have ids, collects what is to be reported, and turns decisions
into requests to execute. It is used by the engine thread alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .protocol import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..messages import Key, Request
    from .protocol import Decision


class Member:
    """One rank of the negotiation."""

    def __init__(self) -> None:
        """Start with nothing known and nothing to report."""
        self._ids: dict[Request, int] = {}
        self._requests: dict[int, Request] = {}
        self._seen = 0
        self._must_report = False
        self._clear()

    def _clear(self) -> None:
        self._known: list[tuple[int, int]] = []
        self._new: list[tuple[Request, int]] = []
        self._waiting: list[Key] = []
        self._failed: list[tuple[int, str]] = []
        self._stopped: list[int] = []
        self._leaving: str | None = None

    def submit(self, request: Request, sequence: int) -> Request | None:
        """Note that a request is ready here.

        Returns:
            The equal one that has an id (a cache hit), or None.
        """
        self._must_report = True
        number = self._ids.get(request)
        if number is None:
            self._new.append((request, sequence))
            return None
        self._known.append((number, sequence))
        return self._requests[number]

    def wait(self, key: Key) -> None:
        """Note that this rank can do nothing until `key` is finished."""
        self._must_report = True
        self._waiting.append(key)

    def fail(self, number: int, cause: str) -> None:
        """Note that an order failed here."""
        self._must_report = True
        self._failed.append((number, cause))

    def stop(self, number: int) -> None:
        """Note that this rank is done with an order that is to be aborted."""
        self._must_report = True
        self._stopped.append(number)

    def leave(self, cause: str) -> None:
        """Note that this rank will submit nothing more."""
        self._must_report = True
        self._leaving = cause

    def report(self) -> Report | None:
        """Return what is to be told to the coordinator now, if anything."""
        if not self._must_report:
            return None
        report = Report(
            self._seen,
            self._known,
            self._new,
            self._waiting,
            self._failed,
            self._stopped,
            self._leaving,
        )
        self._clear()
        self._must_report = False
        return report

    def receive(
        self, decision: Decision, submitted: Callable[[Key], Request | None]
    ) -> None:
        """Take over the ids of a decision.

        Args:
            decision: the next one; none may be left out.
            submitted: gives this rank's own request for a key.
        """
        self._seen = decision.number
        for number in decision.evicted:
            request = self._requests.pop(number, None)
            if request is not None:
                del self._ids[request]
            # The coordinator keeps an evicted request until all have acknowledged.
            self._must_report = True
        for number, key in decision.assigned:
            request = submitted(key)
            if request is not None:
                self._ids[request] = number
                self._requests[number] = request

    def key(self, number: int, sequence: int) -> Key:
        """Return what the request with this id is matched by."""
        return self._requests[number].key(sequence)
