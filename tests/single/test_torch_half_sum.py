import os
import threading

import numpy as np
import pytest
import torch

from hvlite.collectives import kernels
from hvlite.messages import Op
from hvlite.torch import half_sum

SIZES = [1, half_sum.SMALLEST - 1, half_sum.SMALLEST, (1 << 15) + 1, 100_000]


def arrays(count: int, size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(size)
    return [generator.normal(size=size).astype(np.float16) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3, 0.7])
def test_same_bits_as_numpy(size: int, scale: float) -> None:
    inputs = arrays(3, size)
    expected, result = np.empty_like(inputs[0]), np.empty_like(inputs[0])
    half_sum._with_numpy(inputs, expected, scale)
    half_sum.sum_float16(inputs, result, scale)
    np.testing.assert_array_equal(result.view(np.uint16), expected.view(np.uint16))


def test_output_may_be_an_input() -> None:
    inputs = arrays(2, 50_000)
    expected = inputs[0].astype(np.float32) + inputs[1].astype(np.float32)
    half_sum.sum_float16(inputs, inputs[1], 1.0)
    np.testing.assert_array_equal(inputs[1], expected.astype(np.float16))


def test_overflow_is_a_result() -> None:
    inputs = [np.full(5000, 60000, np.float16)] * 2
    out = np.empty_like(inputs[0])
    half_sum.sum_float16(inputs, out, 1.0)
    assert np.isinf(out).all()
    half_sum.sum_float16(inputs, out, 0.5)
    assert (out == 60000).all()


def test_it_is_in_the_table() -> None:
    assert kernels.kernel(np.dtype(np.float16), Op.SUM) is half_sum.sum_float16


def test_starts_no_thread_however_many_torch_may_use() -> None:
    inputs = arrays(2, 300_000)
    out = np.empty_like(inputs[0])
    counts = []

    def work() -> None:
        before = len(os.listdir("/proc/self/task"))
        half_sum.sum_float16(inputs, out, 0.5)
        counts.append(len(os.listdir("/proc/self/task")) - before)

    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert counts == [0]
