"""Every algorithm on real MPI: values, faults, and segments that one rank refuses."""

import os
import resource
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hvlite.collectives import segments
from hvlite.collectives.channel import Channel, drive
from hvlite.collectives.topology import Topology
from hvlite.errors import SharedMemoryError
from hvlite.messages import DTYPES, SUPPORTED, Op
from hvlite.transport import mpi
from hvlite.transport.base import Pending
from tests.contract import transports
from tests.contract.algorithms import ALLREDUCES, BROADCASTS, expected, values
from tests.contract.lockstep import InjectedFault, failing_at

# How the ranks of one machine play several; "uneven" is 0 0 1 from three ranks on.
LABELS = {"one node": "aaaa", "interleaved": "abab", "uneven": "aaba"}
MOST_BYTES = 3 << 20
FLOAT = np.dtype(np.float32)


class World:
    """A connection, memory shared in the node, and a new tag for each operation."""

    def __init__(self, label: str) -> None:
        self.transport = mpi.connect(node_label=label)
        self.topology = Topology(self.transport.nodes, self.transport.rank)
        self.tag = 0
        node = self.channel().subset(self.topology.local)
        self.segment = drive(segments.create(node, MOST_BYTES))

    def channel(self) -> Channel:
        self.tag += 1
        return Channel(self.transport, range(self.transport.size), self.tag)

    def views(self, mine: np.ndarray) -> list[np.ndarray]:
        """Puts this rank's values in the segment; all local ranks' views."""
        regions = self.segment.regions
        views = [region[: mine.nbytes].view(mine.dtype) for region in regions]
        views[self.topology.local_rank][:] = mine
        return views


@pytest.fixture(scope="module", params=LABELS)
def world(request: pytest.FixtureRequest, rank: int) -> Iterator[World]:
    """One world of each kind for all tests."""
    made = World(LABELS[request.param][rank])
    yield made
    made.transport.close(together=True)


Operation = Callable[
    [World, str, Channel, Sequence[np.ndarray]], Generator[Any, None, None]
]


def allreduce(
    world: World, name: str, channel: Channel, views: Sequence[np.ndarray]
) -> Generator[Any, None, None]:
    return ALLREDUCES[name](channel, world.topology, views, Op.SUM, 1.0, 4096)


def broadcast(
    world: World, name: str, channel: Channel, views: Sequence[np.ndarray]
) -> Generator[Any, None, None]:
    return BROADCASTS[name](channel, world.topology, views, 0, 4096)


def skip_if_impossible(world: World, name: str) -> None:
    if name == "shm" and world.topology.node_count > 1:
        pytest.skip("shared memory alone does not reach other nodes")


@pytest.mark.parametrize("name", ALLREDUCES)
def test_allreduce_of_every_dtype(world: World, name: str, size: int) -> None:
    skip_if_impossible(world, name)
    for dtype_name, operations in SUPPORTED.items():
        dtype = DTYPES[dtype_name]
        for op in operations - {Op.AVERAGE}:
            for count in [0, 1, 1000]:
                views = world.views(values(world.transport.rank, count, dtype))
                steps = ALLREDUCES[name](
                    world.channel(), world.topology, views, op, 1.0, 512
                )
                drive(steps)
                mine = views[world.topology.local_rank]
                assert np.array_equal(mine, expected(op, size, count, dtype))


@pytest.mark.parametrize("name", ALLREDUCES)
@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 17, 1 << 30])
def test_allreduce_of_many_chunks(
    world: World, name: str, size: int, chunk_bytes: int
) -> None:
    skip_if_impossible(world, name)
    count = MOST_BYTES // 4 - 3
    views = world.views(values(world.transport.rank, count, FLOAT))
    steps = ALLREDUCES[name](
        world.channel(), world.topology, views, Op.SUM, 1 / size, chunk_bytes
    )
    drive(steps)
    average = expected(Op.SUM, size, count, FLOAT) / FLOAT.type(size)
    assert np.array_equal(views[world.topology.local_rank], average)


@pytest.mark.parametrize("name", BROADCASTS)
def test_broadcast_from_every_root(world: World, name: str, size: int) -> None:
    skip_if_impossible(world, name)
    for root in range(size):
        for count in [0, 1, MOST_BYTES // 4]:
            views = world.views(values(world.transport.rank, count, FLOAT))
            steps = BROADCASTS[name](
                world.channel(), world.topology, views, root, 1 << 18
            )
            drive(steps)
            mine = views[world.topology.local_rank]
            assert np.array_equal(mine, values(root, count, FLOAT))


@pytest.mark.parametrize(
    ("operation", "name"),
    [(allreduce, name) for name in ALLREDUCES]
    + [(broadcast, name) for name in BROADCASTS],
)
def test_a_fault_at_any_step(
    world: World, operation: Operation, name: str, size: int
) -> None:
    """The last rank fails; the others hear of it, give up, and all go on."""
    skip_if_impossible(world, name)
    count = 10_000
    result = values(0, count, FLOAT)
    if operation is allreduce:
        result = expected(Op.SUM, size, count, FLOAT)
    for step in range(24):
        channel = world.channel()
        views = world.views(values(world.transport.rank, count, FLOAT))
        until_a_fault(world, step, channel, operation(world, name, channel, views))
        # What is written from here on must not come from the operation given up.
        views = world.views(values(world.transport.rank, count, FLOAT))
        drive(operation(world, name, world.channel(), views))
        assert np.array_equal(views[world.topology.local_rank], result)


def until_a_fault(
    world: World, step: int, channel: Channel, steps: Generator[Any, None, None]
) -> None:
    """Runs `steps`, which fail on the last rank at step `step` if they get there.

    Returns when no rank can touch another's memory any more: all have stopped, and
    whatever was coming in has come.
    """
    transport = world.transport
    if transport.rank == transport.size - 1:
        try:
            drive(failing_at(step, steps))
        except InjectedFault:
            channel.cancel()
        for peer in range(transport.size - 1):
            transport.send(peer, b"stop")
    else:
        awaited = None
        while transport.receive() is None:
            try:
                if awaited is None or awaited.test():
                    awaited = next(steps, None)
            except StopIteration:
                pass
        steps.close()
        channel.cancel()
    while not channel.settled():
        os.sched_yield()
    transports.in_step(transport, 0)


def test_a_segment_that_one_rank_refuses_is_refused_on_all(
    world: World, rank: int, size: int
) -> None:
    topology = world.topology
    node = world.channel().subset(topology.local)
    if topology.local_size == 1:  # nothing to refuse
        assert drive(segments.create(node, 1000)).method is segments.Method.PRIVATE
        world.tag += 1
        return
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest_free)
    try:
        if topology.local_rank == topology.local_size - 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        with pytest.raises(SharedMemoryError) as refusal:
            drive(segments.create(node, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    why = f"opening it: Too many open files (local rank {topology.local_size - 1})"
    assert f"(memfd: {why}; file: {why})" in str(refusal.value)
    segment = drive(segments.create(world.channel().subset(topology.local), 1000))
    assert len(segment.regions) == topology.local_size


@pytest.mark.parametrize("method", segments.SHARED_METHODS)
def test_ranks_see_what_the_others_write(
    world: World, rank: int, method: segments.Method
) -> None:
    topology = world.topology
    node = world.channel().subset(topology.local)
    segment = drive(segments.create(node, 5000, (method,)))
    segment.regions[topology.local_rank][:] = rank + 1
    drive(node.barrier())
    for peer, region in zip(topology.local, segment.regions, strict=True):
        assert (region == peer + 1).all()
    drive(node.barrier())


def test_nothing_is_handed_to_mpi_above_the_chunk_limit(size: int) -> None:
    """So that counts above 2^31 never reach MPI; the limit is lowered to see it."""
    sizes = []

    class Watched(mpi.MpiTransport):
        def isend(self, array: np.ndarray, dest: int, tag: int) -> Pending:
            sizes.append(array.nbytes)
            return super().isend(array, dest, tag)

    transport = Watched(MPI.COMM_WORLD, "")
    data = values(transport.rank, 5000, FLOAT)
    topology = Topology(tuple(range(size)), transport.rank)
    for tag, steps in enumerate([ALLREDUCES["ring"], ALLREDUCES["hierarchical"]]):
        channel = Channel(transport, range(size), tag)
        drive(steps(channel, topology, [data] * size, Op.MAX, 1.0, 192))
    channel = Channel(transport, range(size), 3)
    drive(BROADCASTS["tree"](channel, topology, [data] * size, 0, 192))
    assert size == 1 or 0 < max(sizes) <= 192
    transport.close(together=True)
