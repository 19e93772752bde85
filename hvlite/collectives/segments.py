"""Memory that all ranks of a node see.

Each rank's buffers of one kind lie in one mapping. The node's first rank makes a file
that lives in memory only, every rank opens it, reserves the pages of its own region
(so that they lie near the core that uses them, and a full /dev/shm is an error now
rather than a crash later) and maps the whole.

Two ways, tried in this order:

MEMFD: an anonymous file, which the others open through /proc/PID/fd/N. It never has a
    name, so a killed job leaves nothing behind, and the limit of Docker's /dev/shm
    does not apply.
FILE: a file in /dev/shm with a random name that is removed as soon as all have opened
    it, for systems that refuse the first (a hardened /proc, separate containers).

The ranks agree on the outcome of each step by telling each other, so that a failure
on one of them is the same failure on all, and nobody waits for a rank that gave up.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import mmap
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from ..errors import SharedMemoryError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ..transport.base import Array, Pending
    from .channel import Channel

LOG = logging.getLogger("hvlite")
_PAGE_BYTES = mmap.PAGESIZE
# Reserving means zeroing, at some GB/s: this much takes the better part of 10 ms.
_RESERVE_BYTES = 32 << 20
_DIRECTORY = "/dev/shm"


class Method(enum.Enum):
    """How a segment came about."""

    PRIVATE = "private"  # a node of one rank: nobody to share with
    MEMFD = "memfd"
    FILE = "file"


SHARED_METHODS = (Method.MEMFD, Method.FILE)


@dataclass(frozen=True, eq=False)
class Segment:
    """One region a rank of the node, all visible to all of them, zero at first.

    The mapping lasts as long as an array on it does (CPython before 3.13 keeps one
    file descriptor with it), and disappears with the last process.

    Attributes:
        regions: flat uint8 arrays in the order of the node's ranks, page-aligned.
        method: how it was made.
    """

    regions: tuple[Array, ...]
    method: Method

    @property
    def rank_bytes(self) -> int:
        """Size of each region."""
        return self.regions[0].size


def create(
    node: Channel,
    rank_bytes: int,
    methods: Sequence[Method] = SHARED_METHODS,
) -> Generator[Pending | None, None, Segment]:
    """Make a segment of `rank_bytes` a rank; all ranks of `node` run this together.

    Args:
        node: the ranks that share it, equal arguments on each.
        rank_bytes: size of each region.
        methods: what to try, in this order.

    Raises:
        SharedMemoryError: no method worked; on every rank, with the reasons and what
            to change.
    """
    if node.size == 1:
        return Segment((_private(rank_bytes),), Method.PRIVATE)
    stride = max(-(-rank_bytes // _PAGE_BYTES) * _PAGE_BYTES, _PAGE_BYTES)
    reasons = []
    for method in methods:
        try:
            mapping = yield from _attempt(node, stride, method)
        except _RefusedError as refusal:
            reasons.append(f"{method.value}: {refusal}")
            LOG.info("no shared memory by %s", reasons[-1])
            continue
        memory = np.frombuffer(mapping, dtype=np.uint8)
        starts = range(0, node.size * stride, stride)
        regions = tuple(memory[start : start + rank_bytes] for start in starts)
        return Segment(regions, method)
    raise SharedMemoryError(
        f"the {node.size} ranks of this node cannot share {rank_bytes} bytes each "
        f"({'; '.join(reasons) or 'no method is allowed'}): give the job more memory "
        "or a larger /dev/shm (Docker: --shm-size; Kubernetes: an emptyDir of medium "
        "Memory mounted there), or set HVLITE_ALLREDUCE=ring"
    )


class _RefusedError(Exception):
    """A method does not work here; raised on every rank with the same text."""


def _private(nbytes: int) -> Array:
    """Return zeroed memory of this process, page-aligned."""
    memory = np.zeros(nbytes + _PAGE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % _PAGE_BYTES
    return memory[start : start + nbytes]


def _attempt(
    node: Channel, stride: int, method: Method
) -> Generator[Pending | None, None, mmap.mmap]:
    """Make, open, reserve and map one file, and agree after each step."""
    offer, descriptor = _NOTHING, -1
    with contextlib.ExitStack() as mine:
        with contextlib.ExitStack() as until_opened:
            with _Outcome() as making:
                if node.rank == 0:
                    offer = _offer(method, node.size * stride, until_opened)
            offer = (yield from making.agree(node, "making it", offer))[0]
            with _Outcome() as opening:
                descriptor = _open(method, offer, mine)
            yield from opening.agree(node, "opening it")
        mapping = None
        with _Outcome() as reserving:
            start = node.rank * stride
            for part in range(start, start + stride, _RESERVE_BYTES):
                nbytes = min(_RESERVE_BYTES, start + stride - part)
                os.posix_fallocate(descriptor, part, nbytes)
                yield None
            mapping = mmap.mmap(descriptor, node.size * stride)
        yield from reserving.agree(node, f"reserving {stride} bytes")
    assert mapping is not None  # else agree() has raised
    return mapping


class _Offer(NamedTuple):
    """Where the others find the first rank's file: numbers, to travel as an array."""

    inode: int
    process: int
    descriptor: int
    token: int

    def path(self, method: Method) -> str:
        if method is Method.MEMFD:
            return f"/proc/{self.process}/fd/{self.descriptor}"
        return f"{_DIRECTORY}/hvlite-{self.token:016x}"


_NOTHING = _Offer(0, 0, 0, 0)


def _offer(method: Method, nbytes: int, cleanup: contextlib.ExitStack) -> _Offer:
    """Make the file; `cleanup` takes its name away, and this descriptor."""
    _check_available(nbytes)
    offer = _Offer(0, os.getpid(), 0, secrets.randbits(63))
    if method is Method.MEMFD:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        descriptor = os.memfd_create("hvlite")
    else:
        path = offer.path(method)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        cleanup.callback(os.unlink, path)
    cleanup.callback(os.close, descriptor)
    os.ftruncate(descriptor, nbytes)
    inode = os.fstat(descriptor).st_ino
    return offer._replace(inode=inode, descriptor=descriptor)


def _check_available(nbytes: int) -> None:
    """Refuse what cannot be there: Linux would kill processes to find the pages."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable:"))
    except OSError:  # a hardened /proc; then the system's own refusal has to do
        return
    if nbytes > int(available.split()[1]) << 10:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _open(method: Method, offer: _Offer, cleanup: contextlib.ExitStack) -> int:
    """Open the first rank's file; `cleanup` closes it.

    Process numbers of another container may name a process here, too, hence the check.
    """
    descriptor = os.open(offer.path(method), os.O_RDWR)
    cleanup.callback(os.close, descriptor)
    if os.fstat(descriptor).st_ino != offer.inode:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return descriptor


class _Outcome:
    """Catches what the system refuses on this rank, and tells the other ranks."""

    def __init__(self) -> None:
        self._errno = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> bool:
        if not isinstance(error, OSError):
            return False
        self._errno = error.errno or errno.EIO
        return True

    def agree(
        self, node: Channel, step: str, offer: _Offer = _NOTHING
    ) -> Generator[Pending | None, None, list[_Offer]]:
        """Exchange outcomes and offers with all ranks of the node.

        Raises:
            _RefusedError: naming the first rank that failed, on all of them.
        """
        table = np.zeros((node.size, 1 + len(offer)), dtype=np.int64)
        table[node.rank] = self._errno, *offer
        others = [peer for peer in range(node.size) if peer != node.rank]
        receives = [node.irecv(table[peer], peer) for peer in others]
        sends = [node.isend(table[node.rank], peer) for peer in others]
        yield from receives + sends
        for rank, (code, *_) in enumerate(table.tolist()):
            if code:
                raise _RefusedError(f"{step}: {os.strerror(code)} (local rank {rank})")
        return [_Offer(*numbers) for _, *numbers in table.tolist()]
