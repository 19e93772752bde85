"""The arithmetic rules, one by one. Warnings are errors here, so none is emitted."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlite.collectives import kernels
from hvlite.errors import UsageError
from hvlite.messages import BFLOAT16, DTYPES, SUPPORTED, Op
from tests.contract.algorithms import expected, values

PAIRS = [(name, op) for name, ops in SUPPORTED.items() for op in ops - {Op.AVERAGE}]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind in "iu"]
NAN, INF = float("nan"), float("inf")


def combined(
    name: str, op: Op, rows: list[list[complex]], scale: float = 1.0
) -> list[complex]:
    """Combines short lists of numbers, into an array of its own."""
    inputs = [np.array(row).astype(DTYPES[name]) for row in rows]
    out = np.zeros_like(inputs[0])
    kernels.kernel(DTYPES[name], op)(inputs, out, scale)
    result: list[complex] = out.tolist()
    return result


def scaled(name: str, row: list[complex], factor: float) -> list[complex]:
    array = np.array(row).astype(DTYPES[name])
    kernels.scale_in_place(array, factor)
    result: list[complex] = array.tolist()
    return result


@pytest.mark.parametrize(("name", "op"), PAIRS)
@pytest.mark.parametrize("count", [0, 1, 33, (1 << 16) + 7])
def test_every_kernel_with_the_result_in_any_input(
    name: str, op: Op, count: int
) -> None:
    dtype = DTYPES[name]
    for size in range(1, 5):
        for target in range(-1, size):
            inputs = [values(rank, count, dtype) for rank in range(size)]
            out = np.zeros(count, dtype) if target < 0 else inputs[target]
            kernels.kernel(dtype, op)(inputs, out, 1.0)
            assert np.array_equal(out, expected(op, size, count, dtype))
            for rank in range(size):
                if rank != target:
                    assert np.array_equal(inputs[rank], values(rank, count, dtype))


def test_inputs_are_combined_in_the_order_given() -> None:
    assert combined("float64", Op.SUM, [[1e16], [-1e16], [1.0]]) == [1.0]
    assert combined("float64", Op.SUM, [[1.0], [1e16], [-1e16]]) == [0.0]


def test_integers_wrap_around() -> None:
    assert combined("int8", Op.SUM, [[127, -128], [1, -1]]) == [-128, 127]
    assert combined("uint8", Op.SUM, [[255], [2]]) == [1]
    assert combined("int64", Op.PRODUCT, [[2**62], [4]]) == [0]


@pytest.mark.parametrize(("name", "digits"), [("float16", 11), ("bfloat16", 8)])
def test_half_floats_add_in_float32_and_round_once(name: str, digits: int) -> None:
    # Each 1 alone is lost beside the big number; together they are not.
    big = float(2**digits)
    assert combined(name, Op.SUM, [[big], [1.0], [1.0]]) == [big + 2]
    assert combined(name, Op.SUM, [[big], [1.0], [1.0]], 0.5) == [big / 2 + 1]


def test_half_floats_do_not_overflow_on_the_way() -> None:
    assert combined("float16", Op.SUM, [[60000.0], [60000.0]], 0.5) == [60000.0]
    assert combined("float16", Op.SUM, [[60000.0], [60000.0]]) == [INF]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("op", [Op.MIN, Op.MAX])
def test_nan_propagates(name: str, op: Op) -> None:
    rows: list[list[complex]] = [
        [NAN, 1.0, 1.0, INF],
        [1.0, NAN, 1.0, NAN],
        [2.0, 2.0, NAN, 2.0],
    ]
    assert np.isnan(combined(name, op, rows)).all()


@pytest.mark.parametrize("name", FLOATS)
def test_overflow_and_nan_are_results_and_not_warnings(name: str) -> None:
    largest = float(
        np.finfo(DTYPES[name]).max
        if name != "bfloat16"
        else BFLOAT16.type(3.3895313892515355e38)
    )
    assert combined(name, Op.SUM, [[largest], [largest]]) == [INF]
    assert combined(name, Op.PRODUCT, [[largest], [largest]]) == [INF]
    assert np.isnan(combined(name, Op.SUM, [[INF], [-INF]])).all()
    assert scaled(name, [largest, NAN], 1e9)[0] == INF


def test_bool_kernels_are_and_and_or() -> None:
    rows: list[list[complex]] = [[False, False, True], [False, True, True]]
    assert combined("bool", Op.MIN, rows) == [False, False, True]
    assert combined("bool", Op.PRODUCT, rows) == [False, False, True]
    assert combined("bool", Op.MAX, rows) == [False, True, True]


def test_bool_cannot_be_scaled() -> None:
    assert scaled("bool", [True], 1.0) == [True]
    with pytest.raises(UsageError, match=r"^a boolean tensor cannot be scaled$"):
        scaled("bool", [True], 0.5)


def test_combinations_without_a_meaning_are_not_in_the_table() -> None:
    for name, dtype in DTYPES.items():
        for op in set(Op) - SUPPORTED[name] | {Op.AVERAGE}:
            with pytest.raises(KeyError):
                kernels.kernel(dtype, op)


@pytest.mark.parametrize("name", INTEGERS + FLOATS + COMPLEX)
def test_an_average_of_equal_values_is_that_value(name: str) -> None:
    for n in [2, 3, 7, 10, 49, 100]:
        assert scaled(name, [n, 0], 1 / n) == [1, 0]
        assert combined(name, Op.SUM, [[n - 1], [1]], 1 / n) == [1]


@pytest.mark.parametrize("name", [name for name in INTEGERS if name[0] == "i"])
def test_integers_truncate_toward_zero(name: str) -> None:
    assert scaled(name, [-5, -4, -1, 1, 5], 1 / 2) == [-2, -2, 0, 0, 2]
    assert scaled(name, [-5, -4, -1, 1, 5], 0.7) == [-3, -2, 0, 0, 3]
    assert scaled(name, [-5, 5], -1.5) == [7, -7]


def test_long_integers_keep_all_digits_in_an_average() -> None:
    big = 2**62 - 1
    assert scaled("int64", [big, -big], 1 / 2) == [(big - 1) // 2, -(big - 1) // 2]
    assert scaled("uint64", [2**64 - 1], 1 / 3) == [(2**64 - 1) // 3]


@given(
    value=st.integers(-(2**63), 2**63 - 1),
    n=st.integers(2, 10_000),
    name=st.sampled_from(INTEGERS),
)
def test_integer_averages_are_exact(value: int, n: int, name: str) -> None:
    number = np.array([value]).astype(DTYPES[name])
    exact = int(Fraction(int(number[0]), n))  # which truncates
    assert scaled(name, number.tolist(), 1 / n) == [exact]


def test_factors_are_rounded_to_the_dtype_that_scales() -> None:
    factor = 1 + 2**-30  # 1 in float32
    assert scaled("float32", [3.0], factor) == [3.0]
    assert scaled("complex64", [3.0 + 1j], factor) == [3.0 + 1j]
    assert scaled("float64", [3.0], factor) == [3.0 * factor]
    assert scaled("int64", [2**30], factor) == [2**30 + 1]


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_are_scaled_part_by_part(name: str) -> None:
    # As a product of complex numbers, infinity times 0j would be NaN.
    assert scaled(name, [complex(INF, 2)], 0.5) == [complex(INF, 1)]


def test_factors_that_are_nearly_reciprocals_multiply() -> None:
    factor = np.nextafter(1 / 3, 1)
    assert scaled("float64", [3.0], float(factor)) == [3.0 * factor]
    assert scaled("float64", [1.0], 5e-324) == [5e-324]
    assert scaled("float64", [1.0], 0.0) == [0.0]


@pytest.mark.parametrize("name", ["int64", "int32", "float16", "complex64"])
def test_whole_arrays_are_scaled_in_place(name: str) -> None:
    array = np.full((1 << 16) + 5, 6, DTYPES[name]).reshape(-1, 1)
    kernels.scale_in_place(array, 1 / 3)
    assert (array == 2).all()


def test_registered_kernels_take_over() -> None:
    dtype = np.dtype(np.float32)
    before = kernels.kernel(dtype, Op.SUM)

    def other(inputs: object, out: np.ndarray, scale: float) -> None:
        out[:] = scale

    try:
        kernels.register(dtype, Op.SUM, other)
        assert combined("float32", Op.SUM, [[1.0], [1.0]], 5.0) == [5.0]
    finally:
        kernels.register(dtype, Op.SUM, before)


@pytest.mark.parametrize(("name", "op"), PAIRS)
def test_scratch_memory_is_bounded(name: str, op: Op) -> None:
    arrays = [np.zeros(1 << 21, DTYPES[name]) for _ in range(3)]
    function = kernels.kernel(DTYPES[name], op)
    tracemalloc.start()
    function(arrays, arrays[2], 1.0)
    if name != "bool":
        kernels.scale_in_place(arrays[0], 1 / 3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
