"""Counters of what the engine did."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..messages import Kind

if TYPE_CHECKING:
    from .queue import Submission


class Stats:
    """Counts since `init()`. Written by the engine thread, read by any.

    A reader sees each counter at some recent moment, not all at the same one.
    """

    def __init__(self) -> None:
        """Start at zero."""
        self._requests: Counter[Kind] = Counter()
        self.cache_hits = 0
        self.batches = 0
        self.fused_requests = 0
        self.bytes = 0
        self.reports = 0
        self.decisions = 0
        self.negotiate_s = 0.0
        self.execute_s = 0.0

    def submitted(self, submission: Submission, *, cache_hit: bool) -> None:
        """Count a request that was reported ready."""
        self._requests[submission.request.kind] += 1
        self.cache_hits += cache_hit

    def ordered(self, batch: list[Submission], now: float) -> None:
        """Count a batch that was ordered: negotiation ends, execution begins."""
        self.batches += 1
        if len(batch) > 1:
            self.fused_requests += len(batch)
        for submission in batch:
            self.negotiate_s += now - submission.since
            submission.since = now

    def executed(self, batch: list[Submission], now: float) -> None:
        """Count a batch that is done."""
        for submission in batch:
            if submission.request.kind is not Kind.ALLOCATE:
                self.bytes += submission.request.nbytes
            self.execute_s += now - submission.since

    def snapshot(self) -> dict[str, float]:
        """Return all counters by name; those ending in `_s` are seconds."""
        counters = {name: value for name, value in vars(self).items() if name[0] != "_"}
        by_kind = {
            f"{kind.name.lower()}_requests": self._requests[kind] for kind in Kind
        }
        return {"requests": sum(by_kind.values()), **by_kind, **counters}
