"""Runs at the start of every Python of a rank: lets it ask before it finalizes MPI.

MPI_Finalize waits for all ranks. A rank that fails would wait there for the others,
which wait for it, and nobody would ever learn its exit code. Nothing inside a Python
that exits can tell the code either (``raise SystemExit(3)`` leaves no trace), but its
parent can, once it has exited. So mpi4py is told not to finalize by itself, and the
last thing that an exiting rank does is to ask hvrun, through its supervisor: "yes" if
all ranks ask, then they finalize together; "no" if any goes on or has ended otherwise,
then this one exits without, and its supervisor stays in its place, so that MPI does
not mind.

This file is found through PYTHONPATH, which rank.py sets. It knows nothing of the rest
of the package, and passes on to a sitecustomize that the user may have.
"""

import atexit
import contextlib
import os
import select
import sys

EXIT_GATE = "HVLITE_EXIT_GATE"  # as in environment.py
YES = b"y"  # as in wire.py
PROGRESS_MS = 5


def _hand_over() -> None:
    """Import the sitecustomize that Python would have found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401  # another file of that name
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)


def _find_gate() -> int | None:
    """The inherited socket; None if this process has another file in its place."""
    descriptor, _, inode = os.environ.get(EXIT_GATE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if os.fstat(int(descriptor)).st_ino == int(inode):
            return int(descriptor)
    return None


def _leave(gate: int, process: int) -> None:
    """Finalize MPI if this rank uses it and all others are about to, too."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or os.getpid() != process:
        return
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if getattr(sys, "last_value", None) is not None:
        return  # an exception ends this rank, so there is nothing to ask
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        os.write(gate, b"?")
        poll = select.poll()
        poll.register(gate, select.POLLIN)
        while not poll.poll(PROGRESS_MS):
            # MPI makes progress only when it is called, and may still have to send.
            with contextlib.suppress(Exception):
                mpi.COMM_WORLD.Iprobe()
        if os.read(gate, 1) == YES:
            mpi.Finalize()


def _begin() -> None:
    gate = _find_gate()
    if gate is not None:
        # Registered first, so called last: after all that may still use MPI.
        atexit.register(_leave, gate, os.getpid())


if __name__ == "sitecustomize":
    _begin()
    _hand_over()
