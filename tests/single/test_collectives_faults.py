"""A rank fails at any step of any algorithm: all can give up, and then go on.

This plays the engine's part: the failing rank gives up, the others hear of it when
they can go no further, give up too, and run the next operation under a new tag.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pytest

from hvlite.collectives import segments
from hvlite.collectives.channel import Channel
from hvlite.collectives.topology import Topology
from hvlite.messages import Op
from hvlite.transport.memory import make_world
from tests.contract import lockstep
from tests.contract.algorithms import ALLREDUCES, BROADCASTS, expected, values

COUNT = 200
CHUNK_BYTES = 256
FLOAT = np.dtype(np.float32)


def allreduce(
    name: str, channel: Channel, topology: Topology, arrays: Sequence[np.ndarray]
) -> Generator[Any, None, Any]:
    views = [arrays[rank] for rank in topology.local]
    return ALLREDUCES[name](channel, topology, views, Op.SUM, 1.0, CHUNK_BYTES)


def broadcast(
    name: str, channel: Channel, topology: Topology, arrays: Sequence[np.ndarray]
) -> Generator[Any, None, Any]:
    views = [arrays[rank] for rank in topology.local]
    return BROADCASTS[name](channel, topology, views, 0, CHUNK_BYTES)


def create(
    _: str, channel: Channel, topology: Topology, arrays: Sequence[np.ndarray]
) -> Generator[Any, None, Any]:
    def steps() -> Generator[Any, None, None]:
        segment = yield from segments.create(channel.subset(topology.local), 100)
        arrays[topology.rank][:] = len(segment.regions)

    return steps()


Operation = Callable[
    [str, Channel, Topology, Sequence[np.ndarray]], Generator[Any, None, Any]
]
OPERATIONS: list[tuple[Operation, str, tuple[int, ...]]] = [
    (allreduce, "shm", (0, 0, 0)),
    (allreduce, "ring", (0, 1, 2)),
    (allreduce, "hierarchical", (0, 0, 1, 1)),
    (allreduce, "hierarchical", (0, 0, 0, 1, 1)),
    (broadcast, "shm", (0, 0, 0)),
    (broadcast, "tree", (0, 1, 2)),
    (broadcast, "hierarchical", (0, 0, 1, 1)),
    (create, "segment", (0, 0, 0)),
]


@pytest.mark.parametrize(
    ("operation", "name", "nodes"),
    OPERATIONS,
    ids=[f"{op.__name__} {name} {nodes}" for op, name, nodes in OPERATIONS],
)
def test_a_fault_at_any_step_on_any_rank(
    operation: Operation, name: str, nodes: tuple[int, ...]
) -> None:
    size = len(nodes)
    tops = [Topology(nodes, rank) for rank in range(size)]
    world = make_world(size, nodes)
    results: dict[Operation, np.ndarray | int] = {
        allreduce: expected(Op.SUM, size, COUNT, FLOAT),
        broadcast: values(0, COUNT, FLOAT),
        create: size,
    }
    tag = 0
    for culprit in range(size):
        injected = step = 0
        while injected == step:  # until the operation has no such step
            channels = lockstep.channels(world, tag)
            arrays = [values(rank, COUNT, FLOAT) for rank in range(size)]
            ranks = [
                operation(name, channels[rank], tops[rank], arrays)
                for rank in range(size)
            ]
            ranks[culprit] = lockstep.failing_at(step, ranks[culprit])
            ended, stuck = lockstep.advance(ranks)
            injected += culprit not in ended
            for rank in range(size):
                ranks[rank].close()
                channels[rank].cancel()
            assert all(channel.settled() for channel in channels)

            channels = lockstep.channels(world, tag + 1)
            arrays = [values(rank, COUNT, FLOAT) for rank in range(size)]
            lockstep.run(
                [
                    operation(name, channels[rank], tops[rank], arrays)
                    for rank in range(size)
                ]
            )
            for array in arrays:
                assert np.array_equal(array, np.full(COUNT, results[operation]))
            step += 1
            tag += 2
        assert injected > 1
        assert not stuck
