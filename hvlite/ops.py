"""The operations on NumPy arrays: what every framework's shim is built on.

Each operation has a form that returns a `Handle` at once and one that waits. Every rank
of the process set must submit the same request; names, not program order, tell which
belong together.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from . import runtime
from .errors import UsageError
from .messages import Op
from .process_sets import ProcessSet, global_process_set
from .submission import (
    start_allreduce,
    start_barrier,
    start_broadcast,
    start_single_allreduce,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from .engine.handles import Handle
    from .transport.base import Array

Average, Sum, Min, Max, Product = Op.AVERAGE, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT


def allreduce(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Combine an array over all ranks of the process set; every one must call.

    Args:
        tensor: any shape, a dtype of `messages.DTYPES`; not modified. Its shape and
            dtype must be equal on all ranks.
        average: deprecated: True for Average, False for Sum.
        name: what the ranks match the call by; by default its count among the unnamed.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor: multiplied in before the reduction, in the array's dtype.
        postscale_factor: multiplied in after it.
        process_set: the ranks that take part.

    Returns:
        A new array in C order, bitwise equal on all ranks. Sums are in the array's
        dtype (integers wrap; half floats accumulate in float32), integer averages
        truncate toward zero.

    Raises:
        MismatchError: the ranks passed different things; the same error on each.
        UsageError: an argument that no rank could use; nothing was submitted.
    """
    return allreduce_async(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def allreduce_async(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Start `allreduce`; the array must not change until `synchronize(handle)`."""
    return start_single_allreduce(
        np.asarray(tensor),
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce(
    tensors: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Combine several arrays as one operation: one negotiation, few messages.

    The arguments are those of `allreduce`; the arrays may differ in shape and dtype.
    The results of one dtype share one piece of memory.
    """
    return grouped_allreduce_async(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def grouped_allreduce_async(
    tensors: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Array]]:
    """Start `grouped_allreduce`; no array may change until `synchronize(handle)`."""
    return start_allreduce(
        [np.asarray(tensor) for tensor in tensors],
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def broadcast(
    tensor: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return a copy of rank `root_rank`'s array on every rank; every one must call.

    Args:
        tensor: any shape and dtype, equal on all ranks; only the root's values count.
        root_rank: the world rank whose values are taken.
        name: what the ranks match the call by.
        process_set: the ranks that take part.

    Raises:
        MismatchError: shapes, dtypes or roots differ; the same error on each rank.
        UsageError: `root_rank` is not in the process set.
    """
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def broadcast_async(
    tensor: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Start `broadcast`; the array must not change until `synchronize(handle)`."""
    return start_broadcast(
        np.asarray(tensor), root_rank=root_rank, name=name, process_set=process_set
    )


def broadcast_object(
    obj: Any = None,  # noqa: ANN401  # any object that cloudpickle takes
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # noqa: ANN401
    """Return a copy of rank `root_rank`'s object on every rank; every one must call.

    Args:
        obj: anything cloudpickle can serialize; ignored elsewhere than on the root.
        root_rank: the world rank whose object is taken.
        name: what the ranks match the call by.
        process_set: the ranks that take part.
    """
    is_root = runtime.rank() == root_rank
    payload = np.frombuffer(cloudpickle.dumps(obj) if is_root else b"", dtype=np.uint8)
    length = np.array(payload.size, dtype=np.int64)
    length = broadcast(length, root_rank, name and f"{name}.length", process_set)
    if not is_root:
        payload = np.empty(int(length), dtype=np.uint8)
    payload = broadcast(payload, root_rank, name and f"{name}.payload", process_set)
    return obj if is_root else cloudpickle.loads(payload.tobytes())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set is here; what was started goes on."""
    start_barrier(process_set).wait()


def synchronize(handle: Handle[Any]) -> Any:  # noqa: ANN401  # the handle's result
    """Wait for an operation started by one of the `_async` calls; return its result."""
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Say whether `synchronize(handle)` would return at once."""
    return handle.poll()


def resolve_op(op: Op | None, average: bool | None) -> Op:
    """Return the operation that the pair of arguments means.

    Raises:
        UsageError: both are given, or `op` is not one of hvlite's.
    """
    if average is None:
        try:
            return Op.AVERAGE if op is None else Op(op)
        except ValueError:
            known = "Average, Sum, Min, Max or Product"
            raise UsageError(f"op={op!r} is not known: use {known}") from None
    if op is not None:
        raise UsageError("give op= or average=, not both; average= is deprecated")
    warnings.warn(
        "average= is deprecated: use op=Average or op=Sum",
        DeprecationWarning,
        stacklevel=3,
    )
    return Op.AVERAGE if average else Op.SUM
