"""Jobs that fail: the exit code, the last lines, and that nothing is left.

The ``jobs`` fixture fails a test that leaves a process or shared memory behind
five seconds after it; how long a job takes is bounded by waits alone.
"""

import os
import re
import signal
from collections.abc import Callable

import pytest

from tests.jobs import Job, Jobs

PRELUDE = """
import os, signal, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
"""
# The other ranks wait in MPI for a message that never comes.
IN_MPI = """
import hvlite
from mpi4py import MPI
hvlite.init()
hvlite.barrier()
if rank != int(sys.argv[1]):
    MPI.COMM_WORLD.recv()
"""

BAD_ENDS = {
    "sys.exit": ("sys.exit(3)", 3, "exited with code 3"),
    "os._exit": ("os._exit(3)", 3, "exited with code 3"),
    "killed": ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL, often out of mem"),
    "crash": ("os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV, a crash in"),
}


@pytest.mark.parametrize(
    ("how", "bad_rank"),
    [(how, n % 2 * 2) for n, how in enumerate(BAD_ENDS)],  # both the first and the last
)
def test_bad_end_of_one_rank_ends_the_job(jobs: Jobs, how: str, bad_rank: int) -> None:
    action, code, words = BAD_ENDS[how]
    program = PRELUDE + IN_MPI + action
    outcome = jobs.run(3, ["python", "-c", program, str(bad_rank)], timeout_s=30)
    assert outcome.code == code, str(outcome)
    last = outcome.stderr.splitlines()[-1]
    assert re.match(
        rf"hvrun: rank {bad_rank} on \S+ \(pid \d+\) (was )?{words}", last
    ), str(outcome)


def test_an_exception_ends_ranks_that_wait_in_mpi(jobs: Jobs) -> None:
    program = PRELUDE + IN_MPI + "raise ValueError('the cause')"
    outcome = jobs.run(3, ["python", "-c", program, "1"], timeout_s=30)
    assert outcome.code == 1, str(outcome)
    assert outcome.stderr.endswith("[1] ValueError: the cause\n"), str(outcome)


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_traceback_of_the_first_failing_rank_is_last(jobs: Jobs, bad_rank: int) -> None:
    # The other ranks see the end of a pipe when the first has failed, and raise too.
    program = PRELUDE + (
        "if rank == int(sys.argv[1]):\n"
        "    raise ValueError('the cause')\n"
        "time.sleep(0.7)\n"
        "raise RuntimeError('follow-up')\n"
    )
    outcome = jobs.run(3, ["python", "-c", program, str(bad_rank)], timeout_s=30)
    assert outcome.code == 1, str(outcome)
    lines = outcome.stderr.splitlines()
    assert lines[-1] == f"[{bad_rank}] ValueError: the cause", str(outcome)
    assert "hvrun: 2 other ranks failed after it" in lines, str(outcome)
    assert "follow-up" not in outcome.stderr, str(outcome)
    assert outcome.stderr.count("the cause") == 1, str(outcome)


def test_verbose_shows_the_follow_up_errors_first(jobs: Jobs) -> None:
    program = PRELUDE + (
        "time.sleep(rank * 0.7)\nraise ValueError(f'error of rank {rank}')\n"
    )
    outcome = jobs.run(2, ["--verbose", "python", "-c", program], timeout_s=30)
    lines = outcome.stderr.splitlines()
    assert lines[-1] == "[0] ValueError: error of rank 0", str(outcome)
    assert "[1] ValueError: error of rank 1" in lines, str(outcome)


def test_exit_code_of_a_shell_script(jobs: Jobs) -> None:
    outcome = jobs.run(2, ["sh", "-c", "exit 42"])
    assert outcome.code == 42, str(outcome)


def test_mpi_abort_is_a_failure_whatever_its_code(jobs: Jobs) -> None:
    for code, expected in (7, 7), (0, 1):
        program = PRELUDE + IN_MPI + f"MPI.COMM_WORLD.Abort({code})"
        outcome = jobs.run(2, ["python", "-c", program, "1"], timeout_s=30)
        assert outcome.code == expected, str(outcome)


# ---- signals and sudden deaths: ranks compute, with a helper in another session ----

BUSY = (
    PRELUDE
    + """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
)


def start_busy(jobs: Jobs) -> Job:
    job = jobs.start(2, ["python", "-c", BUSY])
    job.wait_for_output("[0] ready")
    job.wait_for_output("[1] ready")
    return job


def find(job: Job, pattern: str) -> int:
    pids = [pid for pid, line in job.processes().items() if re.search(pattern, line)]
    assert pids, f"no {pattern} in {job.processes()}"
    return pids[0]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_to_hvrun_ends_everything(
    jobs: Jobs, number: signal.Signals, code: int
) -> None:
    job = start_busy(jobs)
    os.kill(job.starter.pid, number)
    outcome = job.wait(30)
    assert outcome.code == code, str(outcome)
    assert not job.processes()  # already when hvrun returns
    assert outcome.stderr.splitlines()[-1].startswith(f"hvrun: ended by {number.name}")


SUPERVISOR = r"launcher.*rank import main"
VICTIMS: dict[str, tuple[Callable[[Job], int], int]] = {
    "rank": (lambda job: find(job, r"^\S*python\S* -c"), 137),
    "supervisor": (lambda job: find(job, rf"^\S*python\S* -P.*{SUPERVISOR}"), 137),
    "mpirun": (lambda job: find(job, r"^\S*(mpirun|prterun|mpiexec)"), 137),
    "hvrun": (lambda job: job.starter.pid, -9),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_sudden_death_of_any_part_takes_all_along(jobs: Jobs, victim: str) -> None:
    find_pid, code = VICTIMS[victim]
    job = start_busy(jobs)
    os.kill(find_pid(job), signal.SIGKILL)
    outcome = job.wait(30)
    assert outcome.code == code, str(outcome)
    if victim == "mpirun":
        assert "was killed by SIGKILL" in outcome.stderr, str(outcome)


# ---- what cannot be started ----

MISTAKES = {
    "no ranks": (["true"], r"-np, e.g. hvrun -np 2"),
    "zero ranks": (["-np", "0", "true"], r"-np 0: not a number"),
    "no command": (["-np", "2"], r"command is missing"),
    "unknown option": (
        ["-np", "2", "--bogus", "true"],
        r"unrecognized arguments: --bogus",
    ),
    "unknown command": (["-np", "2", "no-such-thing"], r"'no-such-thing' not found"),
    "bad host": (["-np", "2", "-H", "a:x", "true"], r"'x' in 'a:x'"),
    "few slots": (["-np", "3", "-H", "localhost:2", "true"], r"needs 3 slots"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_line_and_code_2(jobs: Jobs, mistake: str) -> None:
    arguments, words = MISTAKES[mistake]
    outcome = jobs.start_bare(["hvrun", *arguments]).wait()
    assert outcome.code == 2, str(outcome)
    assert re.match(rf"hvrun: .*{words}.*\n\Z", outcome.stderr), str(outcome)


def test_no_mpirun_names_the_remedy(jobs: Jobs) -> None:
    # As where no MPI is installed: the search finds nothing of the library's family.
    outcome = jobs.start_bare(
        ["hvrun", "-np", "1", "/bin/true"], env={"HVLITE_MPIRUN": "/nowhere/mpirun"}
    ).wait()
    assert outcome.code == 2, str(outcome)
    assert "HVLITE_MPIRUN=/nowhere/mpirun is not an mpirun" in outcome.stderr
