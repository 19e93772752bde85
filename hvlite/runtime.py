"""init() and shutdown(): the only process-wide state, and who this process is."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from . import config as config_module
from . import exits
from .errors import HvliteError, LaunchError, NotInitializedError
from .process_sets import global_process_set

if TYPE_CHECKING:
    from .collectives.topology import Topology
    from .config import Config
    from .engine.coordinator import Engine
    from .transport.base import Transport

LOG = logging.getLogger("hvlite")
# What launchers tell their ranks: the number of ranks in the job.
SIZE_VARIABLES = ("HVLITE_LAUNCHED_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class _Runtime(NamedTuple):
    """Everything that lives between `init()` and `shutdown()`."""

    transport: Transport
    topology: Topology
    engine: Engine
    config: Config


# Written by init(), shutdown() and a forked child, on whatever thread calls them.
_runtime: _Runtime | None = None
_in_forked_child = False
# Held while the runtime is made, for threads that call init() at once.
_starting = threading.Lock()


def init(comm: Any = None) -> None:  # noqa: ANN401  # an mpi4py communicator, if any
    """Start hvlite in this process. Every rank of the job must call it.

    Without a launcher the process is the only worker, and needs no MPI library. A
    second call does nothing. After `shutdown()` it may be called again.

    Args:
        comm: None for all ranks; a list of world ranks, or an mpi4py communicator, for
            some. It is duplicated, never used itself.

    Raises:
        LaunchError: MPI, its launcher and the environment do not fit together.
        UsageError: a setting in the environment is not understood.
    """
    with _starting:
        if _runtime is None:
            _start(comm)


def _start(comm: Any) -> None:  # noqa: ANN401  # see init
    global _runtime  # the one process-wide state
    if _in_forked_child:
        raise NotInitializedError(_FORKED)
    config = config_module.read()
    _set_up_logging(config.log_level)
    from .collectives.topology import Topology
    from .engine.start import start_engine

    transport = _connect(comm, config)
    engine, config = start_engine(transport, config)
    topology = Topology(transport.nodes, transport.rank)
    _runtime = _Runtime(transport, topology, engine, config)
    global_process_set.attach(list(range(transport.size)), transport.rank)
    exits.watch(transport.size > 1)


def shutdown() -> None:
    """Leave: finish what is in flight where possible, and end the engine thread.

    Waits until all ranks have left, for at most HVLITE_LEAVE_TIMEOUT_SECONDS. MPI
    itself is not finalized. Does nothing when not initialized.
    """
    global _runtime  # the one process-wide state
    if _runtime is None:
        return
    runtime, _runtime = _runtime, None
    global_process_set.attach(None, None)
    together = runtime.engine.leave("")
    runtime.transport.close(together=together)


def is_initialized() -> bool:
    """Say whether `init()` was called, and `shutdown()` not since."""
    return _runtime is not None


def _current(what: str) -> _Runtime:
    if _runtime is None:
        raise NotInitializedError(_FORKED if _in_forked_child else what)
    return _runtime


def engine() -> Engine:
    """Return the running engine, for the operations."""
    return _current("an operation").engine


def config() -> Config:
    """Return the settings in force: those of rank 0."""
    return _current("config()").config


def rank() -> int:
    """Return this process's number among all ranks, from 0."""
    return _current("rank()").transport.rank


def size() -> int:
    """Return the number of ranks."""
    return _current("size()").transport.size


def local_rank() -> int:
    """Return this process's number among the ranks of its node, from 0."""
    return _current("local_rank()").topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return _current("local_size()").topology.local_size


def cross_rank() -> int:
    """Return this process's number among those with its local rank on other nodes."""
    return _current("cross_rank()").topology.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a rank with this one's local rank."""
    return _current("cross_size()").topology.cross_size


def is_homogeneous() -> bool:
    """Say whether every node has the same number of ranks."""
    return _current("is_homogeneous()").topology.homogeneous


def stats() -> dict[str, float]:
    """Return the engine's counters since `init()`, by name.

    `requests` and `<kind>_requests` submitted here, `cache_hits` among them, `bytes`
    of tensors executed, `batches` and `fused_requests` in batches of several, control
    messages (`reports` sent, `decisions` received), and the seconds that requests spent
    in negotiation (`negotiate_s`) and execution (`execute_s`), summed over requests.
    """
    return _current("stats()").engine.stats.snapshot()


def _connect(comm: Any, config: Config) -> Transport:  # noqa: ANN401  # see init
    """Choose the transport: MPI under a launcher or in an MPI program, else memory."""
    launched = next((os.environ[v] for v in SIZE_VARIABLES if v in os.environ), None)
    if comm is None and launched is None and "mpi4py.MPI" not in sys.modules:
        from .transport.memory import make_world

        return make_world(1)[0]
    from .transport.mpi import connect

    transport = connect(comm, config.node)
    if comm is None and launched is not None and int(launched) > transport.size == 1:
        raise LaunchError(
            f"the launcher started {launched} ranks, but MPI sees a world of 1: mpirun "
            f"and the MPI library ({transport.description}) do not belong together. "
            f"Start with hvrun, which picks the right one; hvrun --check shows both"
        )
    return transport


def _set_up_logging(level: str) -> None:
    """Give the logger `hvlite` a level, and an output if the program gave it none."""
    LOG.setLevel(level.upper())
    if not LOG.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hvlite %(levelname)s: %(message)s"))
        LOG.addHandler(handler)


_FORKED = (
    "this process was forked from a rank and has no part in the job, so an operation "
    "here (in a DataLoader worker, say) must move to the rank's own process; there it"
)


def _forget_in_child() -> None:
    """Disable the runtime in a forked child: the engine thread exists in the parent."""
    global _runtime, _in_forked_child  # the one process-wide state
    _in_forked_child = _in_forked_child or _runtime is not None
    _runtime = None
    global_process_set.attach(None, None)


def _leave_at_exit() -> None:
    """End with the process; a failing one does not wait for the others."""
    if _runtime is not None:
        exits.end_if_failed()
        try:
            shutdown()
        except HvliteError as error:
            LOG.error("shutdown at exit: %s", error)


atexit.register(_leave_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
