"""Adding arrays up, and scaling them: a table (dtype, operation) -> function.

The entries made here use NumPy and ml_dtypes; a framework's shim puts its faster ones
in their place with `register`. The arithmetic, which users compare exactly:

- Sums and products are formed in the tensor's dtype and integers wrap around, except
  that float16 and bfloat16 are combined and scaled in float32 and rounded once.
- Inputs are combined in the order given: callers pass rank order.
- NaN propagates through Min and Max. bool: Min and Product are "and", Max is "or".
- Scaling integers multiplies by the float64 factor and truncates toward zero; float32
  (and complex64) use the factor rounded to float32; complex numbers a real factor.
- A factor that is 1/n for an integer n divides by n: 49 * (1/49) is less than 1.
- Overflow and NaN are results, not warnings.

Scratch memory is bounded whatever the size of the arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import UsageError
from ..messages import DTYPE_NAMES, HALF_FLOATS, SUPPORTED, Op, is_complex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..transport.base import Array

# Elements at a time where a temporary array is needed: 512 KB at most, so that it is
# still in the core's cache (1-2 MB) when it is read back.
_PART = 1 << 16
# Up to here every integer has a double of its own.
_MOST_EXACT = 1 << 53

_UFUNCS = {
    Op.SUM: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
}
_BOOL_UFUNCS = {
    Op.MIN: np.logical_and,
    Op.MAX: np.logical_or,
    Op.PRODUCT: np.logical_and,
}


class Kernel(Protocol):
    """Combines flat arrays of one dtype and size, scales, and writes `out`.

    `out` may be one of the inputs, but must not overlap one partly.
    """

    def __call__(self, inputs: Sequence[Array], out: Array, scale: float) -> None:
        """Write the combination of `inputs`, in their order, times `scale`."""


def kernel(dtype: np.dtype, op: Op) -> Kernel:
    """Return the function for `dtype` and `op`; an average is a sum with a scale.

    Raises:
        KeyError: the two do not go together (see `messages.SUPPORTED`).
    """
    return _KERNELS[dtype, op]


def register(dtype: np.dtype, op: Op, function: Kernel) -> None:
    """Let `function`, which must keep the rules above, do this from now on."""
    _KERNELS[dtype, op] = function


@np.errstate(all="ignore")
def scale_in_place(array: Array, factor: float) -> None:
    """Multiply a C-contiguous array by `factor`, by the rules above.

    Raises:
        UsageError: the array is boolean and the factor not 1.
    """
    if factor != 1.0:
        _scaler(array.dtype)(array.reshape(-1), factor)


def _scaler(dtype: np.dtype) -> Callable[[Array, float], None]:
    """Return what scales flat arrays of `dtype` in place."""
    if dtype.kind == "b":
        return _refuse_to_scale
    if is_complex(dtype):
        parts = np.zeros(0, dtype).real.dtype
        return lambda array, factor: _scale_float(array.view(parts), factor)
    if dtype in HALF_FLOATS:
        return lambda array, factor: _scale_widened(array, np.float32, factor)
    if dtype.kind == "f":
        return _scale_float
    return _scale_integers


def _refuse_to_scale(array: Array, factor: float) -> None:
    raise UsageError("a boolean tensor cannot be scaled")


def _scale_float(array: Array, factor: float) -> None:
    divisor = _divisor(factor)
    # A power of two divides exactly either way, and multiplying is faster.
    if divisor & (divisor - 1):
        np.divide(array, float(divisor), out=array)
    else:
        np.multiply(array, factor, out=array)


def _divisor(factor: float) -> int:
    """Return the n of which `factor` is the reciprocal, 0 if there is none."""
    if not 1 / _MOST_EXACT < factor < 1:
        return 0
    n = round(1 / factor)
    return n if 1 / n == factor else 0


def _scale_widened(array: Array, wide: type[np.floating], factor: float) -> None:
    """Scale in `wide` and convert back: halves round, integers truncate toward zero."""
    for part in _parts(array.size):
        values = array[part].astype(wide)
        _scale_float(values, factor)
        np.copyto(array[part], values, casting="unsafe")


def _scale_integers(array: Array, factor: float) -> None:
    divisor = _divisor(factor)
    if not divisor or array.itemsize < 8:
        _scale_widened(array, np.float64, factor)
        return
    # A double would lose digits. Adding n - 1 makes negative numbers truncate, too.
    for part in _parts(array.size):
        values = array[part]
        if array.dtype.kind == "i":
            np.add(values, divisor - 1, out=values, where=values < 0)
        np.floor_divide(values, divisor, out=values)


def _parts(size: int) -> Iterator[slice]:
    return (slice(start, start + _PART) for start in range(0, size, _PART))


def _plain(ufunc: np.ufunc, scale_by: Callable[[Array, float], None]) -> Kernel:
    """Make a kernel that computes in the dtype of its inputs."""

    @np.errstate(all="ignore")
    def combine(inputs: Sequence[Array], out: Array, scale: float) -> None:
        if len(inputs) == 1:
            np.copyto(out, inputs[0])
        elif len(inputs) == 2:
            ufunc(inputs[0], inputs[1], out=out)
        else:
            for part in _parts(out.size):
                total = ufunc(inputs[0][part], inputs[1][part])
                for array in inputs[2:-1]:
                    ufunc(total, array[part], out=total)
                ufunc(total, inputs[-1][part], out=out[part])
        if scale != 1.0:
            scale_by(out, scale)

    return combine


def _widening(ufunc: np.ufunc) -> Kernel:
    """Make a kernel that computes in float32 and rounds once."""

    @np.errstate(all="ignore")
    def combine(inputs: Sequence[Array], out: Array, scale: float) -> None:
        for part in _parts(out.size):
            total = inputs[0][part].astype(np.float32)
            for array in inputs[1:]:
                ufunc(total, array[part], out=total, dtype=np.float32)
            if scale != 1.0:
                _scale_float(total, scale)
            np.copyto(out[part], total, casting="unsafe")

    return combine


def _table() -> dict[tuple[np.dtype, Op], Kernel]:
    table: dict[tuple[np.dtype, Op], Kernel] = {}
    for dtype, name in DTYPE_NAMES.items():
        ufuncs = _BOOL_UFUNCS if dtype.kind == "b" else _UFUNCS
        for op in SUPPORTED[name] - {Op.AVERAGE}:
            if dtype in HALF_FLOATS:
                table[dtype, op] = _widening(ufuncs[op])
            else:
                table[dtype, op] = _plain(ufuncs[op], _scaler(dtype))
    return table


# Filled at import and by register(), on the main thread; read by the engine's.
_KERNELS = _table()
