"""Standard input: rank 0 reads what hvrun was given to read, the others nothing.

mpirun's own forwarding would not do: Open MPI 5 never tells the rank that the input
has ended, and MPICH ends the whole job if the rank reads slowly. So rank 0 opens
hvrun's input again, by its path in /proc. Nothing is copied, and nothing is consumed
that the program does not read. It takes a rank 0 on hvrun's machine, and a file or a
pipe; a terminal stays hvrun's, for its Ctrl-C.
"""

import os
import stat
import sys

NOTHING = ""


def offer() -> str:
    """The half of hvrun: "offset path" of its standard input, or NOTHING."""
    if sys.stdin is None:
        return NOTHING  # closed, and the descriptor may be another file by now
    kind = os.fstat(0).st_mode
    path = f"/proc/{os.getpid()}/fd/0"
    if stat.S_ISFIFO(kind):
        return f"0 {path}"
    return f"{os.lseek(0, 0, os.SEEK_CUR)} {path}" if stat.S_ISREG(kind) else NOTHING


def take(offered: str) -> None:
    """The half of a rank: make it this process's standard input."""
    source = _reopen(offered) if offered else None
    if source is None:
        source = os.open(os.devnull, os.O_RDONLY)
    os.dup2(source, 0)


def _reopen(offered: str) -> int | None:
    offset, _, path = offered.partition(" ")
    try:
        # A named pipe whose writer has gone would block.
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        os.write(2, f"hvrun: no standard input for rank 0 ({error})\n".encode())
        return None
    os.set_blocking(source, True)
    if int(offset):
        os.lseek(source, int(offset), os.SEEK_SET)
    return source
