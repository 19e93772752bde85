"""What the user asked for, as one frozen value that every later step reads."""

from dataclasses import dataclass, field

from .hosts import Host


@dataclass(frozen=True)
class LaunchSpec:
    """One job.

    Attributes:
        size: number of ranks.
        command: the program and its arguments, run once in each rank.
        hosts: where to run; empty means this machine.
        verbose: also show mpirun's own output and the follow-up errors.
        dry_run: print what would be run, and run nothing.
    """

    size: int
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = field(default=())
    verbose: bool = False
    dry_run: bool = False
