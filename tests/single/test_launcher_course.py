"""The course of a job and its verdict: events and times in, orders and words out."""

import signal

import pytest
from hvlite.launcher import course as course_module
from hvlite.launcher import verdict, wire
from hvlite.launcher.course import Course, Order
from hvlite.launcher.records import RankRecord
from hvlite.launcher.verdict import HVRUN, MPIRUN, JobFacts, judge
from hypothesis import given
from hypothesis import strategies as st

SIGTERM = Order(wire.SIGNAL, b"15")
SIGINT = Order(wire.SIGNAL, b"2")
KILL = Order(wire.KILL)
BYE = Order(wire.BYE)


def running(size: int = 3) -> Course:
    course = Course(size)
    for rank in range(size):
        course.started(RankRecord(rank, f"host{rank}", 100 + rank), 0.0)
    return course


def orders(course: Course, now: float) -> list[Order]:
    return list(course.advance(now))


def end(course: Course, rank: int, code: int, now: float) -> None:
    course.exited(rank, code, now)
    course.done(rank)


def test_ranks_are_dismissed_when_all_are_done() -> None:
    course = running()
    for rank in range(3):
        assert orders(course, 1.0) == []
        end(course, rank, 0, 1.0)
    assert orders(course, 1.0) == [BYE]
    assert not course.over
    course.mpirun_ended(0, 1.1)
    assert course.over
    assert not course.mpirun_early


def test_one_that_ends_well_early_ends_nothing() -> None:
    course = running()
    end(course, 0, 0, 1.0)
    assert orders(course, 1e6) == []
    assert not course.ending


def test_after_the_first_failure_the_others_get_a_grace_then_more() -> None:
    course = running()
    end(course, 1, 3, 10.0)
    assert course.ending
    assert orders(course, 10.0) == []
    term = 10.0 + course_module.GRACE_S
    assert course.deadline() == term
    assert orders(course, term) == [SIGTERM]
    kill = term + course_module.TERM_S
    assert orders(course, kill) == [KILL]
    # Within the five seconds that are promised, with room for what is left to do.
    assert kill + 1.5 < 15.0
    assert orders(course, kill + course_module.KILL_S) == []
    assert course.over


def test_those_stopped_have_not_failed() -> None:
    course = running()
    end(course, 1, 3, 10.0)
    end(course, 2, 1, 10.1)
    orders(course, 20.0)
    end(course, 0, -signal.SIGTERM, 20.1)
    records = list(course.records.values())
    assert verdict.exit_code(records) == 3
    assert verdict.followers(records[1], records) == "1 other rank failed after it"


@pytest.mark.parametrize(
    ("number", "first"),
    [(signal.SIGINT, SIGINT), (signal.SIGTERM, SIGTERM), (signal.SIGHUP, SIGTERM)],
)
def test_a_user_ends_the_job(number: int, first: Order) -> None:
    course = running()
    course.interrupted(number, 5.0)
    assert orders(course, 5.0) == [first]
    assert orders(course, 5.0 + course_module.USER_TERM_S) == [KILL]


def test_a_second_signal_kills_at_once() -> None:
    course = running()
    course.interrupted(signal.SIGINT, 5.0)
    assert orders(course, 5.0) == [SIGINT]
    course.interrupted(signal.SIGINT, 5.1)
    assert orders(course, 5.1) == [KILL]


def test_without_mpirun_the_ranks_are_killed() -> None:
    course = running()
    course.mpirun_ended(-9, 5.0)
    assert not course.over
    assert orders(course, 5.0) == [KILL]
    for rank in range(3):
        end(course, rank, -9, 5.1)
    assert course.over


def test_one_that_starts_while_the_job_ends_is_killed() -> None:
    course = Course(2)
    course.started(RankRecord(0, "h", 1), 0.0)
    end(course, 0, 1, 1.0)
    assert orders(course, 1.0 + course_module.GRACE_S) == [SIGTERM]
    course.started(RankRecord(1, "h", 2), 2.1)
    assert orders(course, 2.1) == [KILL]


def test_a_vanished_supervisor_is_a_failure() -> None:
    course = running()
    course.lost(1, 2.0)
    assert course.ending
    first = verdict.first_failure(course.records.values())
    assert first is course.records[1]
    assert "is lost" in verdict.describe(first)


def test_ranks_that_never_start_end_the_job() -> None:
    course = Course(2)
    course.started(RankRecord(0, "h", 1), 1.0)
    late = 1.0 + course_module.START_S
    assert course.deadline() == late
    assert orders(course, late) == [KILL]
    assert course.missing == 1
    facts = JobFacts(list(course.records.values()), missing=1, mpirun_code=None)
    code, lines = judge(facts)
    assert code == 1
    assert lines[-1][1].startswith(b"1 of 2 ranks did not start")


def test_ranks_that_have_all_started_may_run_forever() -> None:
    course = running(2)
    assert course.deadline() is None
    assert orders(course, 1e9) == []


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["exit", "done", "lost", "signal", "mpirun"]),
        st.integers(0, 2),
        st.sampled_from([0, 1, 3, -9, -15]),
    ),
    max_size=12,
)


@given(EVENTS)
def test_every_job_that_begins_to_end_is_over_within_bounds(
    events: list[tuple[str, int, int]],
) -> None:
    course, now = running(), 0.0
    ended: set[int] = set()
    for kind, rank, code in events:
        now += 0.1
        if kind == "exit" and rank not in ended:
            ended.add(rank)
            course.exited(rank, code, now)
        elif kind == "done" and rank in ended:
            course.done(rank)
        elif kind == "lost":
            ended.add(rank)
            course.lost(rank, now)
        elif kind == "signal":
            course.interrupted(signal.SIGTERM, now)
        elif kind == "mpirun" and course.mpirun_code is None:
            course.mpirun_ended(code, now)
        orders(course, now)
    if course.ending:
        for _ in range(10):
            now += 3.0
            orders(course, now)
        assert course.over


# ---- the verdict ----


def record(rank: int, code: int, ended: float, **more: bool | float) -> RankRecord:
    made = RankRecord(rank, "h", 100 + rank, code=code, ended=ended, done=True)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_success_says_nothing() -> None:
    facts = JobFacts([record(0, 0, 1.0), record(1, 0, 2.0)], mpirun_code=1)
    assert judge(facts) == (0, [])


def test_the_traceback_that_began_first_is_the_cause() -> None:
    slow_to_exit = record(1, 1, 9.0, onset=1.0)
    follower = record(0, 3, 2.0, onset=1.5)
    words = {1: [b"Traceback", b"ValueError"], 0: [b"Traceback", b"RuntimeError"]}
    code, lines = judge(JobFacts([follower, slow_to_exit], words))
    assert code == 1
    assert lines == [
        (HVRUN, b"rank 1 on h (pid 101) exited with code 1"),
        (HVRUN, b"1 other rank failed after it"),
        (b"[1] ", b"Traceback"),
        (b"[1] ", b"ValueError"),
    ]


def test_a_traceback_counts_even_if_its_rank_had_to_be_stopped() -> None:
    hung = record(1, -15, 9.0, onset=1.0, stopped=True)
    follower = record(0, 3, 2.0)
    code, lines = judge(JobFacts([follower, hung], {1: [b"ValueError"]}))
    assert code == 3
    assert lines[-1] == (b"[1] ", b"ValueError")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, b"killed by SIGKILL, often out of memory"),
        (signal.SIGSEGV, b"killed by SIGSEGV, a crash in compiled code"),
        (signal.SIGUSR1, b"killed by SIGUSR1"),
        (signal.SIGRTMIN + 3, b"killed by signal"),
    ],
)
def test_a_death_by_signal_is_the_last_line(number: int, words: bytes) -> None:
    facts = JobFacts([record(0, 1, 3.0), record(1, -number, 2.0)], {1: [b"last"]})
    code, lines = judge(facts)
    assert code == 128 + number
    assert lines[-1][1].startswith(b"rank 1 on h (pid 101) was " + words)
    assert (b"[1] ", b"last") in lines


def test_mpirun_ends_the_others_by_sigterm_so_that_is_no_cause() -> None:
    facts = JobFacts([record(0, -signal.SIGTERM, 1.0), record(1, 7, 1.1)])
    assert judge(facts)[0] == 7


def test_what_mpi_ended_is_told_in_its_own_words() -> None:
    said = [b"MPI_ABORT was invoked on rank 1"]
    terminated = [record(rank, -signal.SIGTERM, 1.0) for rank in range(2)]
    code, lines = judge(JobFacts(terminated, mpirun_said=said))
    assert code == 1
    assert lines[0] == (MPIRUN, said[0])
    assert lines[-1][1].startswith(b"MPI ended the job with code 0")


def test_a_launch_that_failed_is_told_in_mpiruns_words() -> None:
    facts = JobFacts([], mpirun_code=6, mpirun_early=True, mpirun_said=[b"no route"])
    code, lines = judge(facts)
    assert code == 6
    assert lines[0] == (MPIRUN, b"no route")
    assert b"could not start the ranks" in lines[-1][1]


def test_a_killed_mpirun_is_named() -> None:
    lost = [record(0, -9, 1.0, lost=True)]
    facts = JobFacts(lost, mpirun_code=-9, mpirun_early=True, mpirun_pid=42)
    code, lines = judge(facts)
    assert (code, lines[-1][0]) == (137, HVRUN)
    assert lines[-1][1].startswith(b"mpirun (pid 42) was killed by SIGKILL")


def test_the_users_signal_is_the_exit_code() -> None:
    facts = JobFacts([record(0, 1, 1.0)], ended_by=signal.SIGINT)
    code, lines = judge(facts)
    assert code == 130
    assert lines[-1][1] == b"ended by SIGINT; nothing is left running"
