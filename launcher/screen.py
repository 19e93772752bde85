"""The one writer of hvrun's own stdout and stderr.

Lines of all ranks go through one queue in the order of their arrival, each written
whole. A write is made only when poll() says that it will not block, and at most
PIPE_BUF bytes at a time, so a reader that is slow or has stopped (a pager) never
keeps hvrun from acting on a signal or on a death.
"""

import os
import select
from collections import deque

from .lines import Line

# What poll() promises to take from us without blocking.
PIECE_BYTES = select.PIPE_BUF

# Without a terminal there is nothing to write over; a bar is shown this often.
BAR_INTERVAL_S = 10.0

_CLEAR = b"\r\x1b[K"


class Screen:
    """Queue of output, and the state of progress bars on a terminal.

    Attributes:
        broken: whether a reader of ours has gone away (``hvrun ... | head``).
    """

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self._terminal = {fd: os.isatty(fd) for fd in (out, err)}
        self._out = out
        self._err = err
        self._queue: deque[tuple[int, bytes]] = deque()
        self._bar_open = False
        self._bar_shown: dict[tuple[int, int], float] = {}
        self.broken = False

    def show(self, rank: int, line: Line, now: float, *, stderr: bool) -> None:
        """Show one line of a rank, marked with the rank."""
        fd = self._err if stderr else self._out
        text = b"[%d] %s" % (rank, line.text)
        if not line.transient:
            self._bar_shown.pop((fd, rank), None)
            self._put_line(fd, text)
        elif self._terminal[fd]:
            self._bar_open = True
            self._queue.append((fd, _CLEAR + _cut_to_width(text, fd)))
        elif now >= self._bar_shown.get((fd, rank), now) + BAR_INTERVAL_S:
            self._bar_shown[fd, rank] = now
            self._put_line(fd, text)
        else:
            self._bar_shown.setdefault((fd, rank), now)

    def note(self, text: bytes, prefix: bytes) -> None:
        """Show a line of the report, or of mpirun, on stderr."""
        self._put_line(self._err, prefix + text)

    def _put_line(self, fd: int, text: bytes) -> None:
        clear = b""
        if self._bar_open and self._terminal[fd]:
            clear, self._bar_open = _CLEAR, False
        self._queue.append((fd, clear + text + b"\n"))

    @property
    def empty(self) -> bool:
        """Whether everything has been written."""
        return not self._queue

    def waiting_for(self) -> int | None:
        """The descriptor that must become writable next; None if there is none."""
        return self._queue[0][0] if self._queue else None

    def advance(self) -> None:
        """Write as much as can be written without blocking."""
        while self._queue:
            fd, text = self._queue.popleft()
            while self._queue and self._queue[0][0] == fd:
                if len(text) + len(self._queue[0][1]) > PIECE_BYTES:
                    break
                text += self._queue.popleft()[1]
            written = self._write(fd, text[:PIECE_BYTES])
            if written < len(text):
                self._queue.appendleft((fd, text[written:]))
            if written == 0:
                return

    def _write(self, fd: int, piece: bytes) -> int:
        """Returns the bytes that need no further care: 0 if it would block."""
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        if not poll.poll(0):
            return 0
        try:
            return os.write(fd, piece)
        except BlockingIOError:
            return 0
        except OSError:
            # Gone (EPIPE), closed or full: drop the rest, and let the job know.
            self.broken = True
            self._queue = deque(item for item in self._queue if item[0] != fd)
            return len(piece)

    def close_bar(self) -> None:
        """Leave the cursor on a line of its own."""
        if self._bar_open:
            self._bar_open = False
            self._queue.append((self._err, b"\n"))


def _cut_to_width(text: bytes, fd: int) -> bytes:
    """Keep a bar on one row; a wrapped one could not be written over."""
    try:
        columns = os.get_terminal_size(fd).columns
    except OSError:
        return text
    if columns <= 0 or len(text) < columns:
        return text
    return text.decode(errors="replace")[: columns - 1].encode()
