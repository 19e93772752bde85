"""The collectives as functions that autograd can differentiate.

The gradient of a collective is a collective: `backward()` of one must be reached on
every rank of its process set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import runtime
from ..messages import Op
from .handles import Reduction, start_allreduce, start_broadcast

if TYPE_CHECKING:
    from ..process_sets import ProcessSet


class DifferentiableAllreduce(torch.autograd.Function):
    """All-reduces tensors; the gradient is all-reduced with the same operation."""

    @staticmethod
    def forward(
        ctx: Any,
        reduction: Reduction,
        name: str | None,
        in_place: bool,
        grouped: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the reduced tensors: new ones, or `tensors` if `in_place`."""
        ctx.reduction, ctx.grouped = reduction, grouped
        if in_place:
            ctx.mark_dirty(*tensors)
        handle = start_allreduce(
            tensors, reduction, name, in_place=in_place, grouped=grouped
        )
        result = handle.wait()
        return result if isinstance(result, tuple) else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Reduce the gradients under an automatic name, differentiably."""
        if ctx.reduction.op not in (Op.AVERAGE, Op.SUM):
            raise NotImplementedError(
                f"allreduce with {ctx.reduction.op.name.title()} has no gradient: "
                "only Average and Sum have one"
            )
        reduced = DifferentiableAllreduce.apply(
            ctx.reduction, None, False, ctx.grouped, *grads
        )
        return (None, None, None, None, *reduced)


class DifferentiableBroadcast(torch.autograd.Function):
    """Broadcasts a tensor; the root's gradient is the average of all ranks'."""

    @staticmethod
    def forward(
        ctx: Any,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
        in_place: bool,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        """Return the root's values: in a new tensor, or in `tensor` if `in_place`."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        if in_place:
            ctx.mark_dirty(tensor)
        handle = start_broadcast(
            tensor, root_rank, name, process_set, in_place=in_place
        )
        result: torch.Tensor = handle.wait()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Average the gradients; ranks other than the root had no influence: zero."""
        reduction = Reduction(process_set=ctx.process_set)
        (reduced,) = DifferentiableAllreduce.apply(reduction, None, False, False, grad)
        is_root = runtime.rank() == ctx.root_rank
        return (None, None, None, None, reduced if is_root else torch.zeros_like(grad))
