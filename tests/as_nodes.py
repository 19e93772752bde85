"""Plays several nodes on one machine: labels each rank with one, then runs a command.

hvrun -np 3 python tests/as_nodes.py 2,1 python train.py    # two ranks, and one
"""

import itertools
import os
import sys


def label(sizes: str, rank: int) -> str:
    """The node of `rank`, where the nodes have so many ranks each, in rank order."""
    ends = itertools.accumulate(int(size) for size in sizes.split(","))
    return next(str(node) for node, end in enumerate(ends) if rank < end)


if __name__ == "__main__":
    variables = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    rank = next(int(os.environ[name]) for name in variables if name in os.environ)
    os.environ["HVLITE_NODE"] = label(sys.argv[1], rank)
    os.execvp(sys.argv[2], sys.argv[2:])
