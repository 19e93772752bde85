"""Broadcast: one rank's bytes to all others. The root's memory is only read.

Within a node every rank copies from the root's view. Between nodes the bytes travel
down a tree. Short messages take a binomial tree, ceil(log2 P) hops deep (Chan,
Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice,
and experience", 2007). Long ones are cut into chunks that follow each other down a
chain, so that every rank sends the S bytes once and all links work at the same time
(van de Geijn and Watts, "SUMMA", 1997): the time of S bytes and P - 2 chunks, against
that of S log2(P) bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..transport.base import Array, Pending
    from .channel import Channel, Steps
    from .topology import Topology

# Copied between two turns of the engine: about a millisecond.
_TURN_BYTES = 4 << 20
# Receives, and sends, under way at a time: one chunk comes in while one goes out.
_DEPTH = 2


def shm(node: Channel, views: Sequence[Array], root: int) -> Steps:
    """Copy the root's view to all the others; every rank of `node` runs this.

    Args:
        node: the ranks that share the memory.
        views: flat arrays of equal dtype and size, views[i] that of rank i.
        root: whose view; a number in `node`.
    """
    yield from node.barrier()
    if node.rank != root:
        source, target = views[root], views[node.rank]
        step = _TURN_BYTES // target.itemsize
        for start in range(0, target.size, step):
            if start:
                yield None
            target[start : start + step] = source[start : start + step]
    yield from node.barrier()


def tree(channel: Channel, data: Array, root: int, chunk_bytes: int) -> Steps:
    """Copy the root's `data` to all others; every rank of `channel` runs this.

    Args:
        channel: the ranks that take part.
        data: flat array of any dtype, the same size everywhere.
        root: whose data; a number in `channel`.
        chunk_bytes: the most to hand to MPI at a time.
    """
    raw = data.view(np.uint8)
    chunks = [
        raw[start : start + chunk_bytes] for start in range(0, raw.size, chunk_bytes)
    ]
    neighbours = _chain if len(chunks) > 1 else _binomial
    place = (channel.rank - root) % channel.size
    parent, *children = (
        (relative + root) % channel.size for relative in neighbours(place, channel.size)
    )
    receives: list[Pending] = []
    sends: list[Pending] = []
    for number, chunk in enumerate(chunks):
        if place:
            ahead = chunks[len(receives) : number + _DEPTH]
            receives += [channel.irecv(target, parent) for target in ahead]
            yield receives[number]
        if number >= _DEPTH and children:
            yield sends[number - _DEPTH]
        sends += [channel.isend(chunk, child) for child in children]
    yield from sends


def hierarchical(
    world: Channel,
    topology: Topology,
    views: Sequence[Array],
    root: int,
    chunk_bytes: int,
) -> Steps:
    """Copy the root's view to all ranks: one rank a node by `tree`, the rest by `shm`.

    Args:
        world: all ranks, numbered as in `topology`; all run this.
        topology: which of them share memory.
        views: flat arrays of equal dtype and size in memory that this node shares,
            views[i] that of local rank i.
        root: whose view; a number in `world`.
        chunk_bytes: the most to hand to MPI at a time.
    """
    leaders = [root if root in ranks else ranks[0] for ranks in topology.members]
    if topology.rank in leaders:
        channel = world.subset(leaders)
        mine = views[topology.local_rank]
        yield from tree(channel, mine, leaders.index(root), chunk_bytes)
    (leader,) = set(leaders) & set(topology.local)
    node = world.subset(topology.local)
    yield from shm(node, views, topology.local.index(leader))


def _chain(place: int, size: int) -> list[int]:
    """Return the parent of `place`, then its children; the root has place 0."""
    return [place - 1, *range(place + 1, size)[:1]]


def _binomial(place: int, size: int) -> list[int]:
    """Return the parent of `place`, then its children; the root has place 0.

    The parent's number lacks the lowest bit; children set a bit below that one, and
    those with most children of their own come first.
    """
    lowest = place & -place or 1 << size.bit_length()
    bits = reversed(range(lowest.bit_length() - 1))
    children = [place + (1 << bit) for bit in bits]
    return [place - lowest, *(child for child in children if child < size)]
