"""Who failed first, the job's exit code, and how to say it. Pure.

The verdict rests on what the supervisors report. mpirun's exit code proves nothing:
it is 0 after a host lost power and after MPI_Abort() without a code.
"""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIGNAL_HINTS = {
    signal.SIGKILL: "often out of memory",
    signal.SIGBUS: "often /dev/shm or a disk is full",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGABRT: "compiled code gave up; its message is above",
    signal.SIGILL: "compiled for another kind of CPU",
}


@dataclass
class RankRecord:
    """What is known of one rank.

    Attributes:
        rank: its rank.
        host: name of its machine.
        pid: process id of the user's command there.
        code: exit code, or minus the signal; None while it runs.
        ended: when the report of its end arrived (seconds, hvrun's clock).
        onset: when the traceback began that was its last word, if one was.
        stopped: whether hvrun had told it to end before it did.
        lost: whether its supervisor vanished without a report.
        done: whether nothing of it is left.
    """

    rank: int
    host: str
    pid: int
    code: int | None = None
    ended: float | None = None
    onset: float | None = None
    stopped: bool = False
    lost: bool = False
    done: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended badly by itself."""
        return bool(self.code) and not self.stopped

    @property
    def began(self) -> float:
        """When its failure began: a traceback comes before the exit it causes."""
        known = [t for t in (self.onset, self.ended) if t is not None]
        return min(known, default=float("inf"))


def first_failure(records: Iterable[RankRecord]) -> RankRecord | None:
    """The rank whose failure began first.

    A rank can print its traceback first and still be slow to exit, so one that
    hvrun had to stop counts if a traceback was its last word.
    """
    records = list(records)
    if not any(record.failed for record in records):
        return None
    suspects = [r for r in records if r.failed or (r.stopped and r.onset is not None)]
    return min(suspects, key=lambda record: (record.began, record.rank))


def exit_code(records: Iterable[RankRecord]) -> int:
    """The job's: that of the first rank that failed by itself, else 0."""
    failed = [record for record in records if record.failed]
    if not failed:
        return 0
    code = min(failed, key=lambda record: (record.began, record.rank)).code or 0
    return 128 - code if code < 0 else code


def describe(record: RankRecord) -> str:
    """One rank's end, in words."""
    who = f"rank {record.rank} on {record.host} (pid {record.pid})"
    code = record.code or 0
    if record.lost:
        return f"{who} is lost: its supervisor was killed or its host is gone"
    if record.stopped:
        return f"{who} failed and was stopped"
    if code >= 0:
        return f"{who} exited with code {code}"
    return f"{who} was {killed_by(-code)}"


def killed_by(number: int) -> str:
    """A death by signal, with the usual cause."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"killed by signal {number}"
    hint = SIGNAL_HINTS.get(signal.Signals(number))
    return f"killed by {name}" + (f", {hint}" if hint else "")


def followers(first: RankRecord, records: Iterable[RankRecord]) -> str | None:
    """One line that stands for all that the other ranks said about the failure."""
    others = sum(1 for r in records if r.failed and r is not first)
    if not others:
        return None
    return f"{others} other rank{'s' if others > 1 else ''} failed after it"


def report(
    first: RankRecord, records: Sequence[RankRecord], last_words: Sequence[bytes]
) -> list[tuple[int | None, bytes]]:
    """The last lines of a failed job, as (rank or None for hvrun, text).

    The most telling line comes last, where the eye is: the exception, or the
    signal, or the exit code.
    """
    told = [(first.rank, line) for line in last_words]
    cause: list[tuple[int | None, bytes]] = [(None, describe(first).encode())]
    count = followers(first, records)
    counted: list[tuple[int | None, bytes]] = [(None, count.encode())] if count else []
    by_signal = (first.code or 0) < 0 and not first.stopped
    if by_signal:
        return [*told, *counted, *cause]
    if told:
        return [*cause, *counted, *told]
    return [*counted, *cause]
