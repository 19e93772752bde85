"""All-reduce over several nodes: shared memory inside each, rings between them.

The ranks of a node first reduce among themselves. The result is cut into as many
slices as the smallest node has ranks; slice i goes around a ring of the ranks with
local rank i, one a node, all rings at the same time, so that every network card and
core is busy. Then the ranks of a node copy the result to all their views.

With N nodes and S bytes a node sends 2 S (N - 1) / N bytes in all, however many ranks
it has: what one rank a node would send in a plain ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import ring
from .cuts import part
from .shared_memory import reduce_part, spread_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..messages import Op
    from ..transport.base import Array
    from .channel import Channel, Steps
    from .topology import Topology


def allreduce(
    world: Channel,
    topology: Topology,
    views: Sequence[Array],
    op: Op,
    scale: float,
    chunk_bytes: int,
) -> Steps:
    """Reduce the views of all ranks in place; every rank of `world` runs this.

    The result is bitwise equal on all ranks.

    Args:
        world: all ranks, numbered as in `topology`.
        topology: which of them share memory.
        views: flat arrays of equal dtype and size in memory that this node shares,
            views[i] that of local rank i.
        op: how to combine; an average is a sum with a scale.
        scale: applied once, after everything has been added.
        chunk_bytes: the most to hand to MPI at a time.
    """
    node = world.subset(topology.local)
    rings = min(map(len, topology.members))
    count, itemsize = views[0].size, views[0].itemsize
    mine = part(count, node.size, node.rank, itemsize)
    # With one ring a rank, each rank takes one slice through all phases, in its own
    # view. Else the slices of the phases differ: they are those of the first view,
    # and the ranks wait for each other in between.
    own = node.size == rings
    into = views[node.rank if own else 0]
    yield from node.barrier()
    yield from reduce_part(views, mine, into, op, 1.0, spread=False)
    if not own:
        yield from node.barrier()
    if node.rank < rings:
        peers = world.subset(topology.across(node.rank))
        data = into[part(count, rings, node.rank, itemsize)]
        yield from ring.allreduce(peers, data, op, scale, chunk_bytes)
    if not own:
        yield from node.barrier()
    yield from spread_part(views, mine, into)
    yield from node.barrier()
