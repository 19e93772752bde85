"""What the ranks settle with each other in `init()`, before their engines run.

Collective, on the calling thread, over control messages and channel 0.
"""

from __future__ import annotations

import logging
import pickle
import time
from typing import TYPE_CHECKING, cast

import numpy as np

from ..collectives import ring
from ..collectives.channel import drive
from ..collectives.topology import Topology
from ..errors import LaunchError, SharedMemoryError
from ..messages import Algorithm, Op
from .coordinator import Engine
from .host_plane import HostPlane

if TYPE_CHECKING:
    from ..config import Config
    from ..transport.base import Transport

LOG = logging.getLogger("hvlite")
CONFIG_TIMEOUT_S = 60.0


def start_engine(transport: Transport, config: Config) -> tuple[Engine, Config]:
    """Start this rank's engine; every rank of the transport must call.

    Returns:
        The engine, and the settings in force: those of rank 0.

    Raises:
        LaunchError: the settings ask for what the machine does not have.
    """
    config = _share_config(transport, config)
    topology = Topology(transport.nodes, transport.rank)
    plane = HostPlane(transport, topology, config)
    shared = _probe_shared_memory(plane, topology)
    algorithm = _choose(config.allreduce, topology, shared=shared)
    if algorithm is Algorithm.RING:
        plane.isolate(Topology(tuple(range(transport.size)), transport.rank))
    engine = Engine(transport, plane, config, algorithm)
    engine.start()
    LOG.info(
        "rank %d of %d on node %d of %d, %s, all-reduce by %s",
        transport.rank,
        transport.size,
        topology.cross_rank,
        topology.node_count,
        transport.description,
        algorithm.value,
    )
    return engine, config


def _share_config(transport: Transport, config: Config) -> Config:
    """Return rank 0's settings: chunk sizes and the like must be equal everywhere."""
    if transport.rank == 0:
        for rank in range(1, transport.size):
            transport.send(rank, pickle.dumps(config))
        return config
    deadline = time.monotonic() + CONFIG_TIMEOUT_S
    while time.monotonic() < deadline:
        message = transport.receive()
        if message is not None:
            return cast("Config", pickle.loads(message[1]))
        time.sleep(0)
    raise LaunchError(
        f"rank {transport.rank} heard nothing from rank 0 for {CONFIG_TIMEOUT_S} s: "
        f"did every rank call init()?"
    )


def _probe_shared_memory(plane: HostPlane, topology: Topology) -> bool:
    """Say whether the ranks of every node can share memory; all get the same answer."""
    refusal = None
    try:
        drive(plane.probe())
    except SharedMemoryError as error:
        refusal = error
    able = np.array([refusal is None], dtype=np.bool_)
    drive(ring.allreduce(plane.channel(0), able, Op.MIN, 1.0, able.nbytes))
    if refusal is not None and topology.local_rank == 0:
        LOG.warning("%s; going on with the slower ring over messages", refusal)
    return bool(able[0])


def _choose(wanted: str, topology: Topology, *, shared: bool) -> Algorithm:
    """Choose how all-reduces travel; the same on every rank."""
    if wanted == "auto":
        if not shared or topology.node_count == len(topology.nodes) > 1:
            return Algorithm.RING
        return Algorithm.SHM if topology.node_count == 1 else Algorithm.HIERARCHICAL
    algorithm = Algorithm(wanted)
    if algorithm is not Algorithm.RING and not shared:
        raise LaunchError(
            f"HVLITE_ALLREDUCE={wanted} needs shared memory, which this node refuses "
            f"(see the warning above): unset it, or set it to ring"
        )
    if algorithm is Algorithm.SHM and topology.node_count > 1:
        raise LaunchError(
            f"HVLITE_ALLREDUCE=shm works inside one node, but the ranks are on "
            f"{topology.node_count}: unset it, or set it to hierarchical"
        )
    return algorithm
