"""hvlite: data-parallel training over MPI, with Horovod's API and nothing to compile.

This package works on NumPy arrays; `hvlite.torch` works on PyTorch tensors. Importing
it loads neither MPI nor a framework: `init()` starts MPI. What it offers is loaded when
it is first used, so that `hvrun`, which lives in this package, need not load NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        AbortedError,
        DuplicateNameError,
        EngineError,
        HorovodInternalError,
        HvliteError,
        LaunchError,
        MismatchError,
        NotInitializedError,
        RankLeftError,
        SharedMemoryError,
        StallError,
        UsageError,
    )
    from .ops import (
        Average,
        Max,
        Min,
        Product,
        Sum,
        allreduce,
        allreduce_async,
        barrier,
        broadcast,
        broadcast_async,
        broadcast_object,
        grouped_allreduce,
        grouped_allreduce_async,
        poll,
        synchronize,
    )
    from .process_sets import global_process_set
    from .runtime import (
        cross_rank,
        cross_size,
        init,
        is_homogeneous,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
        stats,
    )
    from .version import __version__

__all__ = [
    "AbortedError",
    "Average",
    "DuplicateNameError",
    "EngineError",
    "HorovodInternalError",
    "HvliteError",
    "LaunchError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "Product",
    "RankLeftError",
    "SharedMemoryError",
    "StallError",
    "Sum",
    "UsageError",
    "__version__",
    "allreduce",
    "allreduce_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "stats",
    "synchronize",
]

_MODULES = ("version", "errors", "process_sets", "runtime", "ops")  # light ones first


def __getattr__(name: str) -> Any:  # noqa: ANN401  # whatever is exported
    """Load what is named in `__all__` from the module that has it."""
    if name in __all__:
        for module in _MODULES:
            home = import_module(f".{module}", __name__)
            if hasattr(home, name):
                globals()[name] = getattr(home, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
