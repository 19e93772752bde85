"""Linux process control that the standard library lacks.

Two kernel features make sure that nothing outlives a job. The *death signal* is
sent to a process when its parent dies. A *subreaper* becomes the parent of all its
descendants whose own parents have died, so it can find and end every one of them,
whatever sessions or process groups they made.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Loaded at import, so that a child between fork and exec needs no lock for it.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def become_subreaper() -> None:
    """Adopt descendants whose parents die; without effect outside Linux."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(signum: int, parent: int) -> None:
    """Have the kernel send ``signum`` to this process when ``parent`` dies.

    Args:
        signum: the signal.
        parent: process id of the parent. It may have died before the kernel was
            told; then the signal is sent here and now.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def children() -> list[int]:
    """Process ids of this process's own and adopted children, zombies included."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as file:
                pids += [int(pid) for pid in file.read().split()]
    return pids


def reap(statuses: dict[int, int]) -> None:
    """Collect every child that has ended; ``statuses`` maps pid to wait status."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            statuses[pid] = status


def end_children(statuses: dict[int, int], limit_s: float = 3.0) -> None:
    """Kill all children, those that they leave behind, and so on; collect them.

    Args:
        statuses: receives the wait status of each.
        limit_s: how long to wait for processes that do not die even when killed
            (stuck in a device driver).
    """
    deadline = time.monotonic() + limit_s
    while True:
        reap(statuses)
        alive = children()
        if not alive or time.monotonic() > deadline:
            return
        for pid in alive:
            # A child stays a zombie until reap(), so its pid cannot be another's.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
