"""Which ready all-reduces go together. Pure: requests in, batches out.

Requests that agree in process set, dtypes, operation, scale factors and device kind are
fused up to the threshold, whatever came ready between them. One as large as the
threshold goes alone, and so does everything that is not an all-reduce of the caller's
own memory. Batches are ordered by their first member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ..messages import Key, Request

    Ready = tuple[Key, Request]


def plan(ready: Sequence[Ready], threshold_bytes: int) -> list[list[Ready]]:
    """Group `ready` into batches; each member appears in exactly one.

    Args:
        ready: in the order in which they became ready.
        threshold_bytes: a batch of several members holds at most as many bytes.
    """
    batches: list[list[Ready]] = []
    # What may be joined -> the batches of it that still have room, with that room.
    open_batches: dict[Hashable, list[tuple[list[Ready], int]]] = {}
    for item in ready:
        request = item[1]
        nbytes, affinity = request.nbytes, request.affinity
        if affinity is None or nbytes >= threshold_bytes:
            batches.append([item])
            continue
        candidates = open_batches.setdefault(affinity, [])
        for index, (batch, room) in enumerate(candidates):
            if nbytes <= room:
                batch.append(item)
                candidates[index] = (batch, room - nbytes)
                break
        else:
            batches.append([item])
            candidates.append((batches[-1], threshold_bytes - nbytes))
    return batches
