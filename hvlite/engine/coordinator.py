"""The background thread: serves submissions, negotiation and execution, and sleeps.

House rules. One thread a process, named `hvlite-engine`. It alone uses the transport
once it runs; other threads reach it through the queue and hear from it through handles.
It never blocks but in `_pause`, never runs a framework's code, and decides nothing: on
rank 0 it passes reports to the pure `Coordinator` and obeys what that returns.

Guarantees. Every submission that the queue accepted ends: executed, failed with the
same error on all ranks concerned, or failed with the error that ended the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
import traceback
from typing import TYPE_CHECKING, NamedTuple

from .. import errors
from ..messages import describe
from .control import COORDINATOR, Star
from .executor import Executor
from .member import Member
from .negotiation import Coordinator
from .protocol import Decision, Report
from .queue import RequestQueue
from .stats import Stats

if TYPE_CHECKING:
    from ..config import Config
    from ..messages import Algorithm
    from ..transport.base import Transport
    from .executor import Ended
    from .host_plane import HostPlane
    from .protocol import Abort, Failure

LOG = logging.getLogger("hvlite")


class _Patience(NamedTuple):
    """How the thread waits in one state of affairs."""

    yield_s: float  # it gives up the processor only, since the next message is near
    shortest_sleep_s: float
    longest_sleep_s: float


# The waiting place. After yielding, the thread sleeps a fixed part of the time that it
# has waited since the last progress, so that waiting costs a bounded part of a core and
# delays what arrives by a bounded part of the time it took.
CALLER_WAITS = _Patience(200e-6, 20e-6, 200e-6)
WORK_IN_FLIGHT = _Patience(0.0, 100e-6, 1e-3)  # and the program computes
IDLE = _Patience(0.0, 100e-6, 10e-3)
SLEEP_PART = 1 / 8
HAND_OVER_S = 100e-6

REPORT_WAITING_AFTER_S = 0.5  # before a waiting caller is reported: most wait far less
CHECK_STALLS_EVERY_S = 0.5
PR_SET_TIMERSLACK = 29


class Engine:
    """The engine of one runtime: one thread, one queue, one transport."""

    def __init__(
        self,
        transport: Transport,
        plane: HostPlane,
        config: Config,
        algorithm: Algorithm,
    ) -> None:
        """Prepare; nothing runs before `start`."""
        self.queue = RequestQueue()
        self.stats = Stats()
        self._transport = transport
        self._config = config
        self._star = Star(transport)
        self._member = Member()
        self._coordinator = (
            Coordinator(transport.size, config, algorithm)
            if self._star.coordinates
            else None
        )
        self._executor = Executor(plane)
        self._thread = threading.Thread(
            target=self._run, name="hvlite-engine", daemon=True
        )
        # Set once by the thread that calls `leave`, read by the engine thread.
        self._leaving: str | None = None
        # All below belongs to the engine thread.
        self._left_at: float | None = None
        self._finished: str | None = None
        self._last_progress = 0.0
        self._handed_over = False  # a waiting caller has just been given its result
        self._next_stall_check = 0.0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def leave(self, cause: str) -> bool:
        """Stop submitting, serve the others until all have left, end the thread.

        Args:
            cause: told to ranks that still need this one; "" for an ordinary end.

        Returns:
            Whether all ranks left together, within the time allowed for it.
        """
        self.queue.refuse(errors.NotInitializedError("an operation"))
        self._leaving = cause
        self.queue.wake()
        self._thread.join()
        return self._finished == ""

    def _run(self) -> None:
        _sharpen_sleep()
        error: errors.HvliteError
        try:
            # What all ranks had submitted before they left is still executed.
            while self._finished is None or (not self._finished and self._busy()):
                self._serve()
            error = errors.RankLeftError(self._finished or "every rank has left")
        except BaseException:  # a dead engine must fail every handle
            text = traceback.format_exc()
            error = errors.EngineError(f"the hvlite engine ended unexpectedly:\n{text}")
            self._last_words(text)
        if self._executor.busy:
            _ABANDONED.append(self._executor)
        ours = self._leaving is not None  # then later calls hear of that, as before
        refusal = errors.NotInitializedError("an operation") if ours else error
        for submission in self.queue.close(refusal):
            submission.handle.fail(error)

    def _busy(self) -> bool:
        return self._executor.busy and not self._overdue(time.monotonic())

    def _last_words(self, text: str) -> None:
        """Tell the other ranks, as far as the transport still works."""
        cause = f"its engine ended unexpectedly: {text.strip().splitlines()[-1]}"
        self._finished = cause
        with contextlib.suppress(Exception):  # the first cause is already recorded
            if self._coordinator is None:
                self._star.send_report(Report(0, [], [], [], [], [], cause))
            else:
                self._end_all(
                    f"rank {COORDINATOR}, which coordinates, has left: {cause}"
                )

    def _serve(self) -> None:
        """Pass once over everything there is to do; sleep if there was nothing."""
        now = time.monotonic()
        progress = self._take_submissions()
        progress |= self._take_messages(now)
        self._check_leaving(now)
        self._report(now)
        progress |= self._decide(now)
        progress |= self._execute()
        if progress:  # which may have taken long itself
            self._last_progress = time.monotonic()
        else:
            self._pause(now)

    def _take_submissions(self) -> bool:
        submissions = self.queue.drain()
        for submission in submissions:
            known = self._member.submit(submission.request, submission.key.sequence)
            if known is not None:
                submission.request = known  # what follows from it is computed already
            self.stats.submitted(submission, cache_hit=known is not None)
        return bool(submissions)

    def _take_messages(self, now: float) -> bool:
        progress = False
        if self._coordinator is not None:
            for rank, report in self._star.receive_reports():
                self._coordinator.report(rank, report, now)
                progress = True
        else:
            for decision in self._star.receive_decisions():
                self._obey(decision)
                progress = True
        return progress

    def _report(self, now: float) -> None:
        report = self._member.report()
        if report is None:
            return
        self.stats.reports += 1
        if self._coordinator is not None:
            self._coordinator.report(COORDINATOR, report, now)
        else:
            self._star.send_report(report)

    def _decide(self, now: float) -> bool:
        if self._coordinator is None:
            return False
        if now >= self._next_stall_check:
            self._next_stall_check = now + CHECK_STALLS_EVERY_S
            for text in self._coordinator.check_stalls(now):
                LOG.warning("%s", text)
        decision = self._coordinator.decide()
        if decision is None:
            return False
        self._star.send_decision(decision)
        self._obey(decision)
        return True

    def _obey(self, decision: Decision) -> None:
        self.stats.decisions += 1
        in_flight = self.queue.in_flight
        self._member.receive(
            decision, lambda key: in_flight[key].request if key in in_flight else None
        )
        now = time.perf_counter()
        for order in decision.orders:
            batch = [in_flight[self._member.key(*member)] for member in order.members]
            self.stats.ordered(batch, now)
            self._executor.start(order, batch)
        for failure in decision.failures:
            self._fail(failure)
        for abort in decision.aborts:
            self._abort(abort)
        if decision.finished is not None:
            self._finished = decision.finished

    def _fail(self, failure: Failure) -> None:
        error_class = getattr(errors, failure.error)
        for key in failure.keys:
            submission = self.queue.remove(key)
            if submission is not None:
                submission.handle.fail(error_class(failure.text))

    def _abort(self, abort: Abort) -> None:
        if not abort.final:
            self._executor.stop(abort.number)
            return
        for submission in self._executor.remove(abort.number):
            text = f"{describe(submission.key)} failed on rank {abort.rank}: "
            self.queue.remove(submission.key)  # first: a done handle frees its name
            submission.handle.fail(errors.AbortedError(text + abort.cause))

    def _execute(self) -> bool:
        progress, ended = self._executor.advance()
        for item in ended:
            if item.error is None:
                self._complete(item)
            else:
                LOG.info("order %d failed", item.order.number, exc_info=item.error)
                cause = f"{type(item.error).__name__}: {item.error}"
                self._member.fail(item.order.number, cause)
        for number in self._executor.stopped():
            self._member.stop(number)
        return progress

    def _complete(self, ended: Ended) -> None:
        self.stats.executed(ended.batch, time.perf_counter())
        waiting = self.queue.waiting
        for submission in ended.batch:
            self._handed_over |= submission.handle in waiting
            for target, source in submission.write_back:
                target[...] = source
            self.queue.remove(submission.key)  # first: a done handle frees its name
            submission.handle.complete(ended.result)

    def _check_leaving(self, now: float) -> None:
        if self._leaving is None:
            return
        if self._left_at is None:
            self._left_at = now
            self._member.leave(self._leaving)
        elif self._overdue(now) and self._finished is None:
            self._finished = "the other ranks did not leave in time"
            if self._coordinator is not None:
                self._end_all(f"rank {COORDINATOR}, which coordinates, has left")

    def _overdue(self, now: float) -> bool:
        left_at = now if self._left_at is None else self._left_at
        return now - left_at > self._config.leave_timeout_s

    def _end_all(self, reason: str) -> None:
        self._star.send_decision(Decision(0, [], [], [], [], [], reason))

    def _pause(self, now: float) -> None:
        """Wait for a submission or a message: the one place that does."""
        waited = now - self._last_progress
        if self.queue.waiting:
            patience = CALLER_WAITS
            if waited > REPORT_WAITING_AFTER_S:
                self._report_waiting(now)
        else:
            patience = WORK_IN_FLIGHT if self.queue.in_flight else IDLE
        if self._handed_over:
            # The caller needs this core and the GIL, and its next call wakes us.
            self._handed_over = False
            self.queue.sleep(HAND_OVER_S)
            return
        if waited < patience.yield_s:
            time.sleep(0)  # unlike sched_yield it also lets other Python threads run
            return
        pause = max(waited * SLEEP_PART, patience.shortest_sleep_s)
        self.queue.sleep(min(pause, patience.longest_sleep_s))

    def _report_waiting(self, now: float) -> None:
        """Report a caller that has waited long, if nobody else here could submit."""
        if self._executor.busy or not _one_thread_besides_this():
            return
        for key, submission in list(self.queue.in_flight.items()):
            handle = submission.handle
            since = handle.waiting_since
            if (
                handle in self.queue.waiting
                and since is not None
                and now - since > REPORT_WAITING_AFTER_S
            ):
                handle.waiting_since = None  # reported: once is enough
                self._member.wait(key)


# Operations cut short by the end of their engine: MPI may still write to their memory.
_ABANDONED: list[Executor] = []


def _one_thread_besides_this() -> bool:
    """Say whether the program has but one Python thread, the engine's not counted."""
    return threading.active_count() == 2


def _sharpen_sleep() -> None:
    """Let this thread sleep 20 us when asked to; Linux adds 50 us by default."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
