"""What hvlite raises: the type says whose fault it is, the text gives the facts.

    HvliteError(RuntimeError)           base; also exported as HorovodInternalError
    ├── NotInitializedError    init() was not called, or shutdown() was
    ├── MismatchError          the ranks submitted different things under one name
    ├── StallError             ranks wait for each other, or one waited too long
    ├── RankLeftError          a rank that is needed has left (its cause is told)
    ├── AbortedError           an operation failed on one rank while it ran
    ├── EngineError            the engine itself died: a bug in hvlite
    ├── TransportError         a message between ranks failed or did not fit
    ├── SharedMemoryError      ranks of a node cannot share memory
    └── LaunchError            MPI, its launcher and the environment do not fit
    UsageError(ValueError)              a wrong argument; nothing was submitted
    └── DuplicateNameError     the name is already in flight on this rank

Errors of the first group concern several ranks: catch `HvliteError` to handle them
all. Errors of the second group are raised by the call itself, before anything is
sent, and change nothing.
"""

from __future__ import annotations


class HvliteError(RuntimeError):
    """Base of the errors that concern more than the argument of one call."""


HorovodInternalError = HvliteError  # what Horovod scripts catch


class NotInitializedError(HvliteError, ValueError):
    """A call that needs the runtime came before `init()` or after `shutdown()`.

    It is a ValueError too, which is what Horovod raises from `rank()` and `size()`.
    """

    def __init__(self, what: str = "hvlite") -> None:
        """Name `what` needed the runtime."""
        super().__init__(
            f"{what} needs the runtime: call init() first (or again, after shutdown())"
        )


class MismatchError(HvliteError):
    """Ranks submitted different dtypes, shapes, operations, ... under one name."""


class StallError(HvliteError):
    """No rank can go on: a name was submitted on some ranks only, for too long."""


class RankLeftError(HvliteError):
    """An operation needs a rank that has shut down or ended."""


class AbortedError(HvliteError):
    """An operation failed on one rank after all had agreed to run it."""


class EngineError(HvliteError):
    """The engine thread died of an unexpected exception: please report it."""


class TransportError(HvliteError):
    """A message between ranks failed, or had another size than expected."""


class SharedMemoryError(HvliteError):
    """The ranks of a node cannot get memory that all of them see."""


class LaunchError(HvliteError):
    """MPI, its launcher and the environment do not fit together."""


class UsageError(ValueError):
    """A wrong argument; the call was refused and changed nothing."""


class DuplicateNameError(UsageError):
    """A request of this name is already in flight on this rank."""
