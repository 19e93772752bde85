from hypothesis import given
from hypothesis import strategies as st

from hvlite.torch.plan import FIRST_BUCKET_BYTES, Part, partition, split

MiB = 1 << 20
parts_of_two_kinds = st.lists(
    st.builds(Part, st.sampled_from("ab"), st.integers(0, 10 * MiB)), max_size=40
)


@given(parts_of_two_kinds, st.integers(1, 25 * MiB))
def test_every_part_is_in_one_bucket_of_its_kind(parts: list[Part], limit: int) -> None:
    buckets = partition(parts, [], limit)
    assert sorted(number for bucket in buckets for number in bucket) == list(
        range(len(parts))
    )
    for bucket in buckets:
        assert len({parts[number].kind for number in bucket}) == 1
        assert bucket == sorted(bucket, reverse=True)
        nbytes = sum(parts[number].nbytes for number in bucket)
        assert nbytes <= limit or len(bucket) == 1


def test_goes_backwards_and_starts_with_a_small_bucket() -> None:
    parts = [Part("f", 400_000)] * 10
    buckets = partition(parts, [], 4 * MiB)
    assert buckets == [[9, 8], [7, 6, 5, 4, 3, 2, 1, 0]]
    assert 2 * 400_000 <= FIRST_BUCKET_BYTES < 3 * 400_000


def test_kinds_fill_buckets_of_their_own() -> None:
    parts = [Part("f", 8), Part("d", 8), Part("f", 8), Part("d", 8)]
    assert sorted(partition(parts, [], MiB)) == [[2, 0], [3, 1]]


def test_groups_share_a_bucket_whatever_their_size() -> None:
    parts = [Part("f", 30 * MiB), Part("f", 30 * MiB), Part("d", 8), Part("f", 8)]
    assert partition(parts, [[0, 1, 2]], MiB) == [[2], [1, 0], [3]]


def test_split_into_runs_of_nearly_one_length() -> None:
    assert [list(run) for run in split(7, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [list(run) for run in split(2, 3)] == [[], [0], [1]]
