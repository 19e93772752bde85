"""The coordinator's side of the negotiation. Pure: no MPI, no threads, no clock.

House rules. Events go in (`report`, with the time), decisions come out (`decide`);
nothing else happens here. This file may not know how messages travel, what memory the
tensors have, or what time it is.

Theory of operation. Ranks report requests by key; a key is complete when every rank of
its process set has reported it. Complete keys are compared (agreement), grouped
(fusion) and put into one total order, which every rank executes. The order is the order
in which keys became complete at the coordinator, fused members moving up to their
batch's first; ties within one report keep that report's order.

Ids. A request that is ordered for the first time gets the next integer, which every
rank learns from the same decision. Ids are never reused. Beyond the capacity the least
recently ordered are evicted; a rank may still report an evicted id until it has seen
that decision, so the request is kept until all ranks have acknowledged it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ..messages import describe
from . import stall
from .agreement import disagreement, name_ranks
from .fusion import plan
from .protocol import Abort, Decision, Failure, Order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..config import Config
    from ..messages import Algorithm, Key, Request
    from .fusion import Ready
    from .protocol import Report


# What is added where a rank left without a cause.
_ENDED = (
    ": it called shutdown() or its program ended; do all ranks run equally many steps?"
)


class _Unfinished:
    """A key that some ranks have reported."""

    __slots__ = ("agreed", "first", "requests", "since", "warned")

    def __init__(self, first: Request, since: float) -> None:
        self.first = first
        self.requests: dict[int, Request] = {}
        self.agreed = True
        self.since = since
        self.warned = False


class _Ids:
    """The ids in use, in order of their last use, and those on their way out."""

    def __init__(self, capacity: int, size: int) -> None:
        self._capacity = capacity
        self._next = 1
        self._ids: dict[Request, int] = {}  # least recently ordered first
        self._requests: dict[int, Request] = {}
        self._retiring: deque[tuple[int, int]] = deque()  # (decision number, id)
        self._acknowledged = [0] * size

    def request(self, number: int) -> Request:
        return self._requests[number]

    def use(self, request: Request) -> tuple[int, bool]:
        """Return the request's id and whether it is new; it is now the latest used."""
        number = self._ids.pop(request, 0)
        new = not number
        if new:
            number = self._next
            self._next += 1
            self._requests[number] = request
        self._ids[request] = number
        return number, new

    def evict(self, decision: int) -> list[int]:
        """Return the ids that decision number `decision` evicts."""
        evicted = []
        while len(self._ids) > self._capacity:
            number = self._ids.pop(next(iter(self._ids)))
            self._retiring.append((decision, number))
            evicted.append(number)
        return evicted

    def acknowledge(self, rank: int, decision: int) -> None:
        """Forget what was evicted by decisions that every rank has seen."""
        self._acknowledged[rank] = decision
        seen = min(self._acknowledged)
        while self._retiring and self._retiring[0][0] <= seen:
            del self._requests[self._retiring.popleft()[1]]


class Coordinator:
    """Collects reports and decides what all ranks execute, in which order."""

    def __init__(self, size: int, config: Config, algorithm: Algorithm) -> None:
        """Coordinate `size` ranks whose all-reduces can use `algorithm`."""
        self._size = size
        self._config = config
        self._algorithm = algorithm
        self._ids = _Ids(config.cache_capacity, size)
        self._sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._unfinished: dict[Key, _Unfinished] = {}
        self._complete: list[Key] = []
        self._waiting: dict[int, Key] = {}
        self._left: dict[int, str] = {}
        # Orders under abortion, and the ranks that still work on them.
        self._aborting: dict[int, tuple[Abort, set[int]]] = {}
        self._news: list[Failure | Abort] = []
        self._decisions = 0
        self._orders = 0
        self._evict_next: list[int] = []
        self._finished = False

    def report(self, rank: int, report: Report, now: float) -> None:
        """Take in what happened on `rank`; `now` is in seconds on any steady clock."""
        for number, sequence in report.known:
            request = self._ids.request(number)
            self._submitted(rank, request.key(sequence), request, now)
        for request, sequence in report.new:
            self._submitted(rank, request.key(sequence), request, now)
        for key in report.waiting:
            if key in self._unfinished:
                self._waiting[rank] = key
        for number, cause in report.failed:
            self._abort(Abort(number, rank, cause, final=False))
        for number in report.stopped:
            self._stopped(rank, number)
        if report.leaving is not None:
            self._left[rank] = report.leaving
        self._ids.acknowledge(rank, report.seen)

    def _submitted(self, rank: int, key: Key, request: Request, now: float) -> None:
        entry = self._unfinished.get(key)
        if entry is None:
            entry = self._unfinished[key] = _Unfinished(request, now)
        elif request is not entry.first and request != entry.first:
            entry.agreed = False
        entry.requests[rank] = request
        if len(entry.requests) == len(self._sets[key.process_set]):
            self._complete.append(key)

    def decide(self) -> Decision | None:
        """Return the next decision for all ranks; None if there is nothing to tell."""
        if not (self._complete or self._news or self._left or self._waiting):
            return None
        agreed = list(self._agreed())
        self._fail_without_the_left()
        self._break_circle()
        batches = plan(agreed, self._config.fusion_threshold_bytes)
        finished = len(self._left) == self._size and not self._finished
        if not (batches or self._news or finished):
            return None
        self._finished |= finished
        news, self._news = self._news, []
        self._decisions += 1
        evicted, assigned, orders = self._order(batches)
        return Decision(
            self._decisions,
            evicted,
            assigned,
            orders,
            [item for item in news if isinstance(item, Failure)],
            [item for item in news if isinstance(item, Abort)],
            "" if finished else None,
        )

    def check_stalls(self, now: float) -> list[str]:
        """Return warnings that became due; fail what has waited beyond the limit."""
        warnings = []
        warn_s, abort_s = self._config.stall_warning_s, self._config.stall_abort_s
        for key, entry in list(self._unfinished.items()):
            age = now - entry.since
            present = list(entry.requests)
            missing = [
                rank for rank in self._sets[key.process_set] if rank not in present
            ]
            text = stall.warning(key, missing, present, age)
            if abort_s and age >= abort_s:
                self._fail([key], "StallError", text)
            elif warn_s and age >= warn_s and not entry.warned:
                entry.warned = True
                warnings.append(text)
        return warnings

    def _abort(self, abort: Abort) -> None:
        if abort.number not in self._aborting:  # several ranks may fail in one order
            self._aborting[abort.number] = abort, set(range(self._size))
            self._news.append(abort)

    def _stopped(self, rank: int, number: int) -> None:
        abort, working = self._aborting[number]
        working.discard(rank)
        if not working:
            del self._aborting[number]
            self._news.append(abort._replace(final=True))

    def _agreed(self) -> Iterator[Ready]:
        """Take the complete keys out of the table; those that disagree become news."""
        complete, self._complete = self._complete, []
        for key in complete:
            entry = self._unfinished[key]
            if entry.agreed:
                self._finish(key)
                yield key, entry.first
            else:
                text = disagreement(key, entry.requests)
                self._fail([key], "MismatchError", text)

    def _order(
        self, batches: Sequence[Sequence[Ready]]
    ) -> tuple[list[int], list[tuple[int, Key]], list[Order]]:
        assigned, orders = [], []
        for batch in batches:
            members = []
            for key, request in batch:
                number, new = self._ids.use(request)
                if new:
                    assigned.append((number, key))
                members.append((number, key.sequence))
            self._orders += 1
            orders.append(
                Order(self._orders, key.process_set, self._algorithm, tuple(members))
            )
        # Evicted one decision late: what this decision orders must be known by id.
        evicted, self._evict_next = self._evict_next, []
        self._evict_next = self._ids.evict(self._decisions + 1)
        return evicted, assigned, orders

    def _fail_without_the_left(self) -> None:
        for key, entry in list(self._unfinished.items()):
            gone = [
                rank
                for rank in self._sets[key.process_set]
                if rank in self._left and rank not in entry.requests
            ]
            if gone:
                causes = {self._left[rank] for rank in gone if self._left[rank]}
                because = f" ({'; '.join(sorted(causes))})" if causes else _ENDED
                verb = "has" if len(gone) == 1 else "have"
                text = f"{describe(key)}: {name_ranks(gone)} {verb} left{because}"
                self._fail([key], "RankLeftError", text)

    def _break_circle(self) -> None:
        live = [rank for rank in range(self._size) if rank not in self._left]
        if self._waiting and (text := stall.circular_wait(self._waiting, live)):
            keys = dict.fromkeys(self._waiting.values())
            self._fail(list(keys), "MismatchError", text)

    def _fail(self, keys: Sequence[Key], error: str, text: str) -> None:
        for key in keys:
            self._finish(key)
        self._news.append(Failure(tuple(keys), error, text))

    def _finish(self, key: Key) -> None:
        del self._unfinished[key]
        if not self._waiting:
            return
        for rank in [rank for rank, waited in self._waiting.items() if waited == key]:
            del self._waiting[rank]
