"""Gradient buckets: where each parameter's gradient lies in node-shared memory.

A bucket is a run of elements of one dtype that is all-reduced in one request: the
gradients of its parameters, each in the parameter's own strides, then one flag per
parameter. A rank sets a flag to 1 if it has a gradient for that parameter and to 0,
with zeros for the gradient, if not; so after the reduction a flag that is not 0 says
that some rank has one. Buckets of one device and dtype start at multiples of 64 bytes
within one segment.

Owned by the thread that runs backward; while a bucket has a handle, its memory
belongs to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import submission
from .tensors import numpy_dtype, view_as_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle

    from ..engine.handles import Handle
    from ..engine.host_plane import SharedBuffer
    from .compression import Compressor
    from .handles import Reduction

ALIGNMENT = 64


@dataclass(frozen=True)
class Wire:
    """How the gradients of one dtype travel."""

    compression: type[Compressor]
    dtype: torch.dtype
    context: torch.dtype | None

    @classmethod
    def of(cls, compression: type[Compressor], dtype: torch.dtype) -> Wire:
        """Ask `compression` what it makes of gradients of `dtype`."""
        wire, context = compression.compress(torch.empty(0, dtype=dtype))
        return cls(compression, wire.dtype, context)


class Slot:
    """One parameter's part of a bucket.

    `place` is where the gradient lies, in the parameter's strides; it is never given
    away. `view` is another tensor of the same memory, to be `param.grad`. `fired`
    counts the gradients that arrived in the backward pass under way, `expected` is how
    many an earlier pass had (0: not known yet). `reduced` is the tensor that holds a
    sum over all ranks, until a local gradient is added to it; kept for Sum only.
    `hooks` is None once another optimizer, wrapped later, reduces this parameter: two
    would write to each other's buckets.
    """

    __slots__ = (
        "address",
        "bucket",
        "expected",
        "fired",
        "hooks",
        "name",
        "param",
        "place",
        "reduced",
        "view",
    )

    def __init__(self, name: str, param: torch.Tensor) -> None:
        self.name = name
        self.param = param
        self.bucket: Bucket
        self.place: torch.Tensor
        self.view: torch.Tensor
        self.address: int
        self.fired = 0
        self.expected = 0
        self.reduced: torch.Tensor | None = None
        self.hooks: list[RemovableHandle] | None = []

    def give_up(self) -> None:
        """Leave the parameter alone; this slot counts as unused from now on."""
        for hook in self.hooks or ():
            hook.remove()
        self.hooks = None

    def describe(self, wire: torch.dtype) -> str:
        """Return this slot's line in the layout that ranks compare."""
        param = self.param
        dtype, wire_dtype = (str(d).removeprefix("torch.") for d in (param.dtype, wire))
        shape, strides = tuple(param.shape), _strides(param)
        return f"{self.name} {dtype} as {wire_dtype} {shape} strides {strides}"

    def attach(self, place: torch.Tensor) -> None:
        """Take the memory of `place`."""
        self.place = place
        self.view = _alias(place)
        self.address = place.data_ptr()

    def holds(self, grad: torch.Tensor) -> bool:
        """Say whether `grad` is `view`, and lies where it should.

        `param.grad.data = x` and `model.to(dtype)` give the same tensor other memory.
        """
        return grad is self.view and grad.data_ptr() == self.address

    def show(self) -> None:
        """Make what lies here `param.grad`."""
        if self.view.data_ptr() != self.address:
            self.view = _alias(self.place)
        self.param.grad = self.view

    def share_reduced(self, share: float) -> None:
        """Make `reduced` this rank's part of the sum, to be summed again."""
        reduced, self.reduced = self.reduced, None
        if reduced is not None and reduced is self.param.grad:
            reduced.detach().mul_(share)


class Bucket:
    """Some slots, reduced together; `handle` is set while that is under way."""

    def __init__(self, name: str, slots: Sequence[Slot], wire: Wire) -> None:
        self.name = name
        self.slots = slots
        self.wire = wire
        first = slots[0].param
        self.device = first.device
        # Staged: p.grad stays a tensor of its own, and the bucket holds what travels.
        self.staged = self.device.type != "cpu" or wire.dtype != first.dtype
        self.numpy_dtype = numpy_dtype(torch.empty(0, dtype=wire.dtype))
        self.count = sum(slot.param.numel() for slot in slots) + len(slots)
        self.layout = "\n".join(slot.describe(wire.dtype) for slot in slots)
        self.pending = 0
        self.handle: Handle[None] | None = None
        self._buffer: SharedBuffer
        self._offset = 0
        self._flags: torch.Tensor
        for slot in slots:
            slot.bucket = self

    @property
    def nbytes(self) -> int:
        """Bytes that one reduction moves."""
        return self.count * self.wire.dtype.itemsize

    def attach(self, buffer: SharedBuffer, offset: int) -> None:
        """Take the memory at byte `offset` of `buffer`."""
        self._buffer, self._offset = buffer, offset
        memory = view_as_tensor(buffer.array[offset : offset + self.nbytes])
        storage = memory.untyped_storage()  # begins where the slice does
        start = 0
        for slot in self.slots:
            shape, strides = slot.param.shape, _strides(slot.param)
            slot.attach(self._tensor(storage, start, shape, strides))
            start += slot.param.numel()
        self._flags = self._tensor(storage, start, (len(self.slots),), (1,))

    def _tensor(
        self,
        storage: torch.UntypedStorage,
        start: int,
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> torch.Tensor:
        """Return a tensor that is no view, so that each has its own version counter."""
        empty = torch.empty(0, dtype=self.wire.dtype)
        return empty.set_(storage, start, tuple(shape), tuple(strides))

    def take(self, slot: Slot, grad: torch.Tensor) -> bool:
        """Move a gradient into its slot and make the slot `param.grad`, if it fits.

        Otherwise (other dtype or device, part of a graph) `param.grad` stays as it is
        until `send` copies it. Nothing here requires grad, so autograd records nothing;
        entering no_grad for each gradient would take longer than copying a small one.
        """
        if grad.requires_grad or not self._fits(slot, grad):
            return False
        slot.place.copy_(grad)
        slot.show()
        return True

    def _fits(self, slot: Slot, tensor: torch.Tensor) -> bool:
        """Say whether `tensor` is as the slot: no longer so if the model was cast."""
        alike = tensor.dtype == slot.place.dtype and tensor.is_cpu
        return alike and not self.staged

    def send(self, reduction: Reduction, share: float) -> None:
        """Complete the bucket and submit it; `share` is 1 / ranks. Under no_grad."""
        self._flags.fill_(1)
        for index, slot in enumerate(self.slots):
            grad = slot.param.grad if slot.hooks is not None else None
            if grad is None:
                slot.place.zero_()
                self._flags[index] = 0
                continue
            if slot.reduced is not None:
                slot.share_reduced(share)
            if not slot.holds(grad) and not self.take(slot, grad):
                slot.place.copy_(self.wire.compression.compress(grad.detach())[0])
        self.handle = submission.start_shared_allreduce(
            self._buffer,
            self._offset,
            self.count,
            self.numpy_dtype,
            name=self.name,
            op=reduction.op,
            prescale_factor=reduction.prescale,
            postscale_factor=reduction.postscale,
            process_set=reduction.process_set,
            layout=self.layout,
            device=self.device.type,
        )

    def receive(self) -> None:
        """Wait for the reduction; it is over afterwards, unless one is interrupted.

        Raises:
            HvliteError: the reduction failed; what the bucket holds is undefined.
        """
        handle = self.handle
        if handle is None:
            return
        try:
            handle.wait()
        finally:
            if handle.poll():
                self.handle = None

    def deliver(self, keep_reduced: bool) -> None:
        """Give each parameter that some rank used its gradient. Under no_grad."""
        for slot, used in zip(self.slots, self._flags.tolist(), strict=True):
            if not used or slot.hooks is None:
                continue
            param = slot.param
            grad = param.grad
            if grad is None or not slot.holds(grad):
                self._give(slot, grad)
            if keep_reduced:
                slot.reduced = param.grad

    def _give(self, slot: Slot, grad: torch.Tensor | None) -> None:
        if grad is None and self._fits(slot, slot.param):
            slot.show()
            return
        result = self.wire.compression.decompress(slot.place, self.wire.context)
        if grad is None:
            grad = slot.param.grad = torch.empty_like(slot.param, requires_grad=False)
        grad.detach().copy_(result)


class Segment:
    """Buckets that lie in one piece of node-shared memory.

    The memory is asked for at once and waited for in `attach`, so that ranks may make
    their optimizers at different moments.
    """

    def __init__(self, name: str, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._offsets = []
        end = 0
        for bucket in buckets:
            self._offsets.append(end)
            end += -(-bucket.nbytes // ALIGNMENT) * ALIGNMENT
        layout = "\n".join(bucket.layout for bucket in buckets)
        self._handle: Handle[SharedBuffer] | None = submission.allocate(
            name, end, layout
        )

    def attach(self) -> None:
        """Wait for the memory and lay the buckets into it; once.

        Raises:
            MismatchError: the ranks' models differ; the text lists the differences.
        """
        if self._handle is None:
            return
        buffer = self._handle.wait()
        for bucket, offset in zip(self.buckets, self._offsets, strict=True):
            bucket.attach(buffer, offset)
        self._handle = None


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor of the same memory; no view, which shares its version."""
    return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload, no-any-return]


def _strides(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides autograd gives the gradient: the parameter's, if dense."""
    return torch.empty_like(param, device="meta").stride()
