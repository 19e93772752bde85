"""The operations on NumPy arrays: values, dtypes, shapes and errors."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hvlite as hvd
from hvlite.messages import DTYPES, SUPPORTED, Op
from hvlite.process_sets import ProcessSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hvlite.transport.base import Array


HALF = ("float16", "bfloat16")


@pytest.fixture(autouse=True, scope="module")
def runtime() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def in_one_node() -> bool:
    """Whether all-reduces go through shared memory alone."""
    forced = os.environ.get("HVLITE_ALLREDUCE", "auto")
    return hvd.local_size() == hvd.size() and forced in ("auto", "shm")


def values(dtype: str, rank: int, count: int = 7) -> Array:
    """Small numbers, different on each rank, whose sums and products are exact."""
    numbers = (np.arange(count) + rank) % 4
    return numbers.astype(DTYPES[dtype])


def expected(dtype: str, op: Op, size: int, count: int = 7) -> Array:
    """What the ranks' `values` combine to, by plain Python numbers."""
    combine: dict[Op, Any] = {
        Op.SUM: sum,
        Op.AVERAGE: sum,
        Op.MIN: min,
        Op.MAX: max,
        Op.PRODUCT: math.prod,
    }
    columns = zip(
        *[values(dtype, rank, count).tolist() for rank in range(size)], strict=True
    )
    results = [combine[op](column) for column in columns]
    if op is Op.AVERAGE:
        integer = DTYPES[dtype].kind in "iu"
        results = [math.trunc(r / size) if integer else r / size for r in results]
    return np.array(results).astype(DTYPES[dtype])


CASES = [(dtype, op) for dtype in DTYPES for op in Op if op in SUPPORTED[dtype]]


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=lambda v: getattr(v, "name", v))
def test_allreduce_of_every_dtype_and_operation(
    rank: int, size: int, dtype: str, op: Op
) -> None:
    array = values(dtype, rank)
    before = array.copy()
    result = hvd.allreduce(array, op=op)
    assert result.dtype == array.dtype
    if op is Op.AVERAGE:  # by a factor: one rounding away from the division
        tolerance = {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-6}.get(
            dtype, 1e-12
        )
        np.testing.assert_allclose(
            result.astype(np.complex128),
            expected(dtype, op, size).astype(np.complex128),
            rtol=tolerance,
        )
    else:
        np.testing.assert_array_equal(result, expected(dtype, op, size))
    np.testing.assert_array_equal(array, before)


REFUSED = [(dtype, op) for dtype in DTYPES for op in Op if op not in SUPPORTED[dtype]]


@pytest.mark.parametrize(("dtype", "op"), REFUSED, ids=lambda v: getattr(v, "name", v))
def test_meaningless_operations_are_refused_with_the_remedy(dtype: str, op: Op) -> None:
    remedy = "use Max" if dtype == "bool" else "use Sum"
    with pytest.raises(
        hvd.UsageError, match=rf"^allreduce 'x': {op.name.title()}.*{remedy}"
    ):
        hvd.allreduce(np.ones(2, DTYPES[dtype]), name="x", op=op)


@pytest.mark.parametrize("dtype", ["S3", "U2", "O", "M8[s]", ">f8"])
def test_unknown_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(
        hvd.UsageError, match=r"is not supported; convert to one of bool"
    ):
        hvd.allreduce(np.zeros(2, dtype))


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (3, 0, 2), (5,), (2, 3, 4), (100_003,)], ids=str
)
def test_shapes(rank: int, size: int, shape: tuple[int, ...]) -> None:
    result = hvd.allreduce(np.full(shape, rank + 1.0), op=hvd.Sum)
    np.testing.assert_array_equal(result, np.full(shape, size * (size + 1) / 2))


def test_memory_order_does_not_matter(rank: int, size: int) -> None:
    logical = np.arange(24.0).reshape(2, 3, 4)
    # Each rank holds the same values in another order in memory.
    axes = [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)][rank % 4]
    array = logical.transpose(axes).copy().transpose(np.argsort(axes))
    np.testing.assert_array_equal(hvd.allreduce(array, op=hvd.Sum), logical * size)
    gaps = np.repeat(logical, 2, axis=2)[:, :, ::2]
    np.testing.assert_array_equal(hvd.allreduce(gaps), logical)
    np.testing.assert_array_equal(hvd.broadcast(array, 0), logical)
    every_other = np.arange(10.0)[::2]
    np.testing.assert_array_equal(hvd.broadcast(every_other, 0), every_other)
    np.testing.assert_array_equal(hvd.allreduce(every_other), every_other)


def test_scale_factors(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
        result = hvd.allreduce(
            np.full(3, rank + 1.0), op=op, prescale_factor=0.5, postscale_factor=3.0
        )
        np.testing.assert_allclose(result, np.full(3, total * 1.5 * factor), rtol=1e-15)
    # Integers: the float64 product truncates, before the sum and after it.
    result = hvd.allreduce(
        np.array([-5, 5, 3]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.0
    )
    np.testing.assert_array_equal(result, np.array([-2, 2, 1]) * size)


def test_integer_average_truncates_toward_zero(size: int) -> None:
    array = np.array([-5 if hvd.rank() == 0 else 0, 7 if hvd.rank() == 0 else 0])
    result = hvd.allreduce(array)
    np.testing.assert_array_equal(result, [-(5 // size), 7 // size])


def test_integers_wrap(size: int) -> None:
    result = hvd.allreduce(np.array([200], np.uint8), op=hvd.Sum)
    assert result[0] == 200 * size % 256


def test_half_floats_accumulate_in_float32(size: int) -> None:
    # Each addition of 1 to 2048 is lost in float16, and to 256 in bfloat16.
    for dtype, big in (("float16", 2048), ("bfloat16", 256)):
        array = np.array([big if hvd.rank() == 0 else 1], DTYPES[dtype])
        exact = np.array([big + size - 1], np.float32).astype(DTYPES[dtype])
        result = hvd.allreduce(array, op=hvd.Sum)
        if in_one_node():
            assert result[0] == exact[0]
        else:  # the ring rounds at each hop
            np.testing.assert_allclose(
                result.astype(np.float32), big + size - 1, rtol=size / big
            )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", [hvd.Min, hvd.Max])
def test_nan_propagates(dtype: str, op: Op, size: int) -> None:
    array = np.ones(3, DTYPES[dtype])
    if hvd.rank() == size - 1:
        array[1] = np.nan
    np.testing.assert_array_equal(
        np.isnan(hvd.allreduce(array, op=op)), [False, True, False]
    )


def test_results_are_bitwise_equal_on_all_ranks(size: int) -> None:
    random = np.random.default_rng(hvd.rank())
    result = hvd.allreduce(random.standard_normal(10_001).astype(np.float32))
    bits = result.view(np.uint32).astype(np.int64)
    np.testing.assert_array_equal(
        hvd.allreduce(bits, op=hvd.Max), hvd.allreduce(bits, op=hvd.Min)
    )


def test_a_group_keeps_order_shapes_and_dtypes(rank: int, size: int) -> None:
    group: list[Array] = [
        np.full((2, 3), rank, np.float32),
        np.arange(4, dtype=np.int64),
        np.zeros((0, 5), np.float32),
        np.array(rank, np.float32),
        np.full(5, rank, DTYPES["bfloat16"]),
        np.arange(6.0, dtype=np.float32)[::2],
    ]
    results = hvd.grouped_allreduce(group, op=hvd.Sum)
    ranks = size * (size - 1) // 2
    wanted: list[Any] = [
        np.full((2, 3), ranks), np.arange(4) * size, np.zeros((0, 5)), np.array(ranks),
        np.full(5, ranks), np.array([0, 2, 4]) * size,
    ]  # fmt: skip
    assert [(r.shape, r.dtype) for r in results] == [(a.shape, a.dtype) for a in group]
    for result, want in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(result, want)


def test_an_empty_group_is_an_empty_list() -> None:
    assert hvd.grouped_allreduce([]) == []


def test_opposite_orders_of_submission(rank: int, size: int) -> None:
    names = [f"t{index}" for index in range(50)]
    handles = {
        name: hvd.allreduce_async(np.full(3, float(index)), name=name, op=hvd.Sum)
        for index, name in list(enumerate(names))[:: -1 if rank % 2 else 1]
    }
    for index, name in enumerate(names):
        np.testing.assert_array_equal(
            hvd.synchronize(handles[name]), np.full(3, float(index * size))
        )
        assert hvd.poll(handles[name])


def test_different_kinds_may_share_a_name(rank: int, size: int) -> None:
    first = hvd.allreduce_async(np.ones(2), name="same", op=hvd.Sum)
    second = hvd.broadcast_async(np.full(2, rank), size - 1, name="same")
    np.testing.assert_array_equal(second.wait(), np.full(2, size - 1))
    np.testing.assert_array_equal(first.wait(), np.full(2, size))


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_of_every_dtype_from_every_root(
    rank: int, size: int, dtype: str
) -> None:
    for root in range(size):
        array = values(dtype, rank).reshape(7, 1)
        result = hvd.broadcast(array, root)
        np.testing.assert_array_equal(result, values(dtype, root).reshape(7, 1))
        assert result.dtype == DTYPES[dtype]
        np.testing.assert_array_equal(array, values(dtype, rank).reshape(7, 1))


def test_broadcast_root_must_exist(size: int) -> None:
    with pytest.raises(
        hvd.UsageError, match=f"root_rank={size} is not one of the ranks"
    ):
        hvd.broadcast(np.ones(1), size, name="x")


def test_broadcast_object(rank: int, size: int) -> None:
    for root in range(size):
        thing = {"rank": rank, "function": lambda x: x + rank}
        received = hvd.broadcast_object(thing, root)
        assert received["rank"] == root
        assert received["function"](1) == 1 + root
    assert hvd.broadcast_object(list(range(rank)), 0, name="list") == []


def test_more_than_one_piece_of_staging(size: int) -> None:
    count = 3_000_017  # 24 MB of float64: several pieces, the last one odd
    array = np.arange(count, dtype=np.float64)
    result = hvd.allreduce(array, op=hvd.Sum)
    np.testing.assert_array_equal(result, array * size)
    np.testing.assert_array_equal(hvd.broadcast(array + hvd.rank(), 0), array)
    many = [array[index::1000] for index in range(20)]
    for result, part in zip(hvd.grouped_allreduce(many), many, strict=True):
        np.testing.assert_array_equal(result, part)


def test_average_is_deprecated_but_works(size: int) -> None:
    with pytest.warns(DeprecationWarning, match="average= is deprecated"):
        assert hvd.allreduce(np.array([2.0]), average=False)[0] == 2.0 * size
    with pytest.raises(hvd.UsageError, match="not both"):
        hvd.allreduce(np.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(hvd.UsageError, match="is not known"):
        hvd.allreduce(np.ones(1), op=17)  # type: ignore[arg-type]


def odd_one_out(size: int) -> int:
    """The rank that disagrees; none where there is nobody to disagree with."""
    return size - 1 if size > 1 else -1


MISMATCHES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("dtype", {}, {"tensor": np.ones(2, np.float32)}, "dtype: float64"),
    ("shape", {}, {"tensor": np.ones(3)}, r"shape: \(2,\)"),
    ("op", {}, {"op": hvd.Max}, "the reduction: Sum"),
    ("prescale", {}, {"prescale_factor": 2.0}, "prescale_factor: 1.0"),
    ("postscale", {}, {"postscale_factor": 2.0}, "postscale_factor: 1.0"),
]


@pytest.mark.parametrize(
    ("common", "odd", "text"),
    [case[1:] for case in MISMATCHES],
    ids=[case[0] for case in MISMATCHES],
)
def test_mismatch_is_an_error_and_the_name_is_free_again(
    rank: int, size: int, common: dict[str, Any], odd: dict[str, Any], text: str
) -> None:
    arguments: dict[str, Any] = {
        "tensor": np.ones(2),
        "op": hvd.Sum,
        "name": "m",
    } | common
    changed = arguments | odd if rank == odd_one_out(size) else arguments
    if size > 1:
        others = (
            "rank 0" if size == 2 else f"ranks 0{', ' if size == 3 else '-'}{size - 2}"
        )
        pattern = rf"^allreduce 'm': ranks disagree on {text} on {others}; .* on rank "
        with pytest.raises(hvd.MismatchError, match=pattern):
            hvd.allreduce(**changed)
    np.testing.assert_array_equal(hvd.allreduce(**arguments), np.full(2, float(size)))


def test_mismatch_of_root(rank: int, size: int) -> None:
    if size > 1:
        with pytest.raises(
            hvd.MismatchError, match=r"^broadcast 'r': ranks disagree on root"
        ):
            hvd.broadcast(np.ones(2), min(rank, 1), name="r")


# The rank must have one thread only, so no timer thread of pytest-timeout either: any
# other thread might still submit what is waited for.
one_thread = pytest.mark.timeout(60, method="signal")


@one_thread
def test_mismatch_of_kind_is_found_while_all_wait(rank: int, size: int) -> None:
    if size == 1:
        return
    pattern = (
        r"^ranks wait for different operations: allreduce 'k' on .*; broadcast 'k' on"
    )
    if rank == size - 1:
        handle = hvd.broadcast_async(np.ones(2), 0, name="k")
    else:
        handle = hvd.allreduce_async(np.ones(2), name="k")
    with pytest.raises(hvd.MismatchError, match=pattern):
        handle.wait()


@one_thread
def test_mismatch_of_name_is_found_while_all_wait(rank: int, size: int) -> None:
    if size == 1:
        return
    pattern = r"^ranks wait for different operations: allreduce 'n0' on rank 0; "
    with pytest.raises(hvd.MismatchError, match=pattern):
        hvd.allreduce(np.ones(2), name=f"n{rank}")


def test_a_name_in_flight_is_refused_at_once(rank: int, size: int) -> None:
    first = None
    if rank == 0:
        first = hvd.allreduce_async(np.ones(2), name="twice")
        if size > 1:  # alone it might be done already
            with pytest.raises(
                hvd.DuplicateNameError, match="'twice' is already in fligh"
            ):
                hvd.allreduce_async(np.ones(2), name="twice")
            assert not hvd.poll(first)
    hvd.barrier()
    if rank != 0:
        first = hvd.allreduce_async(np.ones(2), name="twice")
    assert first is not None
    np.testing.assert_array_equal(hvd.synchronize(first), [1, 1])


def test_barrier_waits_for_all(rank: int, size: int) -> None:
    for root in range(size):
        done = hvd.allreduce_async(np.ones(1), name=f"before barrier {root}")
        hvd.barrier()
        done.wait()


def test_unregistered_process_set_is_refused() -> None:
    with pytest.raises(hvd.UsageError, match="is not registered"):
        hvd.allreduce(np.ones(1), process_set=ProcessSet())


def test_who_am_i(rank: int, size: int) -> None:
    assert (hvd.rank(), hvd.size()) == (rank, size)
    nodes = hvd.allreduce(np.array(1 if hvd.local_rank() == 0 else 0), op=hvd.Sum)
    largest = hvd.allreduce(np.array(hvd.local_size()), op=hvd.Max)
    assert hvd.cross_rank() < hvd.cross_size() <= nodes
    assert hvd.local_rank() < hvd.local_size() <= largest
    assert hvd.is_homogeneous() == (nodes * largest == size)
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.rank() == rank
    assert hvd.is_initialized()


def test_shutdown_and_init_again(rank: int, size: int) -> None:
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.stats, hvd.barrier):
        with pytest.raises(hvd.NotInitializedError, match=r"call init\(\) first"):
            call()
    with pytest.raises(hvd.NotInitializedError):
        hvd.allreduce(np.ones(1))
    hvd.init()
    hvd.init()
    assert hvd.stats()["requests"] == 0
    np.testing.assert_array_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), [size, size])
