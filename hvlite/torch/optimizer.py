"""`DistributedOptimizer`: any torch optimizer, on gradients reduced over all ranks."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import UsageError
from ..messages import Op
from ..process_sets import ProcessSet, global_process_set
from .compression import Compression, Compressor
from .handles import Reduction
from .plan import split
from .reducer import Named, Reducer, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .reducer import Loss

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

# Numbers the optimizers of this process; every rank makes them in the same order.
_numbers = itertools.count()


def DistributedOptimizer(  # Horovod's name; it makes an object
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> OptimizerT:
    """Make `optimizer` work on gradients that are reduced over all ranks.

    From then on `backward()` returns with reduced gradients, equal on all ranks. It is
    the same object, with its state and hooks, whose class is now a subclass of what it
    was; schedulers made before or after go on working. Every rank must wrap its
    optimizers in the same order. A parameter without gradient counts as zero; without
    gradient on every rank it keeps `grad = None`.

    Args:
        optimizer: over the same parameters on every rank.
        named_parameters: as from `model.named_parameters()`, for readable errors; if
            given, it must cover all parameters of `optimizer`.
        compression: what travels in place of the gradients.
        backward_passes_per_step: how many backward passes add up here, undivided,
            before the last one reduces. `step()` reduces what fewer have left; before
            `GradScaler.unscale_` call `synchronize()` then.
        op: Average or Sum. A closure's loss is reduced in the same way.
        gradient_predivide_factor: divides before the sum and multiplies after it.
        num_groups: deprecated, use `groups`.
        groups: lists of parameters that are reduced as one request each, or how many
            such lists to make; by default they are formed by size.
        sparse_as_dense: turn sparse gradients into dense ones, which travel.
        process_set: the ranks that take part.

    Raises:
        UsageError: an argument was refused; `optimizer` is as it was.
        MismatchError: later, from the first `backward()` or `step()`, on every rank:
            the models differ; the text lists the parameters.
    """
    if num_groups:
        warnings.warn(
            "num_groups= is deprecated: use groups=", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    _check_optimizer(optimizer)
    _check_passes(backward_passes_per_step)
    reduction = _reduction(op, gradient_predivide_factor, process_set)
    named = _named(optimizer, named_parameters)
    indices = _grouped(groups, named)
    name = f"optimizer{next(_numbers)}"
    settings = Settings(name, reduction, compression, sparse_as_dense)
    reducer = Reducer(settings, backward_passes_per_step)
    reducer.add(named, indices)
    _convert(optimizer, reducer, named)
    return optimizer


class _Distributed(torch.optim.Optimizer):
    """What a wrapped optimizer does beyond its own class, which comes next in the MRO.

    Never constructed: `_convert` gives an existing optimizer a class made of both.
    """

    _reducer: Reducer
    _synchronizes = True
    # Horovod's name for it: parameter -> name.
    _parameter_names: dict[torch.Tensor, str]

    def step(
        self,
        closure: Callable[[], Loss] | None = None,
        **kwargs: Any,  # noqa: ANN401  # what GradScaler passes to a fused optimizer
    ) -> Any:  # noqa: ANN401  # what the wrapped class returns
        """Reduce what backward has not, then do the wrapped optimizer's step.

        Every rank must call it. With a `closure`, each call of it is followed by the
        reduction of its loss (and of its gradients, by its own backward).
        """
        # What a scheduler's own wrapper of `step` would do; see the marks below.
        self._opt_called = True
        if closure is not None:
            result = super().step(self._reducing(closure), **kwargs)  # type: ignore[arg-type]
        else:
            if self._synchronizes:
                self._reducer.synchronize()
            result = super().step(**kwargs)
        self._reducer.start_over()
        return result

    # torch, do not run the step hooks around this one: the wrapped class's step does.
    step.hooked = True  # type: ignore[attr-defined]
    # Schedulers, no need to replace this by a wrapper of the wrapped class's step.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _reducing(self, closure: Callable[[], Loss]) -> Callable[[], Loss]:
        def reduced() -> Loss:
            loss = closure()
            self._reducer.synchronize()
            return self._reducer.reduce_loss(loss)

        return reduced

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients as torch does, and start counting passes anew."""
        self._reducer.before_zeroing()
        super().zero_grad(set_to_none=set_to_none)
        self._reducer.start_over()

    def synchronize(self) -> None:
        """Reduce the gradients on all ranks, unless backward has done it."""
        self._reducer.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, `step()` takes the gradients as they are."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce after this many backward passes from now on; same on every rank."""
        _check_passes(passes)
        self._reducer.passes_per_step = passes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; every rank must add the same ones."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        named = _default_names(number, self.param_groups[number])
        self._parameter_names.update({param: name for name, param in named})
        self._reducer.add(named)


def _convert(
    optimizer: torch.optim.Optimizer, reducer: Reducer, named: Sequence[Named]
) -> None:
    """Turn `optimizer` into a distributed one, in place, so that nothing is lost."""
    wrapped = type(optimizer)
    body = {"__module__": __name__, "__doc__": wrapped.__doc__}
    optimizer.__dict__.pop(
        "step", None
    )  # a scheduler's wrapper; `_Distributed` has one
    optimizer.__class__ = type(wrapped.__name__, (_Distributed, wrapped), body)
    optimizer._reducer = reducer  # type: ignore[attr-defined]
    optimizer._parameter_names = {param: name for name, param in named}  # type: ignore[attr-defined]
    weakref.finalize(optimizer, reducer.remove_hooks).atexit = False


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"a torch optimizer is needed, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise UsageError("this optimizer is a DistributedOptimizer already")
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise UsageError(
            "the optimizer's step was replaced on the object, which wrapping would "
            "undo: wrap the optimizer first"
        )


def _check_passes(passes: int) -> None:
    if passes <= 0:
        raise UsageError(f"backward_passes_per_step must be at least 1, not {passes}")


def _reduction(op: Op, factor: float, process_set: ProcessSet) -> Reduction:
    if op not in (Op.AVERAGE, Op.SUM):
        raise UsageError(f"an optimizer's op must be Average or Sum, not {op!r}")
    if factor != 1.0 and op != Op.AVERAGE:
        raise UsageError("gradient_predivide_factor works with op=Average only")
    if process_set is not global_process_set:
        raise UsageError("an optimizer works on the global process set only")
    return Reduction(Op(op), 1 / factor, factor, process_set)


def _default_names(number: int, group: dict[str, Any]) -> list[Named]:
    params = group["params"]
    names = group.get("param_names") or [
        f"allreduce.noname.{number}.{index}" for index in range(len(params))
    ]
    return list(zip(names, params, strict=True))


def _named(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> list[Named]:
    """Return all parameters of `optimizer` in its order, with unique names."""
    named = [
        pair
        for number, group in enumerate(optimizer.param_groups)
        for pair in _default_names(number, group)
    ]
    if named_parameters is None:
        return named
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise UsageError(
            "named_parameters must give (name, parameter) tuples, "
            "as model.named_parameters() does"
        )
    names: dict[torch.Tensor, str] = {}
    seen: set[str] = set()
    for name, param in pairs:
        if name in seen:
            raise UsageError(f"named_parameters has the name '{name}' twice")
        seen.add(name)
        names.setdefault(param, name)
    for place, param in named:
        if param not in names:
            group, index = place.split(".")[-2:]
            raise UsageError(
                f"named_parameters lacks parameter {index} of group {group} of the "
                f"optimizer, of shape {tuple(param.shape)}"
            )
    return [(names[param], param) for _, param in named]


def _grouped(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, named: Sequence[Named]
) -> Sequence[Sequence[int]]:
    """Return `groups` as indices into `named`."""
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups <= 0:
            raise UsageError(f"groups must be at least 1, not {groups}")
        return split(len(named), groups)
    if not isinstance(groups, (list, tuple)):
        raise UsageError("groups must be a number or a list of lists of parameters")
    index_of = {param: index for index, (_, param) in enumerate(named)}
    result: list[list[int]] = []
    taken: set[int] = set()
    for group in groups:
        indices = []
        for param in group:
            if not isinstance(param, torch.Tensor) or param not in index_of:
                raise UsageError(
                    f"groups holds something that is no parameter of the optimizer: "
                    f"{type(param).__name__}"
                )
            index = index_of[param]
            if index in taken:
                raise UsageError(f"groups has parameter '{named[index][0]}' twice")
            taken.add(index)
            indices.append(index)
        result.append(indices)
    return result
