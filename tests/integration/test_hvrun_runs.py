"""Jobs that succeed: what ranks see, and what the user sees of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import BIN, Jobs

WORLD = """
from mpi4py import MPI
print(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}")
"""


# More ranks than the cores of a small machine must work too.
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_form_one_world(jobs: Jobs, size: int) -> None:
    outcome = jobs.run(size, ["python", "-c", WORLD])
    expected = [f"[{rank}] rank {rank} of {size}" for rank in range(size)]
    assert sorted(outcome.stdout.splitlines()) == expected, str(outcome)
    assert (outcome.code, outcome.stderr) == (0, "")


def test_ranks_get_the_environment_and_sensible_defaults(jobs: Jobs) -> None:
    program = (
        "import os;"
        "print(*[os.environ.get(n) for n in "
        "('HVLITE_LAUNCHED_SIZE', 'MINE', 'OMP_NUM_THREADS', 'HVLITE_LAUNCH_TOKEN')])"
    )
    env = {"MINE": "a b;$c", "OMP_NUM_THREADS": "7"}
    outcome = jobs.run(2, ["python", "-c", program], env=env)
    assert set(outcome.stdout.splitlines()) == {
        f"[{rank}] 2 a b;$c 7 None" for rank in (0, 1)
    }, str(outcome)


def test_lines_stay_whole_and_complete(jobs: Jobs) -> None:
    # Each rank writes its lines in pieces, as fast as it can, on both streams; the
    # last has no end and is not valid in any encoding.
    program = r"""
import os, sys
for number in range(300):
    for stream in (1, 2):
        os.write(stream, b"line ")
        os.write(stream, b"%d " % number + b"x" * 200 + b"\n")
os.write(1, b"last \xff\xfe")
"""
    outcome = jobs.run(3, ["python", "-c", program])
    assert outcome.code == 0, str(outcome)
    for text, last in (outcome.stdout, ["last \ufffd\ufffd"]), (outcome.stderr, []):
        for rank in range(3):
            prefix = f"[{rank}] "
            mine = [s[len(prefix) :] for s in text.split("\n") if s.startswith(prefix)]
            assert mine == [f"line {n} {'x' * 200}" for n in range(300)] + last
        assert len(text.splitlines()) == 3 * (300 + len(last))


def test_a_rank_that_ends_early_disturbs_nobody(jobs: Jobs, tmp_path: Path) -> None:
    program = """
import os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
if rank == 0:
    print("early")
    sys.exit()
sys.stdin = open(sys.argv[1])
sys.stdin.read()
print("late")
"""
    # The other rank ends when the test, having seen the first one end, says so.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    job = jobs.start(2, ["python", "-c", program, str(fifo)])
    job.wait_for_output("[0] early")
    fifo.open("w").close()
    outcome = job.wait()
    assert (outcome.code, outcome.stdout) == (0, "[0] early\n[1] late\n"), str(outcome)


def test_tracebacks_that_a_program_survives_are_shown_in_order(jobs: Jobs) -> None:
    program = """
import sys, traceback
print("before", file=sys.stderr)
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
print("after", file=sys.stderr)
"""
    outcome = jobs.run(1, ["python", "-c", program])
    lines = [line.strip() for line in outcome.stderr.splitlines()]
    assert outcome.code == 0, str(outcome)
    assert lines[:2] == ["[0] before", "[0] Traceback (most recent call last):"]
    assert lines[-2:] == ["[0] ZeroDivisionError: division by zero", "[0] after"]


def test_a_survived_traceback_is_shown_while_the_program_runs(
    jobs: Jobs, tmp_path: Path
) -> None:
    program = """
import sys, traceback
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
open(sys.argv[1]).read()
"""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    hvrun = [str(BIN / "hvrun"), "-np", "1", str(BIN / "python"), "-c"]
    job = jobs.start_bare(
        ["sh", "-c", 'exec "$@" 2>&1', "sh", *hvrun, program, str(fifo)]
    )
    job.wait_for_output("[0] ZeroDivisionError")
    fifo.open("w").close()
    assert job.wait().code == 0


def test_two_jobs_at_once(jobs: Jobs) -> None:
    both = [jobs.start(2, ["python", "-c", WORLD]) for _ in range(2)]
    for job in both:
        outcome = job.wait()
        assert outcome.code == 0, str(outcome)
        assert sorted(re.findall(r"rank \d of \d", outcome.stdout)) == [
            "rank 0 of 2",
            "rank 1 of 2",
        ]


def test_only_rank_0_may_wait_for_standard_input(jobs: Jobs) -> None:
    program = """
import os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
print(rank, sys.stdin.read() if rank else "does not read")
"""
    script = 'sleep 600 | exec "$@"'  # an input that does not end
    hvrun = [str(BIN / "hvrun"), "-np", "2", str(BIN / "python"), "-c", program]
    job = jobs.start_bare(["sh", "-c", script, "sh", *hvrun])
    job.wait_for_output("[1] 1 \n")
    job.kill()


@pytest.mark.parametrize("script", ['exec "$@" < "$0"', 'cat "$0" | exec "$@"'])
def test_rank_0_reads_files_and_pipes_to_their_end(
    jobs: Jobs, tmp_path: Path, script: str
) -> None:
    # mpirun's own forwarding never ends (Open MPI) or breaks down at 1 MB (MPICH).
    program = "import sys, time; time.sleep(0.2); print(len(sys.stdin.read()))"
    given = tmp_path / "given"
    given.write_bytes(b"x" * 3_000_000)
    hvrun = [str(BIN / "hvrun"), "-np", "2", str(BIN / "python"), "-c", program]
    outcome = jobs.start_bare(["sh", "-c", script, str(given), *hvrun]).wait(30)
    assert sorted(outcome.stdout.splitlines()) == ["[0] 3000000", "[1] 0"], str(outcome)


def test_a_reader_that_goes_away_ends_the_job(jobs: Jobs) -> None:
    program = "while True: print('again')"
    script = '{ "$@"; echo "code $?" >&2; } | head -n 1'
    hvrun = [str(BIN / "hvrun"), "-np", "2", str(BIN / "python"), "-c", program]
    outcome = jobs.start_bare(["sh", "-c", script, "sh", *hvrun]).wait()
    assert re.fullmatch(r"\[[01]\] again\n", outcome.stdout), str(outcome)
    assert outcome.stderr == "code 141\n", str(outcome)


def test_check_finds_this_environment_in_order(jobs: Jobs) -> None:
    outcome = jobs.start_bare(["hvrun", "--check"]).wait()
    assert "form a world of 2" in outcome.stdout, str(outcome)
    assert "everything fits together" in outcome.stdout, str(outcome)
    assert outcome.code == 0


def test_hvrun_itself_never_loads_mpi() -> None:
    program = """
import sys
from hvlite.launcher.cli import main
code = main(["-np", "2", "--dry-run", "true"])
loaded = {"mpi4py", "torch"} & set(sys.modules)
sys.exit(f"loaded: {loaded}" if loaded else code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
