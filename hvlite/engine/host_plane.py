"""The data plane for host memory: what an order does to this rank's arrays.

Tensors of the callers' own are packed into a staging buffer, reduced there and
unpacked, a bounded piece at a time; a tensor that lies in a segment already is reduced
in place. Owned by the engine thread; every method that returns steps runs as the part
of one order, and orders of one process set run one after the other, which is why they
can share the staging buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives import (
    broadcast,
    hierarchical,
    kernels,
    ring,
    segments,
    shared_memory,
)
from ..collectives.channel import Channel
from ..messages import DTYPES, Algorithm, Kind, Op

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from ..collectives.channel import Steps
    from ..collectives.segments import Segment
    from ..collectives.topology import Topology
    from ..config import Config
    from ..messages import Request
    from ..transport.base import Array, Pending, Transport
    from .protocol import Order
    from .queue import Submission

# A piece passes through staging at a time: in one node small enough to stay in a
# core's cache between packing, reducing and unpacking; between nodes large, because
# each piece pays the latency of all the ring's steps.
NODE_PIECE_BYTES = 4 << 20
RING_PIECE_BYTES = 64 << 20
FIRST_STAGING_BYTES = 1 << 20


class SharedBuffer:
    """Memory that the ranks of a node share; it lives as long as its arrays do.

    Attributes:
        number: what requests name it by; the same on all ranks.
        array: this rank's own part, uint8, zero at first.
    """

    def __init__(self, number: int, segment: Segment, local_rank: int) -> None:
        """Wrap the segment that order `number` made."""
        self.number = number
        self.segment = segment
        self.array = segment.regions[local_rank]


class HostPlane:
    """Executes orders on NumPy arrays."""

    def __init__(
        self, transport: Transport, topology: Topology, config: Config
    ) -> None:
        """Execute for `transport`'s rank; `topology` says who shares memory with it."""
        self._transport = transport
        self._topology = topology
        self._chunk_bytes = config.chunk_bytes
        self._staging: Segment | None = None

    def channel(self, order_number: int) -> Channel:
        """Return the channel of an order, among all ranks."""
        tag = order_number % self._transport.tags
        return Channel(self._transport, range(self._transport.size), tag)

    def probe(self) -> Steps:
        """Make the first staging buffer, shared in the node.

        Raises:
            SharedMemoryError: this node's ranks cannot share memory.
        """
        node = self.channel(0).subset(self._topology.local)
        self._staging = yield from segments.create(node, FIRST_STAGING_BYTES)

    def isolate(self, topology: Topology) -> None:
        """Go on without shared memory, as if every rank were a node of its own."""
        self._topology = topology
        self._staging = None

    def run(
        self, order: Order, batch: Sequence[Submission], channel: Channel
    ) -> Generator[Pending | None, None, Any]:
        """Execute one order; returns the result of the handle, None for its own."""
        request = batch[0].request
        if request.kind is Kind.BARRIER:
            return None  # an order exists once all ranks have submitted
        result = None
        if request.kind is Kind.ALLOCATE:
            node = channel.subset(self._topology.local)
            segment = yield from segments.create(node, request.nbytes)
            result = SharedBuffer(order.number, segment, self._topology.local_rank)
        elif request.kind is Kind.BROADCAST:
            yield from self._broadcast(order, batch[0], channel)
        elif batch[0].segment is not None:
            yield from self._allreduce_in_place(order, batch[0], channel)
        else:
            yield from self._allreduce(order, batch, channel)
        if order.algorithm is not Algorithm.SHM:
            # In one node the algorithms end like this already: no rank is done before
            # every rank has done its part, so a failure there reaches all.
            yield from channel.barrier()
        return result

    def _allreduce(
        self, order: Order, batch: Sequence[Submission], channel: Channel
    ) -> Steps:
        request = batch[0].request
        for index, name in enumerate(request.dtypes):
            inputs = [a for item in batch for a in item.parts[index].inputs]
            outputs = [a for item in batch for a in item.parts[index].outputs]
            dtype = DTYPES[name]
            if order.algorithm is Algorithm.RING and len(inputs) == len(outputs) == 1:
                _copy(inputs, outputs)
                yield from self._reduce(order, request, channel, outputs)
                continue
            piece = self._piece_bytes(order) // dtype.itemsize
            cuts = zip(_pieces(inputs, piece), _pieces(outputs, piece), strict=True)
            for sources, targets in cuts:
                count = sum(source.size for source in sources)
                views = yield from self._stage(channel, count, dtype)
                mine = views[self._topology.local_rank]
                _copy(sources, [mine])
                yield from self._reduce(order, request, channel, views)
                _copy([mine], targets)

    def _allreduce_in_place(
        self, order: Order, item: Submission, channel: Channel
    ) -> Steps:
        request = item.request
        (spec,) = request.specs
        end = request.offset + request.nbytes
        assert item.segment is not None
        views = [
            region[request.offset : end].view(DTYPES[spec.dtype])
            for region in item.segment.regions
        ]
        # A resident buffer is filled before it is submitted, so before any order.
        filled = request.prescale == 1.0
        yield from self._reduce(order, request, channel, views, filled=filled)

    def _reduce(
        self,
        order: Order,
        request: Request,
        channel: Channel,
        views: Sequence[Array],
        *,
        filled: bool = False,
    ) -> Steps:
        """Reduce in place what the ranks of this node have in `views`.

        `filled` says that no rank writes to its view any more.
        """
        mine = views[self._topology.local_rank] if len(views) > 1 else views[0]
        if not mine.size:
            return
        if request.prescale != 1.0:
            kernels.scale_in_place(mine, request.prescale)
        average = request.op is Op.AVERAGE
        op = Op.SUM if average else request.op
        scale = request.postscale / channel.size if average else request.postscale
        if order.algorithm is Algorithm.SHM:
            yield from shared_memory.allreduce(channel, views, op, scale, filled=filled)
        elif order.algorithm is Algorithm.RING:
            yield from ring.allreduce(channel, mine, op, scale, self._chunk_bytes)
        else:
            yield from hierarchical.allreduce(
                channel, self._topology, views, op, scale, self._chunk_bytes
            )

    def _broadcast(self, order: Order, item: Submission, channel: Channel) -> Steps:
        root = item.request.root
        ((inputs, outputs),) = item.parts
        if order.algorithm is Algorithm.RING:
            if channel.rank == root:
                _copy(inputs, outputs)
            data = outputs[0].view(np.uint8)
            yield from broadcast.tree(channel, data, root, self._chunk_bytes)
            return
        sources, targets = inputs[0].view(np.uint8), outputs[0].view(np.uint8)
        step = self._piece_bytes(order)
        for start in range(0, targets.size, step):
            target = targets[start : start + step]
            views = yield from self._stage(channel, target.size, target.dtype)
            mine = views[self._topology.local_rank]
            if channel.rank == root:
                mine[:] = sources[start : start + step]
            if order.algorithm is Algorithm.SHM:
                yield from broadcast.shm(channel, views, root)
            else:
                yield from broadcast.hierarchical(
                    channel, self._topology, views, root, self._chunk_bytes
                )
            target[:] = mine

    def _piece_bytes(self, order: Order) -> int:
        return (
            NODE_PIECE_BYTES if order.algorithm is Algorithm.SHM else RING_PIECE_BYTES
        )

    def _stage(
        self, channel: Channel, count: int, dtype: np.dtype[Any]
    ) -> Generator[Pending | None, None, list[Array]]:
        """Return each local rank's staging memory for `count` elements.

        Every rank needs the same room for the same order, so all grow at once.
        """
        nbytes = count * dtype.itemsize
        if self._staging is None or self._staging.rank_bytes < nbytes:
            node = channel.subset(self._topology.local)
            room = max(FIRST_STAGING_BYTES, 1 << (nbytes - 1).bit_length())
            self._staging = yield from segments.create(node, room)
        return [region[:nbytes].view(dtype) for region in self._staging.regions]


def _copy(sources: Sequence[Array], targets: Sequence[Array]) -> None:
    """Copy the elements of `sources`, one after another, into those of `targets`.

    One of the two is a single array, or both have the same cuts.
    """
    if len(sources) == len(targets):
        for source, target in zip(sources, targets, strict=True):
            if source is not target:
                np.copyto(target, source)
    elif len(targets) == 1:
        np.concatenate(sources, out=targets[0])
    else:
        start = 0
        for target in targets:
            np.copyto(target, sources[0][start : start + target.size])
            start += target.size


def _pieces(arrays: Sequence[Array], limit: int) -> Iterator[Sequence[Array]]:
    """Cut the elements of `arrays`, in order, into runs of `limit` and a rest."""
    if sum(array.size for array in arrays) <= limit:
        yield arrays
        return
    run: list[Array] = []
    room = limit
    for array in arrays:
        start = 0
        while start < array.size:
            cut = array[start : start + room]
            run.append(cut)
            start += cut.size
            room -= cut.size
            if not room:
                yield run
                run, room = [], limit
    if run:
        yield run
