"""The environment variables that the ranks get. Pure, but for counting cores."""

import os
import re
from collections.abc import Iterable, Mapping

from .mpirun import Dialect

# Visible to the user's program, where hvlite.init() compares it with the MPI world's.
SIZE = "HVLITE_LAUNCHED_SIZE"

# Variables that describe one machine or one login and are wrong on another.
_BOUND_TO_HOST = re.compile(
    r"(_|PWD|OLDPWD|SHLVL|HOME|HOSTNAME|HOST|DISPLAY|XAUTHORITY|TERM|TTY|TMPDIR"
    r"|LOGNAME|USER|MAIL|SHELL|LS_COLORS|XDG_.*|SSH_.*|DBUS_.*"
    r"|(OMPI|PMIX|PRTE|PMI|HYDRA)_(?!MCA).*)"
)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def job_environment(
    environ: Mapping[str, str],
    dialect: Dialect,
    size: int,
    ranks_here: int,
    *,
    one_host: bool,
) -> dict[str, str]:
    """The environment for the job: the user's, plus what he did not set himself.

    Args:
        environ: the environment of hvrun.
        dialect: the mpirun that will be used.
        size: number of ranks of the job.
        ranks_here: number of ranks that share this machine's cores.
        one_host: whether the job stays on this machine.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, available_cores() // ranks_here)),
        # A rank's print() shows at once and is not lost when the rank is killed.
        "PYTHONUNBUFFERED": "1",
    }
    if one_host:
        defaults |= _single_host_transports(dialect)
    return {**defaults, **environ, SIZE: str(size)}


def _single_host_transports(dialect: Dialect) -> dict[str, str]:
    """Skip Open MPI's search for fast networks, which takes a second at start.

    On one host no network is wanted. Across hosts the search must be made.
    """
    if dialect is Dialect.MPICH:
        return {}
    shared_memory = "vader" if dialect is Dialect.OPENMPI4 else "sm"
    return {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": f"self,{shared_memory},tcp",
    }


def forwarded_names(environment: Iterable[str]) -> list[str]:
    """The variables to hand to other hosts: all but those that describe this one."""
    return sorted(
        name
        for name in environment
        if _PLAIN_NAME.fullmatch(name) and not _BOUND_TO_HOST.fullmatch(name)
    )


def available_cores() -> int:
    """Cores this process may use: its affinity, cut by a container's CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min(cores, _cpu_quota("/sys/fs/cgroup/cpu.max") or cores))


def _cpu_quota(path: str) -> int | None:
    """Whole cores that control groups grant, rounded up; None for no limit."""
    try:
        with open(path) as file:
            quota, period = file.read().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None
