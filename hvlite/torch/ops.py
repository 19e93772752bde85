"""The collectives on torch tensors, with Horovod's signatures.

Every rank of the process set must make the same call; differently named ones may
come in any order. What cannot be done is refused before anything is sent.

In each family the form ending in `_` writes its result into its input, and the
`async` one returns a handle for `synchronize`. Blocking forms are differentiable: the
gradient is reduced like the value, so all ranks must call `backward()`. An in-place
form on a leaf that requires grad writes to its data, which autograd does not see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..process_sets import ProcessSet, global_process_set
from . import gradients
from .compression import Compression, Compressor
from .handles import Handle, Reduction, start_allreduce, start_broadcast
from .tensors import require_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..messages import Op


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine `tensor` over all ranks of `process_set`.

    Args:
        tensor: same shape and dtype on every rank; not modified.
        average: deprecated, use `op`: True means Average and False means Sum.
        name: the same on every rank; by default counted per process set.
        compression: what travels in place of the values.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplies the values before they are combined.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same dtype and strides, equal on all ranks.

    Raises:
        UsageError: an argument was refused; nothing was sent.
        MismatchError: ranks disagree on dtype, shape, operation or factors.
    """
    reduction = Reduction(
        ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set
    )
    wire, context = compression.compress(tensor)
    (reduced,) = _reduce([wire], reduction, name, in_place=False)
    return compression.decompress(reduced, context)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `allreduce` does; leave `tensor` alone until it is synchronised."""
    reduction = Reduction(
        ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set
    )
    return start_allreduce([tensor], reduction, name, in_place=False)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Do what `allreduce` does in place, and return `tensor`."""
    reduction = Reduction(
        ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set
    )
    (reduced,) = _reduce([tensor], reduction, name, in_place=True)
    return reduced


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `allreduce_` does; leave `tensor` alone until it is synchronised."""
    reduction = Reduction(
        ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set
    )
    return start_allreduce([tensor], reduction, name, in_place=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine several tensors as one operation; arguments as for `allreduce`."""
    reduction = Reduction(
        ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set
    )
    compressed = [compression.compress(tensor) for tensor in tensors]
    wires = [wire for wire, _ in compressed]
    reduced = _reduce(wires, reduction, name, in_place=False)
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, compressed, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `grouped_allreduce` does; `synchronize` gives a tuple."""
    reduction = Reduction(
        ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set
    )
    return start_allreduce(tensors, reduction, name, in_place=False, grouped=True)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Do what `grouped_allreduce` does in place, and return `tensors`."""
    reduction = Reduction(
        ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set
    )
    return list(_reduce(tensors, reduction, name, in_place=True))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `grouped_allreduce_` does; `synchronize` gives a tuple."""
    reduction = Reduction(
        ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set
    )
    return start_allreduce(tensors, reduction, name, in_place=True, grouped=True)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the values that `tensor` has on `root_rank`.

    Args:
        tensor: same shape and dtype on every rank; not modified.
        root_rank: rank in the world, whatever the process set.
        name: the same on every rank; by default counted per process set.
        process_set: the ranks that take part.

    Returns:
        A new tensor on every rank, the root too. Its gradient reaches the root,
        averaged over the ranks, and is zero elsewhere.

    Raises:
        UsageError: an argument was refused; nothing was sent.
        MismatchError: ranks disagree on dtype, shape or root.
    """
    return _spread(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `broadcast` does; leave `tensor` alone until it is synchronised."""
    return start_broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Do what `broadcast` does in place, and return `tensor`."""
    return _spread(tensor, root_rank, name, process_set, in_place=True)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start what `broadcast_` does; leave `tensor` alone until it is synchronised."""
    return start_broadcast(tensor, root_rank, name, process_set, in_place=True)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of `process_set` has come here."""
    ops.barrier(process_set=process_set)


def poll(handle: Handle) -> bool:
    """Say whether `synchronize` would return at once.

    Raises:
        UsageError: the handle was synchronised already.
    """
    return handle.poll()


def synchronize(handle: Handle) -> Any:  # noqa: ANN401  # depends on the operation
    """Wait for an operation; return its tensor, or a tuple for a grouped one.

    A handle gives its result once: synchronised again, it returns None.

    Raises:
        HvliteError: the operation failed, on any rank.
    """
    return handle.wait()


def _reduce(
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    name: str | None,
    *,
    in_place: bool,
) -> tuple[torch.Tensor, ...]:
    if any(_is_tracked(tensor, in_place) for tensor in tensors):
        return gradients.allreduce(tensors, reduction, name, in_place=in_place)
    return start_allreduce(tensors, reduction, name, in_place=in_place).wait_all()


def _spread(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool,
) -> torch.Tensor:
    if _is_tracked(tensor, in_place):
        return gradients.broadcast(
            tensor, root_rank, name, process_set, in_place=in_place
        )
    handle = start_broadcast(tensor, root_rank, name, process_set, in_place=in_place)
    (received,) = handle.wait_all()
    return received


def _is_tracked(tensor: torch.Tensor, in_place: bool) -> bool:
    """Say whether autograd is to see the operation; a write to a leaf it cannot."""
    require_tensor(tensor)
    return (
        torch.is_grad_enabled()
        and tensor.requires_grad
        and not (in_place and tensor.is_leaf)
    )
