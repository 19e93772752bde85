"""Many small arrays: 200 of 100 floats, one by one, as a group, and as one array.

    hvrun -np 2 python benchmarks/small.py

The sides, all through hvlite's public calls, with the same names in each round:
    one array   one `allreduce` of all 20,000 floats: the bytes, and one negotiation
    group       `grouped_allreduce` of the 200 arrays
    separate    200 times `allreduce_async`, then 200 times `synchronize`
"""

import numpy as np
from common import (
    Side,
    arguments,
    duration,
    measure,
    print_machine,
    print_table,
    say,
    write_json,
)

import hvlite

COUNT, LENGTH = 200, 100


def main() -> None:
    """Measure the three ways and print what each costs, and above the first."""
    args = arguments(__doc__, rounds=10)
    hvlite.init()
    print_machine(args)
    whole = np.zeros(COUNT * LENGTH, np.float32)
    arrays = [np.zeros(LENGTH, np.float32) for _ in range(COUNT)]

    def separate() -> None:
        handles = [
            hvlite.allreduce_async(array, name=f"separate.{number}", op=hvlite.Sum)
            for number, array in enumerate(arrays)
        ]
        for handle in handles:
            hvlite.synchronize(handle)

    sides = [
        Side("one array", lambda: hvlite.allreduce(whole, name="one", op=hvlite.Sum)),
        Side(
            "group",
            lambda: hvlite.grouped_allreduce(arrays, name="group", op=hvlite.Sum),
        ),
        Side("separate", separate),
    ]
    times = measure(sides, rounds=args.rounds, warmup=args.warmup, calls=10)
    base = times["one array"].median
    print_table(
        [
            {
                f"{COUNT} arrays of {LENGTH} floats": side,
                "median": duration(measured.median),
                "x one array": f"{measured.median / base:.2f}",
                "above it, per array": duration((measured.median - base) / COUNT),
            }
            for side, measured in times.items()
        ]
    )
    say()
    write_json(args, {"small": times})


if __name__ == "__main__":
    main()
