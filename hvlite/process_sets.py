"""Sets of ranks that communicate among themselves."""

from __future__ import annotations


class ProcessSet:
    """Ranks that take part in an operation together.

    Attributes:
        process_set_id: its number; None unless registered.
        ranks: world ranks, ascending; None while the runtime is not initialized.
    """

    def __init__(self, process_set_id: int | None = None) -> None:
        """Make a set whose ranks `init()` fills in."""
        self.process_set_id = process_set_id
        self.ranks: list[int] | None = None
        self._world_rank: int | None = None

    def attach(self, ranks: list[int] | None, world_rank: int | None) -> None:
        """Take the ranks from the runtime, None when it ends."""
        self.ranks = ranks
        self._world_rank = world_rank

    def size(self) -> int | None:
        """Return the number of ranks; None while not initialized."""
        return None if self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's number within the set; None while not initialized."""
        if self.ranks is None or self._world_rank is None:
            return None
        return self.ranks.index(self._world_rank)

    def included(self) -> bool | None:
        """Say whether this process is in the set; None while not initialized."""
        return None if self.ranks is None else self._world_rank in self.ranks

    def __str__(self) -> str:
        """Show the number and the ranks."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


# The default of every operation, compared by identity: so one object for the process.
global_process_set = ProcessSet(0)
