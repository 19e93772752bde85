"""A faster sum of float16 than NumPy's, put into hvlite's table of kernels.

Same arithmetic and the same bits: added and scaled in float32, rounded once. On one
core of an x86-64 machine, two inputs of 16,384 elements take 30 us in place of 107,
and 65,536 take 75 in place of 598, since NumPy converts float16 one by one. Below
some 4,000 elements NumPy wins, as making tensors of the arrays costs 20 us. For
bfloat16, where ml_dtypes converts whole vectors, torch gained nothing (34 us against
23, 93 against 86), so hvlite keeps its own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..collectives import kernels
from ..messages import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .tensors import Array

FLOAT16 = np.dtype(np.float16)
SMALLEST = 4096
# Elements at a time: up to here torch adds on the calling thread alone, whatever its
# number of threads (its grain size), and the float32 scratch stays in the cache.
_PART = 1 << 15

_with_numpy = kernels.kernel(FLOAT16, Op.SUM)


class _Scratch(threading.local):
    """A float32 total for each thread that sums."""

    def __init__(self) -> None:
        self.tensor = torch.empty(_PART)
        self.array = self.tensor.numpy()


_scratch = _Scratch()


def sum_float16(inputs: Sequence[Array], out: Array, scale: float) -> None:
    """Write the sum of flat float16 arrays, times `scale`, to `out`."""
    if out.size < SMALLEST:
        _with_numpy(inputs, out, scale)
        return
    tensors = [torch.from_numpy(array) for array in inputs]
    result = torch.from_numpy(out)
    for start in range(0, out.size, _PART):
        end = min(start + _PART, out.size)
        total = _scratch.tensor[: end - start]
        total.copy_(tensors[0][start:end])
        for tensor in tensors[1:]:
            total.add_(tensor[start:end])
        if scale != 1.0:
            kernels.scale_in_place(_scratch.array[: end - start], scale)
        result[start:end].copy_(total)


kernels.register(FLOAT16, Op.SUM, sum_float16)
