"""The course of a job as a state machine: events and times in, orders out. Pure.

    running --first bad end--> grace --> SIGTERM --> SIGKILL --> abandoned
    running --Ctrl-C, SIGTERM to hvrun--> SIGINT or SIGTERM --> SIGKILL --> abandoned
    any     --all ranks done--> dismissed --mpirun ends--> over
    any     --mpirun ends first--> SIGKILL

A second Ctrl-C goes to SIGKILL at once.
"""

import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from . import wire
from .records import RankRecord

GRACE_S = 1.0  # for the other ranks' own errors after the first failure
TERM_S = 1.0  # from SIGTERM to SIGKILL after a failure
USER_TERM_S = 3.0  # the same when a user ends the job: time to save something
KILL_S = 3.0  # from SIGKILL until ranks that do not answer are given up
START_S = 60.0  # for the last rank to report after the first has
MPIRUN_S = 2.5  # for mpirun to end once all ranks are done


@dataclass(frozen=True)
class Order:
    """A frame to send to the ranks: to those still running, or to all if BYE."""

    kind: int
    payload: bytes = b""


class Course:
    """Follows one job from its start to its end.

    Attributes:
        records: what is known of each rank that has reported.
        ended_by: the signal by which a user ended the job, if one did.
        mpirun_code: how mpirun ended (minus a signal); None while it runs.
        mpirun_early: whether mpirun ended before hvrun had dismissed the ranks.
        missing: number of ranks that did not report in time, which ends the job.
    """

    def __init__(self, size: int) -> None:
        self.records: dict[int, RankRecord] = {}
        self.ended_by: int | None = None
        self.mpirun_code: int | None = None
        self.mpirun_early = False
        self.missing = 0
        self._start_by = math.inf
        self._size = size
        self._plan: list[tuple[float, Order | None]] = []
        self._stopping = False
        self._dismissed = False
        self._abandoned = False

    # ---- events ----

    def started(self, record: RankRecord, now: float) -> None:
        """A supervisor has reported for the first time."""
        self.records[record.rank] = record
        if len(self.records) == self._size:
            self._start_by = math.inf
        elif len(self.records) == 1:
            self._start_by = now + START_S
        if self._stopping:
            self._plan.insert(0, (now, Order(wire.KILL)))

    def exited(
        self, rank: int, code: int, now: float, onset: float | None = None
    ) -> None:
        """A rank's program has ended; ``onset`` as in RankRecord."""
        record = self.records[rank]
        record.code, record.ended, record.onset = code, now, onset
        if record.failed and not self._plan:
            self._plan = [
                (now + GRACE_S, _signal(signal.SIGTERM)),
                (now + GRACE_S + TERM_S, Order(wire.KILL)),
            ]

    def done(self, rank: int) -> None:
        """Nothing of a rank is left but its supervisor."""
        self.records[rank].done = True

    def lost(self, rank: int, now: float, onset: float | None = None) -> None:
        """A supervisor has gone, whether or not it was meant to."""
        record = self.records[rank]
        if record.code is None:
            record.lost = True
            self.exited(rank, -signal.SIGKILL, now, onset)
        record.done = True

    def interrupted(self, number: int, now: float) -> None:
        """A user or a scheduler wants the job to end."""
        if self.ended_by is not None:
            self._plan = [(now, Order(wire.KILL))]
            return
        self.ended_by = number
        polite = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self._plan = [(now, _signal(polite)), (now + USER_TERM_S, Order(wire.KILL))]

    def mpirun_ended(self, code: int, now: float) -> None:
        """Take note that mpirun has gone; what is left of the job has to end too."""
        self.mpirun_code = code
        if not self._dismissed:
            self.mpirun_early = True
            self._plan = [(now, Order(wire.KILL))]

    # ---- what follows from them ----

    @property
    def ending(self) -> bool:
        """Whether something has happened that ends the job."""
        return bool(self._plan) or self._abandoned or self._dismissed

    @property
    def over(self) -> bool:
        """Whether nothing more is to be waited for."""
        return self._abandoned or (self.mpirun_code is not None and self._all_done())

    def deadline(self) -> float | None:
        """When advance() has to be called next."""
        if self._plan:
            return self._plan[0][0]
        return self._start_by if self._start_by < math.inf else None

    def advance(self, now: float) -> Iterator[Order]:
        """The orders that are due at ``now``."""
        if self._start_by <= now and not self._plan:
            self.missing = self._size - len(self.records)
            self._plan = [(now, Order(wire.KILL))]
        while self._plan and self._plan[0][0] <= now:
            _, order = self._plan.pop(0)
            if order is None:
                self._abandoned = True
                return
            self._stopping = True
            for record in self.records.values():
                record.stopped |= record.code is None
            if order.kind == wire.KILL:
                self._plan = [(now + KILL_S, None)]
            yield order
        if self._all_done() and len(self.records) == self._size:
            yield from self._dismiss(now)

    def _dismiss(self, now: float) -> Iterator[Order]:
        if not self._dismissed:
            self._dismissed = True
            self._plan = [(now + MPIRUN_S, None)]
            yield Order(wire.BYE)

    def _all_done(self) -> bool:
        return all(record.done for record in self.records.values())


def _signal(number: int) -> Order:
    return Order(wire.SIGNAL, str(int(number)).encode())
