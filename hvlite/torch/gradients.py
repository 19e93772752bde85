"""The collectives as functions that autograd can differentiate.

The gradient of a collective is a collective: `backward()` of one must be reached on
every rank of its process set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.autograd.function import FunctionCtx

from .. import runtime
from ..messages import Op
from .handles import Reduction, start_allreduce, start_broadcast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..process_sets import ProcessSet

# What `backward` returns: None for each argument that is not a tensor.
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


def allreduce(
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    name: str | None,
    *,
    in_place: bool,
) -> tuple[torch.Tensor, ...]:
    """Reduce `tensors` as one operation that autograd records.

    Returns:
        The reduced tensors: new ones, or `tensors` if `in_place`.
    """
    reduced: tuple[torch.Tensor, ...] = _Allreduce.apply(  # type: ignore[no-untyped-call]
        reduction, name, in_place, *tensors
    )
    return reduced


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool,
) -> torch.Tensor:
    """Return the root's values by an operation that autograd records.

    Returns:
        A new tensor, or `tensor` if `in_place`.
    """
    received: torch.Tensor = _Broadcast.apply(  # type: ignore[no-untyped-call]
        root_rank, name, process_set, in_place, tensor
    )
    return received


class _ReductionContext(FunctionCtx):
    reduction: Reduction


class _Allreduce(torch.autograd.Function):
    """The gradient of a sum or average over ranks is the gradients' own."""

    @staticmethod
    def forward(
        ctx: _ReductionContext,
        reduction: Reduction,
        name: str | None,
        in_place: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.reduction = reduction
        if in_place:
            ctx.mark_dirty(*tensors)
        return start_allreduce(tensors, reduction, name, in_place=in_place).wait_all()

    @staticmethod
    def backward(ctx: _ReductionContext, *grads: torch.Tensor) -> Gradients:
        if ctx.reduction.op not in (Op.AVERAGE, Op.SUM):
            raise NotImplementedError(
                f"allreduce with {ctx.reduction.op.name.title()} has no gradient: "
                "only Average and Sum have one"
            )
        reduced = allreduce(grads, ctx.reduction, None, in_place=False)
        return (None, None, None, *reduced)


class _BroadcastContext(FunctionCtx):
    root_rank: int
    process_set: ProcessSet


class _Broadcast(torch.autograd.Function):
    """The root's gradient is the average of all ranks'; the others had no influence."""

    @staticmethod
    def forward(
        ctx: _BroadcastContext,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
        in_place: bool,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        if in_place:
            ctx.mark_dirty(tensor)
        (received,) = start_broadcast(
            tensor, root_rank, name, process_set, in_place=in_place
        ).wait_all()
        return received

    @staticmethod
    def backward(ctx: _BroadcastContext, grad: torch.Tensor) -> Gradients:
        reduction = Reduction(process_set=ctx.process_set)
        (reduced,) = allreduce([grad], reduction, None, in_place=False)
        is_root = runtime.rank() == ctx.root_rank
        return (None, None, None, None, reduced if is_root else torch.zeros_like(grad))
