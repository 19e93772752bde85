"""The harness itself: these sessions really are the ranks of one MPI world."""

from mpi4py import MPI


def test_sessions_are_the_ranks_of_one_world(rank: int, size: int) -> None:
    assert MPI.COMM_WORLD.allgather(rank) == list(range(size))
