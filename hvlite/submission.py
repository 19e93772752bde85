"""From checked arguments to a submission: the shims' way into the engine.

The `start_*` functions take NumPy arrays, build the request that ranks compare and the
memory that the engine works on, and hand both to the queue. They return at once; what
cannot be sent is refused here, before anything has been.
"""

from __future__ import annotations

import functools
import itertools
import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from . import runtime
from .engine.handles import Handle
from .engine.queue import Part, Submission
from .errors import UsageError
from .messages import Kind, Op, Request, TensorSpec, check_operation, dtype_name
from .process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .engine.coordinator import Engine
    from .engine.host_plane import SharedBuffer
    from .transport.base import Array

_DTYPE_AND_SHAPE = attrgetter("dtype", "shape")


def start_allreduce(
    arrays: Sequence[Array],
    *,
    name: str | None,
    op: Op,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
    device: str = "cpu",
) -> Handle[list[Array]]:
    """Submit arrays as one request.

    Args:
        arrays: any shapes, dtypes and strides; written to if `in_place`.
        name: what the ranks match it by; None for the next unnamed one.
        op: how to combine.
        prescale_factor: multiplied in before.
        postscale_factor: multiplied in after.
        process_set: the ranks that take part.
        in_place: whether the results go into `arrays` themselves.
        device: the kind of device that the caller's tensors lie on, on which all ranks
            must agree; the arrays themselves are in host memory.

    Returns:
        A handle of the list of results: `arrays`, or new arrays in C order.
    """
    request = _allreduce_request(
        arrays, name, op, prescale_factor, postscale_factor, process_set, device
    )
    engine = runtime.engine()
    handle: Handle[list[Array]] = Handle(engine.queue)
    if in_place:
        parts, write_back = _in_place(arrays)
        handle.promise(list(arrays))
        _submit(engine, request, name, handle, parts, write_back)
    else:
        parts = _out_of_place(arrays)
        handle.promise(_views(parts, arrays))
        _submit(engine, request, name, handle, parts)
    return handle


def start_single_allreduce(
    array: Array,
    *,
    name: str | None,
    op: Op,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Do `start_allreduce` for one array, not in place: a short way for many calls."""
    request = _allreduce_request(
        [array], name, op, prescale_factor, postscale_factor, process_set, "cpu"
    )
    engine = runtime.engine()
    handle: Handle[Array] = Handle(engine.queue)
    output = np.empty(array.shape, array.dtype)
    handle.promise(output)
    _submit(engine, request, name, handle, [Part([array.ravel()], [output.ravel()])])
    return handle


def start_shared_allreduce(
    buffer: SharedBuffer,
    offset: int,
    count: int,
    dtype: np.dtype[Any],
    *,
    name: str,
    op: Op,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    layout: str = "",
    device: str = "cpu",
) -> Handle[None]:
    """Submit `count` elements that lie in a shared buffer; reduced there, in place.

    Args:
        buffer: from `allocate`; the same one on all ranks.
        offset: where the elements begin, in bytes, a multiple of their size.
        count: number of elements.
        dtype: their dtype.
        name: what the ranks match it by.
        op: how to combine.
        prescale_factor: multiplied in before.
        postscale_factor: multiplied in after.
        process_set: the ranks that take part.
        layout: what the elements are, one line a part; compared on every call.
        device: the kind of device that their source lies on.
    """
    spec = TensorSpec(dtype_name(dtype), (count,))
    check_operation(name, spec.dtype, op)
    request = Request(
        Kind.ALLREDUCE,
        name,
        (spec,),
        op,
        prescale_factor,
        postscale_factor,
        process_set=_registered(process_set),
        device=device,
        segment=buffer.number,
        offset=offset,
        layout=layout,
    )
    engine = runtime.engine()
    handle: Handle[None] = Handle(engine.queue)
    engine.queue.put(Submission(request, 0, handle, segment=buffer.segment))
    return handle


def start_broadcast(
    array: Array,
    *,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
    device: str = "cpu",
) -> Handle[Array]:
    """Submit one array; the root's values go into it if `in_place`, else a new one."""
    number = _registered(process_set)
    if root_rank not in (process_set.ranks or ()):
        raise UsageError(
            f"broadcast '{name or ''}': root_rank={root_rank} is not one of the ranks "
            f"{process_set.ranks}"
        )
    request = Request(
        Kind.BROADCAST,
        name or "",
        (TensorSpec(dtype_name(array.dtype), array.shape),),
        root=root_rank,
        process_set=number,
        device=device,
    )
    engine = runtime.engine()
    handle: Handle[Array] = Handle(engine.queue)
    if in_place:
        parts, write_back = _in_place([array])
        handle.promise(array)
        _submit(engine, request, name, handle, parts, write_back)
    else:
        parts = _out_of_place([array])
        handle.promise(_views(parts, [array])[0])
        _submit(engine, request, name, handle, parts)
    return handle


def start_barrier(process_set: ProcessSet = global_process_set) -> Handle[None]:
    """Submit a barrier; done when every rank of the process set has submitted it."""
    engine = runtime.engine()
    request = Request(Kind.BARRIER, "", process_set=_registered(process_set))
    handle: Handle[None] = Handle(engine.queue)
    _submit(engine, request, None, handle)
    return handle


def allocate(name: str, nbytes: int, layout: str = "") -> Handle[SharedBuffer]:
    """Start to allocate `nbytes` bytes on every rank, shared inside each node.

    Args:
        name: what the ranks match the call by.
        nbytes: equal on all ranks.
        layout: what will be in it, one line a part, equal on all ranks: where it is
            not, every rank gets the MismatchError that lists the differing lines.
    """
    engine = runtime.engine()
    spec = TensorSpec("uint8", (nbytes,))
    request = Request(Kind.ALLOCATE, name, (spec,), layout=layout)
    handle: Handle[SharedBuffer] = Handle(engine.queue)
    _submit(engine, request, name, handle)
    return handle


def _registered(process_set: ProcessSet) -> int:
    """Return the number of a process set that this rank may use.

    Raises:
        UsageError: it is not registered.
    """
    number = process_set.process_set_id
    if number is None or process_set.ranks is None:
        runtime.size()  # raises if that is the cause, which says more
        raise UsageError(f"{process_set} is not registered")
    return number


def _allreduce_request(
    arrays: Sequence[Array],
    name: str | None,
    op: Op,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    device: str,
) -> Request:
    return _request(
        name or "",
        tuple([_spec(array.dtype, array.shape) for array in arrays]),
        op,
        float(prescale_factor),
        float(postscale_factor),
        _registered(process_set),
        device,
    )


# Requests come again step after step, and what follows from one is kept with it.
@functools.lru_cache(maxsize=4096)
def _request(
    name: str,
    specs: tuple[TensorSpec, ...],
    op: Op,
    prescale: float,
    postscale: float,
    process_set: int,
    device: str,
) -> Request:
    request = Request(
        Kind.ALLREDUCE,
        name,
        specs,
        op,
        prescale,
        postscale,
        process_set=process_set,
        device=device,
    )
    if math.isnan(prescale) or math.isnan(postscale):
        raise UsageError(f"allreduce '{name}': a scale factor is not a number")
    for dtype in request.dtypes:
        check_operation(name, dtype, op)
    return request


@functools.lru_cache(maxsize=4096)
def _spec(dtype: np.dtype[Any], shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(dtype_name(dtype), shape)


def _by_dtype(arrays: Sequence[Array]) -> dict[np.dtype[Any], list[Array]]:
    """Group the arrays, dtypes in order of appearance."""
    groups: dict[np.dtype[Any], list[Array]] = {}
    for array in arrays:
        groups.setdefault(array.dtype, []).append(array)
    return groups


def _out_of_place(arrays: Sequence[Array]) -> list[Part]:
    """Give each dtype one new array for the results."""
    return [
        Part(
            [array.ravel() for array in group],
            [np.empty(sum([array.size for array in group]), dtype)],
        )
        for dtype, group in _by_dtype(arrays).items()
    ]


def _views(parts: Sequence[Part], arrays: Sequence[Array]) -> list[Array]:
    """Cut the outputs of `_out_of_place(arrays)` into the shapes of `arrays`."""
    outputs = {part.outputs[0].dtype: part.outputs[0] for part in parts}
    starts = dict.fromkeys(outputs, 0)
    views: list[Array] = []
    for (dtype, shape), run in itertools.groupby(arrays, _DTYPE_AND_SHAPE):
        count = sum(1 for _ in run)
        start = starts[dtype]
        starts[dtype] = end = start + count * math.prod(shape)
        # One view of the run, which NumPy takes apart faster than we can cut it (into
        # arrays only down to one dimension).
        rows = outputs[dtype][start:end].reshape(count, *(shape or (1,)))
        views.extend(rows if shape else [row.reshape(()) for row in rows])
    return views


def _in_place(
    arrays: Sequence[Array],
) -> tuple[list[Part], list[tuple[Array, Array]]]:
    """Let the engine write into `arrays`, by way of copies where they have gaps."""
    parts, write_back = [], []
    for group in _by_dtype(arrays).values():
        flats = []
        for array in group:
            if not array.flags.writeable:
                raise UsageError(
                    f"an array of shape {array.shape} is read-only: pass a copy"
                )
            flat = array.ravel()  # a copy if the elements do not lie in C order
            if not array.flags.c_contiguous:
                write_back.append((array, flat.reshape(array.shape)))
            flats.append(flat)
        parts.append(Part(flats, flats))
    return parts, write_back


def _submit(
    engine: Engine,
    request: Request,
    name: str | None,
    handle: Handle[Any],
    parts: Sequence[Part] = (),
    write_back: Sequence[tuple[Array, Array]] = (),
) -> None:
    sequence = 0
    if name is None:
        sequence = engine.queue.sequence(request.process_set, request.kind)
    engine.queue.put(Submission(request, sequence, handle, parts, write_back))
