"""Who failed first, the job's exit code, and how to say it. Pure.

The verdict rests on what the supervisors report. mpirun's exit code proves nothing:
it is 0 after a host lost power and after MPI_Abort() without a code.
"""

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .records import RankRecord

SIGNAL_HINTS = {
    signal.SIGKILL: "often out of memory",
    signal.SIGBUS: "often /dev/shm or a disk is full",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGABRT: "compiled code gave up; its message is above",
    signal.SIGILL: "compiled for another kind of CPU",
}


def first_failure(records: Iterable[RankRecord]) -> RankRecord | None:
    """The rank whose failure began first.

    A rank can print its traceback first and still be slow to exit, so one that
    hvrun had to stop counts if a traceback was its last word.
    """
    records = list(records)
    if not any(record.failed for record in records):
        return None
    suspects = [r for r in records if r.failed or (r.stopped and r.onset is not None)]
    return min(suspects, key=_precedence)


def exit_code(records: Iterable[RankRecord]) -> int:
    """The job's: that of the first rank that failed by itself, else 0."""
    failed = [record for record in records if record.failed]
    if not failed:
        return 0
    return shell_code(min(failed, key=_precedence).code or 0)


def _precedence(record: RankRecord) -> tuple[bool, float, int]:
    # SIGTERM is what mpirun sends to the others, so it is rarely the cause.
    ended_by_mpirun = record.code == -signal.SIGTERM and not record.stopped
    return ended_by_mpirun, record.began, record.rank


def shell_code(code: int) -> int:
    """An exit code as shells write it: 128 + n for a death by signal n."""
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


@dataclass
class JobFacts:
    """All that the verdict rests on.

    Attributes:
        records: one for each rank that started.
        last_words: the traceback that ended a rank's stderr, by rank.
        ended_by: the signal by which a user ended the job, if one did.
        missing: number of ranks that never reported, if that ended the job.
        mpirun_pid: its process id.
        mpirun_code: how mpirun ended (minus a signal); None if it did not.
        mpirun_early: whether it ended before the ranks were dismissed.
        mpirun_said: its own output.
        told: whether the user has seen that already.
    """

    records: Sequence[RankRecord]
    last_words: Mapping[int, Sequence[bytes]] = field(default_factory=dict)
    ended_by: int | None = None
    missing: int = 0
    mpirun_pid: int = 0
    mpirun_code: int | None = 0
    mpirun_early: bool = False
    mpirun_said: Sequence[bytes] = ()
    told: bool = False

    @property
    def mpi_ended_it(self) -> bool:
        """Whether MPI ended the job over the heads of the ranks.

        MPI_Abort() makes mpirun kill all ranks at once, supervisors included, and
        the failure of a whole launch leaves nothing but mpirun's words.
        """
        first = first_failure(self.records)
        if first is None:
            unfinished = any(record.code != 0 for record in self.records)
            return self.mpirun_early and (unfinished or not self.records)
        if first.lost:
            # 9 and 137 is what mpirun makes of a supervisor that was killed.
            return self.mpirun_code not in (None, signal.SIGKILL, 128 + signal.SIGKILL)
        aborted = any(b"MPI_ABORT" in line for line in self.mpirun_said)
        return first.code == -signal.SIGTERM and aborted


Lines = list[tuple[bytes, bytes]]
HVRUN = b"hvrun: "
MPIRUN = b"[mpirun] "


def judge(facts: JobFacts) -> tuple[int, Lines]:
    """The job's exit code, and its last lines, each as (prefix, text)."""
    if facts.ended_by == signal.SIGPIPE:
        return 128 + signal.SIGPIPE, []
    if facts.ended_by is not None:
        name = signal.Signals(facts.ended_by).name
        text = f"ended by {name}; nothing is left running"
        return 128 + facts.ended_by, [(HVRUN, text.encode())]
    if facts.missing or facts.mpi_ended_it:
        return _blame_mpi(facts)
    first = first_failure(facts.records)
    if first is None:
        return 0, []
    words = facts.last_words.get(first.rank, ())
    return exit_code(facts.records), _report(first, facts.records, words)


def _report(
    first: RankRecord, records: Sequence[RankRecord], last_words: Sequence[bytes]
) -> Lines:
    """The most telling line comes last: the exception, or the death, or the code."""
    told = [(b"[%d] " % first.rank, line) for line in last_words]
    cause = [(HVRUN, describe(first).encode())]
    count = followers(first, records)
    counted = [(HVRUN, count.encode())] if count else []
    if (first.code or 0) < 0 and not first.stopped:
        return [*told, *counted, *cause]
    if told:
        return [*cause, *counted, *told]
    return [*counted, *cause]


def _blame_mpi(facts: JobFacts) -> tuple[int, Lines]:
    code = facts.mpirun_code or 0
    said = [(MPIRUN, line) for line in facts.mpirun_said if not facts.told]
    if facts.missing:
        text = (
            f"{facts.missing} of {facts.missing + len(facts.records)} ranks did not"
            " start; what mpirun said is above, and --verbose shows its command line"
        )
        code = 1
    elif code < 0:
        text = f"mpirun (pid {facts.mpirun_pid}) was {killed_by(-code)}"
    elif facts.records:
        text = (
            f"MPI ended the job with code {code}: MPI_Abort() was called, or MPI"
            " itself failed; what was said about it is above"
        )
    else:
        text = (
            f"mpirun could not start the ranks and ended with code {code}; its words"
            " are above, and `hvrun --check` tells whether the installation fits"
        )
    return shell_code(code) or 1, [*said, (HVRUN, text.encode())]
