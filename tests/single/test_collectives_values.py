"""Every algorithm gives the right values, in place, for every dtype and shape."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from hvlite.collectives import shared_memory
from hvlite.collectives.topology import Topology
from hvlite.messages import DTYPES, SUPPORTED, Op
from hvlite.transport.memory import make_world
from tests.contract import lockstep
from tests.contract.algorithms import ALLREDUCES, BROADCASTS, expected, values

Nodes = tuple[int, ...]
NODES: dict[str, Nodes] = {
    "alone": (0,),
    "one node": (0, 0, 0),
    "two nodes": (0, 0, 1, 1),
    "interleaved": (0, 1, 0, 1),
    "uneven": (0, 0, 0, 1, 1),
    "one each": (0, 1, 2),
}
PAIRS = [(name, op) for name, ops in SUPPORTED.items() for op in ops - {Op.AVERAGE}]
COUNTS = [0, 1, 2, 5, 17, 1000, 4099]


def allreduce(
    algorithm: str,
    nodes: Nodes,
    arrays: Sequence[np.ndarray],
    op: Op,
    scale: float = 1.0,
    chunk_bytes: int = 1 << 20,
) -> None:
    size = len(nodes)
    tops = [Topology(nodes, rank) for rank in range(size)]
    channels = lockstep.channels(make_world(size, nodes), tag=1)
    run = ALLREDUCES[algorithm]
    lockstep.run(
        [
            run(
                channels[rank],
                tops[rank],
                [arrays[peer] for peer in tops[rank].local],
                op,
                scale,
                chunk_bytes,
            )
            for rank in range(size)
        ]
    )


def settings(algorithms: Iterable[str]) -> list[Any]:
    return [
        pytest.param(algorithm, nodes, id=f"{algorithm}, {name}")
        for algorithm in algorithms
        for name, nodes in NODES.items()
        if algorithm != "shm" or len(set(nodes)) == 1
    ]


@pytest.mark.parametrize(("algorithm", "nodes"), settings(ALLREDUCES))
@pytest.mark.parametrize(("name", "op"), PAIRS)
def test_allreduce_of_every_dtype(
    algorithm: str, nodes: Nodes, name: str, op: Op
) -> None:
    size, dtype = len(nodes), DTYPES[name]
    for count in [0, 1, 333]:
        arrays = [values(rank, count, dtype) for rank in range(size)]
        allreduce(algorithm, nodes, arrays, op)
        result = expected(op, size, count, dtype)
        for array in arrays:
            assert array.dtype == dtype
            assert np.array_equal(array, result)


@pytest.mark.parametrize(("algorithm", "nodes"), settings(ALLREDUCES))
@pytest.mark.parametrize("chunk_bytes", [1, 64, 1000, 1 << 20])
def test_allreduce_of_every_size(
    algorithm: str, nodes: Nodes, chunk_bytes: int
) -> None:
    size = len(nodes)
    for count in COUNTS:
        arrays = [np.arange(count) * (rank + 1.0) for rank in range(size)]
        allreduce(algorithm, nodes, arrays, Op.SUM, 0.5, chunk_bytes)
        for array in arrays:
            assert np.array_equal(array, np.arange(count) * size * (size + 1) / 4)


@pytest.mark.parametrize(("algorithm", "nodes"), settings(ALLREDUCES))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_results_are_bitwise_equal_on_all_ranks(
    algorithm: str, nodes: Nodes, dtype: str
) -> None:
    size = len(nodes)
    random = np.random.default_rng(7)
    draws = random.standard_normal((size, 5000)) * 10.0 ** random.integers(-4, 4, 5000)
    exact = draws.mean(axis=0)
    arrays = list(draws.astype(DTYPES[dtype]))
    allreduce(algorithm, nodes, arrays, Op.SUM, 1 / size, 512)
    for array in arrays[1:]:
        assert array.tobytes() == arrays[0].tobytes()
    precision = {"float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 1e-6)
    tolerance = 2 * precision * np.abs(draws).sum(axis=0)
    assert (np.abs(arrays[0] - exact.astype(arrays[0].dtype)) <= tolerance).all()


def test_shared_memory_adds_in_rank_order_wherever_the_slices_are() -> None:
    # 1 is lost beside 1e8 unless the two big ones cancel first.
    column = np.array([1e8, -1e8, 1.0], np.float32)
    arrays = [np.full(1000, value, np.float32) for value in column]
    allreduce("shm", (0, 0, 0), arrays, Op.SUM, chunk_bytes=64)
    assert (arrays[0] == 1).all()
    arrays = [np.full(1000, value, np.float32) for value in column[[2, 0, 1]]]
    allreduce("shm", (0, 0, 0), arrays, Op.SUM, chunk_bytes=64)
    assert (arrays[0] == 0).all()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_without_the_first_barrier_a_rank_may_start_before_the_others(
    first: int,
) -> None:
    arrays = [values(rank, 1000, np.dtype(np.float64)) for rank in range(3)]
    channels = lockstep.channels(make_world(3), tag=1)
    steps = [
        shared_memory.allreduce(channel, arrays, Op.SUM, 1.0, filled=True)
        for channel in channels
    ]
    awaited = next(steps[first])  # its part is done; the others have not begun
    assert awaited is not None
    lockstep.run(steps)
    for array in arrays:
        assert np.array_equal(array, expected(Op.SUM, 3, 1000, array.dtype))


@pytest.mark.parametrize("algorithm", ALLREDUCES)
def test_scale_is_applied_once_and_after_adding(algorithm: str) -> None:
    nodes = (0, 0) if algorithm == "shm" else (0, 0, 1, 1)
    size = len(nodes)
    arrays = [np.full(100, 49, np.int32) for _ in range(size)]
    allreduce(algorithm, nodes, arrays, Op.SUM, 1 / 49)
    assert all((array == size).all() for array in arrays)


@pytest.mark.parametrize(("algorithm", "nodes"), settings(BROADCASTS))
def test_broadcast_of_every_dtype_from_every_root(algorithm: str, nodes: Nodes) -> None:
    size = len(nodes)
    tops = [Topology(nodes, rank) for rank in range(size)]
    for root in range(size):
        for dtype in DTYPES.values():
            for count in [0, 1, 333]:
                arrays = [values(rank, count, dtype) for rank in range(size)]
                arrays[root].flags.writeable = False
                channels = lockstep.channels(make_world(size, nodes), tag=1)
                run = BROADCASTS[algorithm]
                lockstep.run(
                    [
                        run(
                            channels[rank],
                            tops[rank],
                            [arrays[peer] for peer in tops[rank].local],
                            root,
                            100,
                        )
                        for rank in range(size)
                    ]
                )
                for array in arrays:
                    assert np.array_equal(array, values(root, count, dtype))


@pytest.mark.parametrize("size", range(1, 18))
def test_short_broadcasts_reach_every_size_of_tree(size: int) -> None:
    world = make_world(size)
    for root in range(size):
        arrays = [np.array([rank]) for rank in range(size)]
        channels = lockstep.channels(world, tag=root)
        run = BROADCASTS["tree"]
        steps = [
            run(channel, Topology((0,) * size, rank), arrays, root, 1000)
            for rank, channel in enumerate(channels)
        ]
        lockstep.run(steps)
        assert [int(array[0]) for array in arrays] == [root] * size
