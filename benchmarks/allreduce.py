"""All-reduce of float32 arrays from 4 KB to 256 MB: hvlite against MPI, gloo, a memcpy.

    hvrun -np 2 python benchmarks/allreduce.py

The sides:
    shared memory   hvlite's algorithm alone, in place in memory that the ranks share
    resident        the same through the engine, as gradient buckets are reduced
    ring            hvlite's ring over MPI messages alone, in place
    public          `hvlite.allreduce`, which takes an array and returns a new one
    MPI             `Allreduce(MPI.IN_PLACE, ...)`
    gloo            `torch.distributed.all_reduce`, in place
    memcpy          one `np.copyto` of as many bytes, on every rank at once
All sum zeros (written zeros, so that pages exist): repeated sums then never overflow.
"""

from functools import partial

import numpy as np
from common import (
    WORLD,
    Row,
    Side,
    Times,
    arguments,
    duration,
    gloo_group,
    measure,
    print_machine,
    print_table,
    say,
    write_json,
)
from mpi4py import MPI

import hvlite
from hvlite import submission
from hvlite.collectives import ring, shared_memory
from hvlite.collectives.channel import Channel, drive
from hvlite.config import Config
from hvlite.messages import Op
from hvlite.transport import mpi
from hvlite.transport.base import Transport

# Size in bytes, and calls in a turn.
SIZES = {4 << 10: 40, 64 << 10: 20, 1 << 20: 10, 16 << 20: 4, 64 << 20: 2, 256 << 20: 1}


def size_name(nbytes: int) -> str:
    """'4 KB', '256 MB'."""
    return f"{nbytes >> 20} MB" if nbytes >> 20 else f"{nbytes >> 10} KB"


def sides_for(nbytes: int, transport: Transport, *, gloo: bool) -> list[Side]:
    """Everything that is compared at one size, on memory of its own."""
    count = nbytes // 4
    data, source = np.empty(count, np.float32), np.empty(count, np.float32)
    data.fill(0)
    source.fill(0)
    buffer = submission.allocate(f"buffer.{nbytes}", nbytes).wait()
    views = [region[:nbytes].view(np.float32) for region in buffer.segment.regions]
    views[transport.rank].fill(0)
    resident = partial(
        submission.start_shared_allreduce,
        *(buffer, 0, count, data.dtype),
        name=f"resident.{nbytes}",
        op=Op.SUM,
    )
    chunk = Config().chunk_bytes

    def channel() -> Channel:
        """One an operation, as in the engine: it keeps all that was started on it."""
        return Channel(transport, range(transport.size), tag=1)

    sides = [
        Side(
            "shared memory",
            lambda: drive(shared_memory.allreduce(channel(), views, Op.SUM, 1.0)),
        ),
        Side("resident", lambda: resident().wait()),
        Side(
            "ring", lambda: drive(ring.allreduce(channel(), data, Op.SUM, 1.0, chunk))
        ),
        Side(
            "public",
            lambda: hvlite.allreduce(source, name=f"public.{nbytes}", op=hvlite.Sum),
        ),
        Side("MPI", lambda: WORLD.Allreduce(MPI.IN_PLACE, data, MPI.SUM)),
        Side("memcpy", lambda: np.copyto(data, source)),
    ]
    if gloo:
        import torch

        tensor = torch.from_numpy(data)
        sides.append(Side("gloo", lambda: torch.distributed.all_reduce(tensor)))
    return sides


def ratios(nbytes: int, times: dict[str, Times]) -> Row:
    """How many times as fast as its peers hvlite is; for a memcpy, how much slower."""
    medians = {side: measured.median for side, measured in times.items()}
    row: Row = {"size": size_name(nbytes)}
    for peer in "MPI", "gloo":
        for ours in "shared memory", "resident", "ring", "public":
            ratio = medians[peer] / medians[ours] if peer in medians else float("nan")
            row[f"{peer}/{ours}"] = f"{ratio:.2f}"
    for ours in "shared memory", "resident":
        row[f"{ours}/memcpy"] = f"{medians[ours] / medians['memcpy']:.2f}"
    return row


def main() -> None:
    """Measure one size after the other and print the medians, then the ratios."""
    args = arguments(__doc__, rounds=7)
    hvlite.init()
    gloo = gloo_group()
    transport = mpi.connect()
    print_machine(args)
    cases: dict[int, dict[str, Times]] = {}
    for nbytes, calls in SIZES.items():
        sides = sides_for(nbytes, transport, gloo=gloo)
        cases[nbytes] = measure(
            sides, rounds=args.rounds, warmup=args.warmup, calls=calls
        )
    print_table(
        [
            {"size": size_name(nbytes)}
            | {side: duration(measured.median) for side, measured in times.items()}
            for nbytes, times in cases.items()
        ]
    )
    say("\nhow many times as long the peer takes")
    print_table([ratios(nbytes, times) for nbytes, times in cases.items()])
    write_json(args, {size_name(nbytes): times for nbytes, times in cases.items()})
    transport.close(together=True)


if __name__ == "__main__":
    main()
