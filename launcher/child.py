"""Between fork and exec: a supervisor's child becomes the user's command."""

import os
import signal
from collections.abc import Iterable
from typing import NoReturn

from . import processes

CANNOT_EXECUTE = 126
NOT_FOUND = 127


def become(command: list[str], supervisor: int, handled: Iterable[int]) -> NoReturn:
    """Turn this forked process into the user's command.

    Args:
        command: the program and its arguments.
        supervisor: process id of the parent, with which the command is to die.
        handled: signals whose default action is to be restored.
    """
    # A group of its own: mpirun signals the supervisor's group, and Ctrl-C to the
    # child must reach what the child started but not the supervisor.
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    # Python ignores the last two; a program expects to find them as they were.
    for number in (*handled, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    processes.die_with_parent(signal.SIGKILL, supervisor)
    try:
        # Open MPI and MPICH hand down sockets by number (PMI_FD), so every
        # descriptor that mpirun let us inherit is passed on; those that Python
        # opened here close by themselves.
        os.execvp(command[0], command)
    except OSError as error:
        reason = error.strerror or str(error)
        os.write(2, f"hvrun: cannot run {command[0]}: {reason}\n".encode())
        missing = isinstance(error, FileNotFoundError)
        os._exit(NOT_FOUND if missing else CANNOT_EXECUTE)
