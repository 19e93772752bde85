"""Reduces an optimizer's gradients while backward runs.

Each parameter has two hooks, around the accumulation of its gradient. The one after
it moves the gradient into its bucket; the last one of a bucket submits it. When the
outermost backward ends, buckets that are still incomplete are submitted as they are,
then all are waited for: `backward()` returns with reduced gradients.

Guarantees, all on the thread that runs backward:
- Every rank submits each bucket exactly once a reduction, used here or not. The order
  may differ from rank to rank, since the engine orders.
- All optimizers submit at the end of a backward before any of them waits, so several
  that take part in one backward cannot wait for each other across ranks.
- Nothing writes to a bucket in flight: a gradient that arrives late is refused before
  it is added. To know which gradient of a parameter is its last, the reducer counts
  how many arrive in the first backward that reaches it, whose buckets go at its end.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from .. import runtime
from ..errors import HvliteError, UsageError
from ..messages import Op
from .backward import BackwardWatch, after_other_callbacks
from .buckets import Bucket, Segment, Slot, Wire
from .handles import start_allreduce
from .plan import Part, partition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .compression import Compressor
    from .handles import Reduction

Named = tuple[str, torch.Tensor]
# id of a parameter -> the slot that reduces it (and keeps the parameter alive). Used by
# the thread that makes and drops optimizers.
_OWNERS: dict[int, Slot] = {}
Loss = torch.Tensor | float | None  # what a closure returns


@dataclass(frozen=True)
class Settings:
    """What a `Reducer` does with gradients; the same on every rank."""

    name: str
    reduction: Reduction
    compression: type[Compressor]
    sparse_as_dense: bool


class Reducer:
    """The slots, buckets and hooks of one optimizer.

    Holds the parameters but not the optimizer, whose end removes the hooks.
    """

    def __init__(self, settings: Settings, passes_per_step: int) -> None:
        self.passes_per_step = passes_per_step
        self._settings = settings
        # The old part of a sum that is summed again counts once, not once a rank.
        self._share = 1 / runtime.size()
        self._sums = settings.reduction.op is Op.SUM
        self._segments: list[Segment] = []
        self._buckets: list[Bucket] = []
        self._slots: list[Slot] = []
        self._frozen: list[Named] = []
        self._nodes: list[object] = []  # torch drops the hooks of a node nobody holds
        self._watch = BackwardWatch(self._backward_ends)
        self._passes = 0
        self._reduces = False  # the pass under way is one that communicates
        self._reduced = False  # gradients are reduced, and unchanged since

    # -- construction ---------------------------------------------------------------

    def add(self, named: Sequence[Named], groups: Sequence[Sequence[int]] = ()) -> None:
        """Make buckets in a new segment for parameters, and hook them.

        Args:
            named: names and parameters in order of creation. Those that require no
                gradient are left out until they do.
            groups: positions in `named`, for each group that shares a bucket.
        """
        self._frozen += [one for one in named if not one[1].requires_grad]
        wires = self._wires(named)
        parts = [
            Part(
                (param.dtype, param.device),
                param.requires_grad * param.numel() * wire.dtype.itemsize,
            )
            for (_, param), wire in zip(named, wires, strict=True)
        ]
        buckets: list[Bucket] = []
        for indices in partition(parts, groups, runtime.config().bucket_bytes):
            slots = [Slot(*named[i]) for i in indices if named[i][1].requires_grad]
            if slots:
                name = f"bucket{len(self._buckets) + len(buckets)}"
                name = f"{self._settings.name}.{name}"
                buckets.append(Bucket(name, slots, wires[indices[0]]))
        if buckets:
            name = f"{self._settings.name}.segment{len(self._segments)}"
            self._segments.append(Segment(name, buckets))
            self._buckets += buckets
            self._hook([slot for bucket in buckets for slot in bucket.slots])

    def _wires(self, named: Sequence[Named]) -> list[Wire]:
        dtypes = {param.dtype for _, param in named}
        wires = {dtype: Wire.of(self._settings.compression, dtype) for dtype in dtypes}
        return [wires[param.dtype] for _, param in named]

    def _hook(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._slots.append(slot)
            node = torch.autograd.graph.get_gradient_edge(slot.param).node
            self._nodes.append(node)
            if earlier := _OWNERS.get(id(slot.param)):
                earlier.give_up()
            _OWNERS[id(slot.param)] = slot
            slot.hooks = [
                node.register_prehook(partial(self._before, slot)),
                slot.param.register_post_accumulate_grad_hook(
                    partial(self._after, slot)
                ),
            ]

    def remove_hooks(self) -> None:
        """Leave the parameters alone from now on."""
        for slot in self._slots:
            slot.give_up()
            if _OWNERS.get(id(slot.param)) is slot:
                del _OWNERS[id(slot.param)]

    # -- during backward ------------------------------------------------------------

    def _before(self, slot: Slot, _grads: object) -> None:
        """Runs when a gradient has been computed and is about to be accumulated."""
        if self._watch.enters_new():
            self._begin()
        if slot.bucket.handle is not None:
            raise UsageError(
                f"parameter '{slot.name}' got another gradient after its bucket was "
                f"sent: it was used {slot.expected} times in earlier backward passes "
                "and more often in this one (checkpoint with use_reentrant=False?)"
            )
        if slot.reduced is not None:
            with torch.no_grad():
                slot.share_reduced(self._share)

    def _after(self, slot: Slot, param: torch.Tensor) -> None:
        """Runs when `param.grad` has the gradient."""
        if self._watch.enters_new():  # a parameter that was cast has no `_before`
            self._begin()
        grad = param.grad
        if grad is not None and not slot.holds(grad):
            if grad.is_sparse:
                grad = self._densify(slot, grad)
            slot.bucket.take(slot, grad)
        slot.fired += 1
        if slot.fired == slot.expected and self._reduces:
            bucket = slot.bucket
            bucket.pending -= 1
            if not bucket.pending:
                self._send(bucket)

    def _densify(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        if not self._settings.sparse_as_dense:
            raise UsageError(
                f"parameter '{slot.name}' has a sparse gradient: make the optimizer "
                "with sparse_as_dense=True"
            )
        slot.param.grad = grad.to_dense()
        return slot.param.grad

    def _begin(self) -> None:
        """Prepare for a backward pass, whatever became of the one before."""
        self._drain()
        self._prepare()
        self._reduced = False
        self._reduces = self._passes + 1 >= self.passes_per_step
        for slot in self._slots:
            slot.fired = 0
        for bucket in self._buckets:
            bucket.pending = len(bucket.slots)

    def _backward_ends(self) -> None:
        for slot in self._slots:
            slot.expected = max(slot.expected, slot.fired)
        self._passes += 1
        if self._reduces:
            self._send_all()
            after_other_callbacks(self._finish)

    # -- reduction ------------------------------------------------------------------

    def synchronize(self) -> None:
        """Reduce what has changed since the last reduction, on every rank.

        Called where backward has not done it: after too few passes, or where no
        backward reached a parameter here while it did elsewhere.
        """
        if not self._reduced:
            self._prepare()
            self._send_all()
            self._finish()

    def _prepare(self) -> None:
        thawed = [one for one in self._frozen if one[1].requires_grad]
        if thawed:
            self._frozen = [one for one in self._frozen if not one[1].requires_grad]
            self.add(thawed)
        for segment in self._segments:
            segment.attach()

    def _send(self, bucket: Bucket) -> None:
        with torch.no_grad():
            bucket.send(self._settings.reduction, self._share)

    def _send_all(self) -> None:
        for bucket in self._buckets:
            if bucket.handle is None:
                self._send(bucket)

    def _finish(self) -> None:
        """Wait for all buckets, whatever becomes of each, and hand out the results."""
        failure: HvliteError | None = None
        for bucket in self._buckets:
            try:
                bucket.receive()
            except HvliteError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.deliver(keep_reduced=self._sums)
        self._reduced = True

    def _drain(self) -> None:
        """Wait for what a backward that was broken off has left under way."""
        for bucket in self._buckets:
            with contextlib.suppress(HvliteError):
                bucket.receive()

    # -- between backward passes ----------------------------------------------------

    def start_over(self) -> None:
        """Note that the gradients were zeroed, or used up by a step."""
        self._passes = 0
        self._reduced = False

    def before_zeroing(self) -> None:
        """Make sure that the gradients may be written to."""
        self._drain()

    def reduce_loss(
        self, loss: torch.Tensor | float | None
    ) -> torch.Tensor | float | None:
        """Reduce what a closure returned as its gradients were, for equal decisions."""
        if loss is None:
            return None
        (reduced,) = start_allreduce(
            [torch.as_tensor(loss).detach()],
            self._settings.reduction,
            f"{self._settings.name}.loss",
            in_place=False,
        ).wait_all()
        return reduced if isinstance(loss, torch.Tensor) else float(reduced)
