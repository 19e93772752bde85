"""What `hvlite.init()` costs a process that does not communicate.

    hvrun -np 2 python benchmarks/idle.py
    hvrun -np 1 python benchmarks/idle.py

Idle: the main thread sleeps; counted is the CPU time of the whole process, before
`init()` and after it. Training: every rank trains a small convolutional network by
itself, reducing nothing, before `init()` and after it. The two states take turns, since
`shutdown()` allows another `init()`; the slowest rank counts.
"""

import resource
import statistics
import time

import numpy as np
from common import WORLD, Times, arguments, print_machine, print_table, say, write_json
from mpi4py import MPI

import hvlite

SLEEP_S = 3.0
STEPS = 40


def idle_share() -> float:
    """The share of a core that this process uses while its main thread sleeps."""
    begin, used = time.perf_counter(), cpu_seconds()
    time.sleep(SLEEP_S)
    return (cpu_seconds() - used) / (time.perf_counter() - begin)


def cpu_seconds() -> float:
    """CPU time of all threads of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Training:
    """A small convolutional network that learns noise, on this process alone."""

    def __init__(self) -> None:
        """Make the network and its data."""
        import torch
        from torch import nn

        self._images = torch.rand(64, 1, 28, 28)
        self._labels = torch.arange(64) % 10
        self._model = nn.Sequential(
            *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 49, 10)),
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._loss = nn.CrossEntropyLoss()

    def seconds_per_step(self) -> float:
        """The median of some steps: forward, backward, update."""
        seconds = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            self._optimizer.zero_grad()
            self._loss(self._model(self._images), self._labels).backward()
            self._optimizer.step()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)


def main() -> None:
    """Let the two states take turns and print how they compare."""
    args = arguments(__doc__, rounds=6)
    print_machine(args)
    training = Training()
    # [idle share, seconds a step] without and with hvlite, round by round.
    mine = np.zeros((args.warmup + args.rounds, 2, 2))
    for turn in range(args.warmup + args.rounds):
        for initialised in (0, 1) if turn % 2 else (1, 0):
            if initialised:
                hvlite.init()
            WORLD.Barrier()
            mine[turn, initialised] = idle_share(), training.seconds_per_step()
            WORLD.Barrier()
            hvlite.shutdown()
    worst = np.empty_like(mine)
    WORLD.Allreduce(mine, worst, MPI.MAX)
    counted = worst[args.warmup :]
    idle, step = np.median(counted, axis=0).T
    slowdown = np.median(counted[:, 1, 1] / counted[:, 0, 1])
    print_table(
        [
            {
                "hvlite": name,
                "share of a core when idle": f"{idle[state]:.2%}",
                "training step": f"{step[state] * 1e3:.1f} ms",
            }
            for state, name in enumerate(["not initialised", "initialised"])
        ]
    )
    say(f"\ntraining step, initialised / not, median of pairs: {slowdown:.3f}")
    write_json(
        args,
        {
            case: {
                side: Times(counted[:, state, column].tolist())
                for state, side in enumerate(["not initialised", "initialised"])
            }
            for column, case in enumerate(["idle share of a core", "training step"])
        },
    )


if __name__ == "__main__":
    main()
