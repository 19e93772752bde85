"""The MPI transport keeps the contract, and `connect` its promises."""

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from hvlite.errors import UsageError
from hvlite.transport import mpi
from tests.contract import transports


@pytest.fixture(scope="module")
def transport() -> Iterator[mpi.MpiTransport]:
    """One connection for all cases, as in use."""
    made = mpi.connect()
    yield made
    made.close(together=True)


@pytest.mark.parametrize("case", transports.CASES, ids=lambda case: case.__name__)
def test_contract(case: transports.Case, transport: mpi.MpiTransport) -> None:
    case(transport)


def test_the_world_is_what_mpi_says(
    transport: mpi.MpiTransport, rank: int, size: int
) -> None:
    assert (transport.rank, transport.size) == (rank, size)
    assert mpi.world_size_seen() == size
    assert transport.description in MPI.Get_library_version()
    assert "\n" not in transport.description


def test_ranks_of_one_machine_share_a_node(
    transport: mpi.MpiTransport, size: int
) -> None:
    assert transport.nodes == (0,) * size


def test_labels_split_a_machine_into_nodes(rank: int, size: int) -> None:
    transport = mpi.connect(node_label="abacab"[rank])
    assert transport.nodes == (0, 1, 0, 2)[:size]
    transport.close(together=True)


def test_some_ranks_of_the_world_are_a_world(rank: int, size: int) -> None:
    chosen = list(range(size))[::2]
    if rank not in chosen:
        with pytest.raises(UsageError, match=f"world rank {rank}, which is not among"):
            mpi.connect(chosen)
        return
    transport = mpi.connect(chosen)
    assert (transport.rank, transport.size) == (rank // 2, len(chosen))
    transports.control_messages_of_one_source_keep_their_order(transport)
    transport.close(together=True)


def test_a_given_communicator_stays_the_callers(rank: int, size: int) -> None:
    comm = MPI.COMM_WORLD.Split(rank % 2, -rank)
    transport = mpi.connect(comm)
    assert (transport.rank, transport.size) == (comm.rank, comm.size)
    assert comm.sendrecv(rank, comm.rank, source=comm.rank) == rank
    transport.close(together=True)
    assert comm.allreduce(1) == transport.size
    comm.Free()


def test_a_hundred_connections_leave_nothing() -> None:
    for _ in range(3):  # what MPI allocates once and keeps
        mpi.connect().close(together=True)
    gc.collect()
    before = descriptors(), handle(), resident_bytes()
    for _ in range(100):
        mpi.connect().close(together=True)
    gc.collect()
    assert descriptors() == before[0]
    # Open MPI gives out the lowest number that is free.
    assert handle() == before[1] or "Open MPI" not in mpi.library()
    assert resident_bytes() - before[2] < 100 * 20_000


def descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


def handle() -> int:
    comm = MPI.COMM_WORLD.Dup()
    number = comm.py2f()
    comm.Free()
    return number


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_closing_twice_is_allowed() -> None:
    transport = mpi.connect()
    transport.close(together=True)
    transport.close(together=True)


def test_mpi_goes_on_after_closing(size: int) -> None:
    mpi.connect().close(together=True)
    assert MPI.COMM_WORLD.allreduce(1) == size


def test_what_nobody_received_does_not_reach_the_next_connection() -> None:
    """MPICH gives a new communicator the number, and so the messages, of the last."""
    for _ in range(3):
        left = mpi.connect()
        large = np.ones(1 << 20)
        for tag in 1, 2:
            left.isend(np.ones(3), transports.right(left), tag)
            left.isend(large, transports.right(left), tag).cancel()
        left.send(transports.right(left), b"stale")
        left.send(transports.right(left), bytes(1 << 20))
        left.close(together=True)
        fresh = mpi.connect()
        received = np.zeros(1)
        transports.shift(fresh, 1, np.zeros(1), received)
        transports.control_messages_to_itself_arrive(fresh)
        fresh.close(together=True)
