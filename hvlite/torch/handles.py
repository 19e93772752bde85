"""What is under way: torch's half of a handle, and the two calls that start one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .. import submission
from ..errors import UsageError
from ..messages import Op
from ..process_sets import ProcessSet, global_process_set
from .tensors import Staged, like, stage, stage_in_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ..engine.handles import Handle as EngineHandle
    from .tensors import Array

    Started = EngineHandle[list[Array]] | EngineHandle[Array]


class Reduction(NamedTuple):
    """How an all-reduce combines values; the same on every rank."""

    op: Op = Op.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set


class Handle:
    """An operation on tensors that was started; give it to `synchronize`.

    Owned by the thread that started the operation. Keeps the tensors alive, so that
    the engine never writes into memory that is gone.
    """

    def __init__(
        self,
        started: Started,
        staged: Sequence[Staged],
        *,
        in_place: bool,
        grouped: bool = False,
    ) -> None:
        self._started: Started | None = started
        self._staged = staged
        self._in_place = in_place
        self._grouped = grouped

    def poll(self) -> bool:
        """Say whether `wait` would return at once.

        Raises:
            UsageError: it was waited for already.
        """
        if self._started is None:
            raise _spent()
        return self._started.poll()

    def wait(self) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Wait for the end and return the result; None if that was returned before.

        Returns:
            The tensor, or a tuple of them for a grouped operation: the caller's own
            where it works in place, else new ones, in the strides of the inputs.

        Raises:
            HvliteError: the operation failed; the tensors' contents are undefined.
        """
        if self._started is None:
            return None
        tensors = self.wait_all()
        return tensors if self._grouped else tensors[0]

    def wait_all(self) -> tuple[torch.Tensor, ...]:
        """As the first `wait`, but always a tuple."""
        if self._started is None:
            raise _spent()
        started, self._started = self._started, None
        staged, self._staged = self._staged, ()
        result = started.wait()
        if self._in_place:
            return tuple(one.write_back() for one in staged)
        arrays = result if isinstance(result, list) else [result]
        return tuple(
            like(array, one.tensor) for array, one in zip(arrays, staged, strict=True)
        )


def start_allreduce(
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    name: str | None,
    *,
    in_place: bool,
    grouped: bool = False,
) -> Handle:
    """Start one all-reduce of all `tensors`; every rank of the set must call it.

    Raises:
        UsageError: an argument that was refused; nothing was sent.
    """
    staged = [stage_in_place(one) if in_place else stage(one) for one in tensors]
    started = submission.start_allreduce(
        [one.array for one in staged],
        name=name,
        op=reduction.op,
        prescale_factor=reduction.prescale,
        postscale_factor=reduction.postscale,
        process_set=reduction.process_set,
        in_place=in_place,
        device="+".join(sorted({one.device.type for one in tensors})) or "cpu",
    )
    return Handle(started, staged, in_place=in_place, grouped=grouped)


def start_broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool,
) -> Handle:
    """Start a broadcast from `root_rank`; every rank of the set must call it.

    Raises:
        UsageError: an argument that was refused; nothing was sent.
    """
    staged = stage_in_place(tensor) if in_place else stage(tensor)
    started = submission.start_broadcast(
        staged.array,
        root_rank=root_rank,
        name=name,
        process_set=process_set,
        in_place=in_place,
        device=tensor.device.type,
    )
    return Handle(started, [staged], in_place=in_place)


def _spent() -> UsageError:
    return UsageError("this handle was synchronised already")
