"""Who shares a node with whom."""

from hvlite.collectives.cuts import part
from hvlite.collectives.topology import Topology


def test_ranks_of_a_node_need_not_be_consecutive() -> None:
    topology = Topology((0, 1, 0, 1), rank=3)
    assert topology.members == ((0, 2), (1, 3))
    assert topology.local == (1, 3)
    assert (topology.local_rank, topology.local_size) == (1, 2)
    assert topology.cross == (2, 3)
    assert (topology.cross_rank, topology.cross_size) == (1, 2)
    assert topology.node_count == 2
    assert topology.homogeneous


def test_nodes_come_in_ascending_number() -> None:
    topology = Topology((5, 2, 5), rank=0)
    assert topology.members == ((1,), (0, 2))
    assert topology.cross == (1, 0)
    assert topology.cross_rank == 1


def test_uneven_nodes_pair_up_as_far_as_they_go() -> None:
    topology = Topology((0, 0, 0, 1), rank=2)
    assert not topology.homogeneous
    assert topology.cross == (2,)
    assert topology.across(0) == (0, 3)
    assert topology.across(1) == (1,)


def test_one_rank_is_a_world() -> None:
    topology = Topology((0,), rank=0)
    assert topology.local == topology.cross == (0,)
    assert topology.homogeneous


def test_parts_cover_everything_once_and_begin_at_cache_lines() -> None:
    for count in [0, 1, 15, 16, 17, 100, 1024, 1031]:
        for parts in range(1, 9):
            cuts = [part(count, parts, index, 4) for index in range(parts)]
            covered = [i for cut in cuts for i in range(count)[cut]]
            assert covered == list(range(count))
            assert all(cut.start % 16 == 0 or cut.start == count for cut in cuts)
            sizes = [len(range(count)[cut]) for cut in cuts]
            assert max(sizes) - min(sizes) <= 16 + 15
