"""Every collective algorithm behind one face, and the values it must give.

Values are closed forms of rank and size that every dtype represents exactly, products
included, so that results must be equal to the last bit whatever the order of adding.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from hvlite.collectives import broadcast, hierarchical, ring, shared_memory
from hvlite.collectives.channel import Channel
from hvlite.collectives.topology import Topology
from hvlite.messages import Op

Steps = Generator[Any, None, None]
# Runs one operation on this rank: channel, topology, this node's views, root or op.
AllReduce = Callable[[Channel, Topology, Sequence[Any], Op, float, int], Steps]
Broadcast = Callable[[Channel, Topology, Sequence[Any], int, int], Steps]

ALLREDUCES: dict[str, AllReduce] = {
    "shm": lambda channel, topology, views, op, scale, chunk: shared_memory.allreduce(
        channel.subset(topology.local), views, op, scale, chunk
    ),
    "ring": lambda channel, topology, views, op, scale, chunk: ring.allreduce(
        channel, views[topology.local_rank], op, scale, chunk
    ),
    "hierarchical": hierarchical.allreduce,
}
BROADCASTS: dict[str, Broadcast] = {
    "shm": lambda channel, topology, views, root, chunk: broadcast.shm(
        channel.subset(topology.local), views, topology.local.index(root)
    ),
    "tree": lambda channel, topology, views, root, chunk: broadcast.tree(
        channel, views[topology.local_rank], root, chunk
    ),
    "hierarchical": broadcast.hierarchical,
}


def values(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    """What rank `rank` puts in: rank + 1, or one more at every odd place.

    For bool: alternating, but all true on odd ranks.
    """
    odd = np.arange(count) % 2
    if dtype.kind == "b":
        return (odd + rank) % 2 + rank % 2 > 0
    return (odd + rank + 1).astype(dtype)


def expected(op: Op, size: int, count: int, dtype: np.dtype) -> np.ndarray:
    """What comes out on each of `size` ranks, computed from the formula above."""
    odd = np.arange(count) % 2
    if dtype.kind == "b":
        everywhere, anywhere = odd == 1, np.logical_or(odd == 1, size > 1)
        return anywhere if op is Op.MAX else everywhere
    ranks = np.arange(1, size + 1)
    results = {
        Op.SUM: size * (size + 1) // 2 + size * odd,
        Op.MIN: 1 + odd,
        Op.MAX: size + odd,
        Op.PRODUCT: np.where(odd, np.prod(ranks + 1), np.prod(ranks)),
    }
    return results[op].astype(dtype)  # which wraps, as it must
