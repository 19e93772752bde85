"""How reports and decisions travel. The one place that knows the shape of that network.

Now a star: every rank talks to rank 0. A tree with one aggregator a node would take
this class's place, and nothing else would change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .protocol import (
    decode_decision,
    decode_report,
    encode_decision,
    encode_report,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..transport.base import Transport
    from .protocol import Decision, Report

COORDINATOR = 0
RECEIVE_AT_ONCE = 64  # messages a pass, so that a flood cannot starve the executor


class Star:
    """Control traffic of one rank; used by the engine thread alone."""

    def __init__(self, transport: Transport) -> None:
        """Talk over the control messages of `transport`."""
        self._transport = transport
        self.coordinates = transport.rank == COORDINATOR

    def send_report(self, report: Report) -> None:
        """Send to the coordinator (not called on the coordinator itself)."""
        self._transport.send(COORDINATOR, encode_report(report))

    def send_decision(self, decision: Decision) -> None:
        """Send to every rank but the coordinator itself."""
        payload = encode_decision(decision)
        for rank in range(self._transport.size):
            if rank != COORDINATOR:
                self._transport.send(rank, payload)

    def receive_reports(self) -> Iterator[tuple[int, Report]]:
        """Yield what has arrived at the coordinator, as (rank, report)."""
        for source, payload in self._receive():
            yield source, decode_report(payload)

    def receive_decisions(self) -> Iterator[Decision]:
        """Yield what has arrived from the coordinator, in the order decided."""
        for _, payload in self._receive():
            yield decode_decision(payload)

    def _receive(self) -> Iterator[tuple[int, bytes]]:
        for _ in range(RECEIVE_AT_ONCE):
            message = self._transport.receive()
            if message is None:
                return
            yield message
