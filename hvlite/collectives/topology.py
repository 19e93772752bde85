"""Which ranks share a node, and how ranks of different nodes pair up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """One rank's place among the nodes.

    Rank numbers are those of whatever `nodes` describes: the world, or the members of
    a process set numbered among themselves. Ranks of a node need not be consecutive,
    nor nodes equally large.

    Attributes:
        nodes: node number of each rank.
        rank: this rank.
    """

    nodes: tuple[int, ...]
    rank: int

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each node, ascending; nodes by ascending node number."""
        ranks: dict[int, list[int]] = {node: [] for node in sorted(set(self.nodes))}
        for rank, node in enumerate(self.nodes):
            ranks[node].append(rank)
        return tuple(map(tuple, ranks.values()))

    @cached_property
    def node_count(self) -> int:
        """Number of nodes."""
        return len(self.members)

    @cached_property
    def homogeneous(self) -> bool:
        """Whether all nodes have equally many ranks."""
        return len({len(ranks) for ranks in self.members}) == 1

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Ranks of this rank's node, ascending."""
        return next(ranks for ranks in self.members if self.rank in ranks)

    @cached_property
    def local_rank(self) -> int:
        """This rank's place in `local`."""
        return self.local.index(self.rank)

    @cached_property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return len(self.local)

    @cached_property
    def cross(self) -> tuple[int, ...]:
        """Ranks with this rank's local rank, in node order."""
        return self.across(self.local_rank)

    @cached_property
    def cross_rank(self) -> int:
        """This rank's place in `cross`."""
        return self.cross.index(self.rank)

    @cached_property
    def cross_size(self) -> int:
        """Number of nodes that have a rank with this local rank."""
        return len(self.cross)

    def across(self, local_rank: int) -> tuple[int, ...]:
        """Return the ranks with `local_rank`, at most one a node, in node order."""
        return tuple(
            ranks[local_rank] for ranks in self.members if local_rank < len(ranks)
        )
