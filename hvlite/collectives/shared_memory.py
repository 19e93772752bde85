"""All-reduce among ranks that see each other's memory.

Rank i reduces slice i over all ranks' views, a block at a time, and writes the result
into all of them. With P ranks and S bytes, each rank reads S bytes and writes S bytes
between two barriers, which takes as long as one copy of S bytes, whatever P is. Every
element is combined in rank order, so the result depends neither on timing nor on what
else is reduced with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cuts import part
from .kernels import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..messages import Op
    from ..transport.base import Array
    from .channel import Channel, Steps

# What is worked on at a time, in all views together, so that a result is scaled, and
# copied to the other views, while it is in the core's second-level cache (1-2 MB).
# Measured at 2 ranks: 128 KB takes 1.6x as long at 1 MB, where Python's share shows,
# and 1.1x at 64 MB; from 512 KB to 2 MB there is no difference.
BLOCK_BYTES = 512 << 10
# With many ranks a block of each view is small, but not so small that Python shows.
_LEAST_BLOCK_BYTES = 16 << 10
# Between two turns of the engine, 8 MB are read or written: about a millisecond.
_BLOCKS_A_TURN = 8


def allreduce(
    node: Channel,
    views: Sequence[Array],
    op: Op,
    scale: float,
    block_bytes: int = BLOCK_BYTES,
    *,
    filled: bool = False,
) -> Steps:
    """Reduce the ranks' views in place; every rank of `node` runs this.

    Args:
        node: the ranks that share the memory.
        views: flat arrays of equal dtype and size, views[i] that of rank i.
        op: how to combine them; an average is a sum with a scale.
        scale: what the combination is multiplied by.
        block_bytes: how much to work on at a time, in all views together.
        filled: whether all views are known to be filled, as when the order to reduce
            was given after every rank had said so; saves the first of two barriers.
    """
    mine = part(views[0].size, node.size, node.rank, views[0].itemsize)
    if not filled:
        yield from node.barrier()
    yield from reduce_part(
        views, mine, views[node.rank], op, scale, block_bytes=block_bytes, spread=True
    )
    yield from node.barrier()


def reduce_part(
    views: Sequence[Array],
    elements: slice,
    into: Array,
    op: Op,
    scale: float,
    *,
    spread: bool,
    block_bytes: int = BLOCK_BYTES,
) -> Steps:
    """Combine some elements of all views into `into`, which is one of them.

    Between barriers: the other ranks must be done writing it, and not yet need it.

    Args:
        views: flat arrays of equal dtype and size, one a rank of the node.
        elements: which ones.
        into: where the result goes.
        op: how to combine.
        scale: what the combination is multiplied by.
        spread: whether to copy each block of the result to the other views at once.
        block_bytes: how much to work on at a time, in all views together.
    """
    combine = kernel(into.dtype, op)
    others = [view for view in views if view is not into] if spread else []
    for number, block in enumerate(_blocks(views, elements, block_bytes), 1):
        result = into[block]
        combine([view[block] for view in views], result, scale)
        for other in others:
            other[block] = result
        if not number % _BLOCKS_A_TURN:
            yield None


def spread_part(views: Sequence[Array], elements: slice, source: Array) -> Steps:
    """Copy some elements of `source`, which is one of the views, to all the others."""
    others = [view for view in views if view is not source]
    for number, block in enumerate(_blocks(views, elements, BLOCK_BYTES), 1):
        for other in others:
            other[block] = source[block]
        if not number % _BLOCKS_A_TURN:
            yield None


def _blocks(
    views: Sequence[Array], elements: slice, block_bytes: int
) -> Iterator[slice]:
    nbytes = max(block_bytes // len(views), _LEAST_BLOCK_BYTES)
    step = nbytes // views[0].itemsize
    for start in range(elements.start, elements.stop, step):
        yield slice(start, min(start + step, elements.stop))
