"""How hvlite starts, ends and fails, seen from outside the process."""

import os
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.jobs import Job, Jobs, Starter

STARTERS = ("hvrun", "mpirun")


def python(program: str) -> list[str]:
    """The command that runs `program`, unbuffered."""
    return ["python", "-u", "-c", dedent(program)]


def in_one_process(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `program` alone, without a launcher."""
    return subprocess.run(
        [sys.executable, *python(program)[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **env},
    )


RANK_1_FAILS = """
    import sys, time
    import numpy as np
    import hvlite as hvd
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        {failure}
    {meanwhile}
    print("not reached")
"""
# What the other ranks do while rank 1 fails: wait for it in hvlite, or elsewhere.
MEANWHILE = {
    "waiting": 'hvd.allreduce(np.ones(2), name="needs 1")',
    "computing": "time.sleep(600)",
}


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_an_uncaught_exception_ends_the_job_with_its_traceback_last(
    jobs: Jobs, starter: Starter, meanwhile: str
) -> None:
    program = RANK_1_FAILS.format(
        failure='raise ValueError("bad batch")', meanwhile=MEANWHILE[meanwhile]
    )
    outcome = jobs.run(2, python(program), starter=starter, timeout_s=30)
    assert outcome.code not in (0, -1), str(outcome)
    assert "not reached" not in outcome.stdout
    ours = [line for line in outcome.stderr.splitlines() if "Error" in line]
    assert ours, str(outcome)
    assert "ValueError: bad batch" in ours[-1], str(outcome)


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_failing_exit_ends_the_job(
    jobs: Jobs, starter: Starter, meanwhile: str
) -> None:
    program = RANK_1_FAILS.format(failure="sys.exit(3)", meanwhile=MEANWHILE[meanwhile])
    outcome = jobs.run(2, python(program), starter=starter, timeout_s=30)
    assert outcome.code == 3, str(outcome)


@pytest.mark.parametrize("starter", STARTERS)
def test_an_early_end_with_code_0_is_told_to_those_who_need_the_rank(
    jobs: Jobs, starter: Starter
) -> None:
    program = RANK_1_FAILS.format(failure="sys.exit(0)", meanwhile=MEANWHILE["waiting"])
    outcome = jobs.run(2, python(program), starter=starter, timeout_s=30)
    assert outcome.code not in (0, -1), str(outcome)
    assert "RankLeftError: allreduce 'needs 1': rank 1 has left: it" in outcome.stderr
    assert "do all ranks run equally many steps?" in outcome.stderr


@pytest.mark.parametrize("starter", STARTERS)
def test_an_early_end_that_nobody_minds_is_fine(jobs: Jobs, starter: Starter) -> None:
    program = """
        import hvlite as hvd
        hvd.init()
        if hvd.rank() == 0:
            for step in range(100):
                hvd.stats()
            print("rank 0 is done")
    """
    outcome = jobs.run(2, python(program), starter=starter, timeout_s=60)
    assert outcome.code == 0, str(outcome)
    assert "rank 0 is done" in outcome.stdout


def test_a_caught_exit_changes_nothing(jobs: Jobs) -> None:
    program = """
        import sys
        import hvlite as hvd
        hvd.init()
        try:
            sys.exit(3)
        except SystemExit as exit:
            print("caught", exit.code)
        hvd.barrier()
    """
    outcome = jobs.run(2, python(program), starter="mpirun")
    assert outcome.code == 0, str(outcome)
    assert outcome.stdout.count("caught 3") == 2


def test_init_and_shutdown_a_hundred_times_leak_nothing(jobs: Jobs) -> None:
    program = """
        import gc, os, threading
        import numpy as np
        import hvlite as hvd

        def resources():
            gc.collect()
            with open("/proc/self/statm") as statm:
                pages = int(statm.read().split()[1])
            return len(os.listdir("/proc/self/fd")), threading.active_count(), pages

        def round():
            hvd.init()
            hvd.allreduce(np.ones(300_000), op=hvd.Sum)
            hvd.shutdown()

        for _ in range(10):
            round()
        files, threads, pages = resources()
        for _ in range(90):
            round()
        files_now, threads_now, pages_now = resources()
        assert (files_now, threads_now) == (files, threads), (files, files_now)
        grown = (pages_now - pages) * os.sysconf("SC_PAGE_SIZE")
        assert grown < 8 << 20, f"{grown} bytes more after 90 rounds"
        print("clean")
    """
    outcome = jobs.run(2, python(program), timeout_s=80)
    assert outcome.code == 0, str(outcome)
    assert outcome.stdout.count("clean") == 2


def test_a_forked_child_is_refused_and_harmless(jobs: Jobs) -> None:
    program = """
        import os, sys
        import numpy as np
        import hvlite as hvd
        hvd.init()
        child = os.fork()
        if not child:
            for call in (hvd.rank, hvd.init, lambda: hvd.allreduce(np.ones(1))):
                try:
                    call()
                except hvd.NotInitializedError as error:
                    assert "forked from a rank" in str(error), error
                else:
                    os._exit(7)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        print(hvd.allreduce(np.ones(1), op=hvd.Sum))
    """
    outcome = jobs.run(2, python(program))
    assert outcome.code == 0, str(outcome)
    assert outcome.stdout.count("[2.]") == 2


def test_a_communicator_of_the_users_own_is_duplicated(jobs: Jobs) -> None:
    program = """
        from mpi4py import MPI
        import numpy as np
        import hvlite as hvd
        world = MPI.COMM_WORLD
        hvd.init(world.Split(world.rank % 2, world.rank))
        assert hvd.size() == (2 if world.rank % 2 == 0 else 1)
        total = hvd.allreduce(np.array(world.rank), op=hvd.Sum)
        assert total == (2 if world.rank % 2 == 0 else 1)
        hvd.shutdown()
        world.Barrier()
        if world.rank < 2:
            hvd.init([0, 1])
            assert hvd.size() == 2
            assert hvd.allreduce(np.array(world.rank), op=hvd.Sum) == 1
        else:
            try:
                hvd.init([0, 1])
            except hvd.UsageError as error:
                print(error)
    """
    outcome = jobs.run(3, python(program))
    assert outcome.code == 0, str(outcome)
    assert "world rank 2, which is not among the ranks given" in outcome.stdout


def test_one_process_needs_no_launcher_and_no_mpi() -> None:
    program = """
        import sys
        sys.modules["mpi4py"] = None  # as if it could not be imported
        import numpy as np
        import hvlite as hvd
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (0, 1)
        print(hvd.allreduce(np.arange(3.0), op=hvd.Sum))
    """
    outcome = in_one_process(program)
    assert (outcome.returncode, outcome.stdout) == (0, "[0. 1. 2.]\n"), outcome.stderr


def test_an_exception_in_one_process_stays_as_python_has_it() -> None:
    outcome = in_one_process("import hvlite; hvlite.init(); raise ValueError('x')")
    assert outcome.returncode == 1
    assert outcome.stderr.splitlines()[-1] == "ValueError: x"


def test_a_launcher_of_another_mpi_is_named() -> None:
    program = "import hvlite; hvlite.init()"
    outcome = in_one_process(program, HVLITE_LAUNCHED_SIZE="2")
    last = outcome.stderr.splitlines()[-1]
    assert outcome.returncode == 1
    assert (
        "LaunchError: the launcher started 2 ranks, but MPI sees a world of 1" in last
    )
    assert "hvrun --check" in last


@pytest.mark.parametrize(
    ("variable", "value", "accepts"),
    [
        ("HVLITE_FUSION_THRESHOLD", "64MB", "a number of bytes"),
        ("HOROVOD_CACHE_CAPACITY", "-1", "a number of requests"),
        ("HVLITE_ALLREDUCE", "fast", "one of auto, shm, ring, hierarchical"),
        ("HVLITE_STALL_CHECK_TIME_SECONDS", "soon", "seconds"),
    ],
)
def test_a_setting_that_is_not_understood_is_named(
    variable: str, value: str, accepts: str
) -> None:
    outcome = in_one_process("import hvlite; hvlite.init()", **{variable: value})
    last = outcome.stderr.splitlines()[-1]
    assert outcome.returncode == 1
    assert last.startswith(f"hvlite.errors.UsageError: {variable}='{value}' is not")
    assert f"it must be {accepts}" in last


def test_shared_memory_that_is_refused_means_the_ring_and_one_warning(
    jobs: Jobs,
) -> None:
    program = """
        import numpy as np
        from hvlite.collectives import segments
        segments.create.__defaults__ = ((),)  # no method is allowed
        import hvlite as hvd
        hvd.init()
        print(hvd.allreduce(np.ones(3), op=hvd.Sum), hvd.local_size())
    """
    outcome = jobs.run(2, python(program))
    assert outcome.code == 0, str(outcome)
    assert outcome.stdout.count("[2. 2. 2.] 2") == 2
    assert outcome.stderr.count("cannot share") == 1
    assert "/dev/shm" in outcome.stderr


@pytest.mark.parametrize("victim", ["rank 1", "starter"])
@pytest.mark.parametrize("starter", STARTERS)
def test_sigkill_leaves_nothing_behind(
    jobs: Jobs, starter: Starter, victim: str
) -> None:
    program = """
        import os
        import numpy as np
        import hvlite as hvd
        hvd.init()
        hvd.allreduce(np.ones(1 << 20))
        print(f"rank {hvd.rank()} is pid {os.getpid()};", flush=True)
        while True:
            hvd.allreduce(np.ones(1 << 20))
    """
    job = jobs.start(2, python(program), starter=starter)
    job.wait_for_output("rank 1 is pid")
    job.wait_for_output("rank 0 is pid")
    kill(job, victim)
    assert job.wait(30).code != 0


def kill(job: Job, victim: str) -> None:
    """Kills the process that started the job, or that rank of it."""
    if victim == "starter":
        job.starter.kill()
        return
    pid = job.so_far().stdout.split(f"{victim} is pid ")[1].split(";")[0]
    os.kill(int(pid), signal.SIGKILL)
