"""Making ranks start equal: parameters, optimizer state, any object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import runtime
from ..errors import UsageError
from ..ops import broadcast_object
from ..process_sets import ProcessSet, global_process_set
from .handles import Handle, start_broadcast

Parameters = (
    Mapping[str, torch.Tensor]
    | Iterable[torch.Tensor]
    | Iterable[tuple[str, torch.Tensor]]
)


def broadcast_parameters(
    params: Parameters,
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite tensors with the values they have on `root_rank`, in place.

    Every rank of `process_set` must call it, with equal names, shapes and dtypes.

    Args:
        params: a `state_dict()`, `named_parameters()`, or any tensors in one order.
        root_rank: rank in the world whose values everyone gets.
        process_set: the ranks that take part.

    Raises:
        UsageError: an entry is not a tensor; nothing was sent.
        MismatchError: ranks disagree on a shape or dtype.
    """
    named = _named_tensors(params)
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"'{name}' is a {type(tensor).__name__}, not a tensor: "
                "use broadcast_object for it"
            )
    _broadcast_all(named, root_rank, process_set)


def _named_tensors(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, (str, bytes, torch.Tensor)) or not isinstance(
        params, Iterable
    ):
        raise UsageError(
            "broadcast_parameters needs a dict, tensors, or (name, tensor) pairs, "
            f"not a {type(params).__name__}"
        )
    return [
        entry if isinstance(entry, tuple) else (f"parameter.{index}", entry)
        for index, entry in enumerate(params)
    ]


def _broadcast_all(
    named: Iterable[tuple[str, torch.Tensor]], root_rank: int, process_set: ProcessSet
) -> None:
    """Broadcast tensors in place, all of them under way at once."""
    handles: list[Handle] = [
        start_broadcast(tensor, root_rank, name, process_set, in_place=True)
        for name, tensor in named
    ]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
) -> None:
    """Give every rank the optimizer state and options of `root_rank`.

    Every rank must call it. Ranks may have no state yet, or another: it is replaced.
    Parameters and their gradients are not touched, nor is anything on the root.

    Args:
        optimizer: any optimizer, wrapped or not, over the same parameters everywhere.
        root_rank: rank in the world whose state everyone gets.
        model: not needed; accepted for Horovod's sake.

    Raises:
        UsageError: this rank's optimizer has other parameters than the root's; the
            others are served all the same.
    """
    del model
    is_root = runtime.rank() == root_rank
    tensors: list[torch.Tensor] = []
    drawing = broadcast_object(
        _draw(optimizer, tensors) if is_root else None, root_rank
    )
    if not is_root:
        drawing = _rebuild(drawing, optimizer, tensors)
    named = ((f"optimizer_state.{i}", one) for i, one in enumerate(tensors))
    _broadcast_all(named, root_rank, global_process_set)
    if not is_root:
        _install(optimizer, drawing, root_rank)


@dataclass(frozen=True)
class _Hole:
    """Stands for a tensor in what is pickled; its values travel on their own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    on_cpu: bool


@dataclass(frozen=True)
class _Other:
    """A key of the state that is not a parameter."""

    key: Any


@dataclass(frozen=True)
class _Drawing:
    """An optimizer's state and options, with holes in place of tensors."""

    sizes: list[int]
    state: list[tuple[int | _Other, Any]]
    groups: list[dict[str, Any]]


def _draw(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> _Drawing:
    """Describe `optimizer`, and append its tensors in the order of their holes."""
    index_of = {param: index for index, param in enumerate(_parameters(optimizer))}
    state = [
        (index_of.get(key, _Other(key)), _punch(value, tensors))
        for key, value in optimizer.state.items()
    ]
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return _Drawing(_sizes(optimizer), state, _punch(groups, tensors))


def _punch(value: Any, tensors: list[torch.Tensor]) -> Any:  # noqa: ANN401  # any object
    """Copy a tree of plain containers with the tensors cut out."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        strides = torch.empty_like(value, device="meta").stride()
        on_cpu = value.device.type == "cpu"
        return _Hole(value.dtype, tuple(value.shape), strides, on_cpu)
    if type(value) is dict:
        return {key: _punch(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_punch(item, tensors) for item in value)
    return value


def _build(drawn: Any, device: torch.device, tensors: list[torch.Tensor]) -> Any:  # noqa: ANN401
    """Reverse `_punch` with new tensors, appended in the order of their holes."""
    if isinstance(drawn, _Hole):
        where = torch.device("cpu") if drawn.on_cpu else device
        tensors.append(
            torch.empty_strided(
                drawn.shape, drawn.strides, dtype=drawn.dtype, device=where
            )
        )
        return tensors[-1]
    if type(drawn) is dict:
        return {key: _build(item, device, tensors) for key, item in drawn.items()}
    if type(drawn) in (list, tuple):
        return type(drawn)(_build(item, device, tensors) for item in drawn)
    return drawn


def _rebuild(
    drawing: _Drawing, optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]
) -> _Drawing:
    """Fill the holes of a drawing with new tensors, which are appended in their order.

    They are made after the drawing and not after what this rank has, so that what is
    sent fits on every rank, and one with another optimizer leaves nobody waiting.
    """
    devices = [param.device for param in _parameters(optimizer)]
    state = [
        (key, _build(value, _device(devices, key), tensors))
        for key, value in drawing.state
    ]
    groups = _build(drawing.groups, _device(devices, 0), tensors)
    return _Drawing(drawing.sizes, state, groups)


def _install(
    optimizer: torch.optim.Optimizer, drawing: _Drawing, root_rank: int
) -> None:
    """Give `optimizer` the state and the options of a drawing without holes."""
    if _sizes(optimizer) != drawing.sizes:
        raise UsageError(
            f"rank {runtime.rank()}'s optimizer has groups of {_sizes(optimizer)} "
            f"parameters, and that of rank {root_rank} has {drawing.sizes}"
        )
    for group, options in zip(optimizer.param_groups, drawing.groups, strict=True):
        group.update(options)
    params = _parameters(optimizer)
    optimizer.state.clear()
    for key, value in drawing.state:
        optimizer.state[params[key] if isinstance(key, int) else key.key] = value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _device(devices: Sequence[torch.device], key: int | _Other) -> torch.device:
    """Return where a state tensor of parameter `key` belongs that is not on the CPU."""
    if isinstance(key, int) and key < len(devices):
        return devices[key]
    return torch.device("cpu")
