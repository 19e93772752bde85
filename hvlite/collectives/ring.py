"""All-reduce over messages: a ring, cut into chunks that overlap.

The P ranks stand in a ring and the array is cut into P segments. In P - 1 steps each
rank passes a segment on to its right, adding its own values on the way, until every
rank owns one segment that is complete (reduce-scatter). In P - 1 more steps the
complete segments go around (all-gather). With S bytes each rank sends 2 S (P - 1) / P
bytes in 2 (P - 1) steps; no algorithm sends less (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009).

The 2 (P - 1) steps are one uniform sequence here: in step t, rank r sends segment
r - t and receives segment r - t - 1, which it sends on in step t + 1. Each segment is
cut into the same number of chunks, and chunk c of a segment is sent on as soon as it
has been added, while chunk c + 1 is still coming in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .cuts import LINE_BYTES, part
from .kernels import kernel, scale_in_place

if TYPE_CHECKING:
    from ..messages import Op
    from ..transport.base import Array, Pending
    from .channel import Channel, Steps

# Receives, and sends, under way at a time: while a chunk is added, the next comes in.
# More gains nothing: in one node 1 to 4 take equally long, as copying is all there is.
_DEPTH = 2


def allreduce(
    channel: Channel, data: Array, op: Op, scale: float, chunk_bytes: int
) -> Steps:
    """Reduce `data` in place; every rank of `channel` runs this with equal arguments.

    The result is bitwise equal on all ranks. Values are added in ring order, which
    differs from segment to segment, and rounded to their dtype at each hop.

    Args:
        channel: the ranks that form the ring, in order.
        data: flat array, any length; reduced in place.
        op: how to combine; an average is a sum with a scale.
        scale: applied once, by the rank that completes a segment.
        chunk_bytes: the most to hand to MPI, or to combine, at a time.
    """
    size, rank = channel.size, channel.rank
    if size == 1:
        scale_in_place(data, scale)
        return
    combine = kernel(data.dtype, op)
    chunks = cut_segments(data, size, chunk_bytes)
    per_segment = len(chunks) // size
    half = per_segment * (size - 1)  # how many chunks come in during either phase
    total = 2 * half

    def chunk(number: int, lag: int) -> Array:
        """Return what is sent (lag 0) or received (lag 1) as number `number`."""
        step, within = divmod(number, per_segment)
        return chunks[(rank - step - lag) % size * per_segment + within]

    scratch = np.empty((_DEPTH, max(piece.size for piece in chunks)), data.dtype)
    sends: list[Pending] = []
    receives: list[Pending] = []
    for done in range(total):
        # A chunk is sent once it has been received in the step before.
        while len(sends) < min(done + _DEPTH, done + per_segment, total):
            sends.append(channel.isend(chunk(len(sends), 0), (rank + 1) % size))
        while len(receives) < min(done + _DEPTH, total):
            number = len(receives)
            target = chunk(number, 1)
            if number < half:
                target = scratch[number % _DEPTH, : target.size]
            else:
                yield sends[number - half]  # which read what this will overwrite
            receives.append(channel.irecv(target, (rank - 1) % size))
        yield receives[done]
        if done < half:
            target = chunk(done, 1)
            factor = scale if done >= half - per_segment else 1.0
            combine([scratch[done % _DEPTH, : target.size], target], target, factor)
    yield from sends[half:]


def cut_segments(data: Array, parts: int, chunk_bytes: int) -> list[Array]:
    """Cut `data` into `parts` segments of equally many chunks; return the chunks.

    Chunks are not larger than `chunk_bytes` (or a cache line, if that is more).
    """
    smallest = max(chunk_bytes // LINE_BYTES, 1) * LINE_BYTES
    per_segment = max(-(-data.nbytes // (parts * smallest)), 1)
    count = parts * per_segment
    return [data[part(data.size, count, i, data.itemsize)] for i in range(count)]
