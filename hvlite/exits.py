"""How a failing rank ends: at once, with its own code, and not in MPI_Finalize.

A rank whose interpreter exits finalizes MPI, which waits for all others; they may wait
for this one in turn, or compute for hours. So after an uncaught exception or a non-zero
`sys.exit` the process ends without finalizing, and the launcher ends the job. All other
exits stay as they are. Used on the main thread alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from types import TracebackType

INTERRUPTED = 130  # the shells' code for an end by SIGINT

_failing_code = 0
_watching = False


class _Exit(SystemExit):
    """The SystemExit of `sys.exit`, which notices whether it really ends the process.

    When nobody catches it, it is deleted after the last Python frame has gone.
    """

    def __del__(self) -> None:
        frame = sys._getframe(0)  # the documented way to see the caller
        if frame.f_back is None:
            _fail_with(_exit_code(self.code))


def watch(several_ranks: bool) -> None:  # one meaning, one caller
    """Begin to notice failing exits; only where other ranks could be kept waiting."""
    global _watching  # the process ends once
    if _watching or not several_ranks:
        return
    _watching = True
    sys.exit = _exit
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        previous(kind, value, trace)
        if not hasattr(sys, "ps1") and not sys.flags.interactive:
            _fail_with(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def end_if_failed() -> None:
    """End the process now if it is exiting with a failure."""
    if _failing_code:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_failing_code)


def _exit(status: Any = None, /) -> NoReturn:  # noqa: ANN401  # as sys.exit has it
    """Exit the interpreter, or this thread, by raising SystemExit(status)."""
    if threading.current_thread() is threading.main_thread():
        raise _Exit(status)
    raise SystemExit(status)


def _exit_code(status: object) -> int:
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


def _fail_with(code: int) -> None:
    global _failing_code  # the process ends once
    _failing_code = code
