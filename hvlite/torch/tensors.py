"""Torch tensors as NumPy arrays over the same memory, and back.

The engine knows NumPy only. A dense CPU tensor becomes an array that shares its
memory and keeps its strides; anything else (another device, a lazily conjugated
view) is staged through a copy in host memory, which is written back when the
operation is synchronised.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from ..errors import UsageError

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# torch dtype -> NumPy dtype: every one that hvlite moves.
DTYPES: dict[torch.dtype, np.dtype[np.generic]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: _BFLOAT16,
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}


def require_tensor(value: object) -> None:
    """Refuse what is no tensor.

    Raises:
        UsageError: saying what to pass.
    """
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"a torch.Tensor is needed, not {type(value).__name__}: pass "
            "torch.tensor(value)"
        )


def numpy_dtype(tensor: torch.Tensor) -> np.dtype[np.generic]:
    """Return the NumPy dtype for the elements of `tensor`.

    Raises:
        UsageError: the tensor is not something hvlite can move; the text says what
            to convert it to.
    """
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"a tensor of layout {tensor.layout} cannot be sent: use .to_dense()"
        )
    if tensor.is_quantized:
        raise UsageError("a quantized tensor cannot be sent: use .dequantize()")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise UsageError(
            f"dtype {tensor.dtype} is not supported; convert to one of {known}"
        )
    return dtype


def view_as_array(tensor: torch.Tensor) -> Array:
    """Return an array of the same memory, shape and strides; CPU tensors only."""
    dtype = numpy_dtype(tensor)
    tensor = tensor.detach()
    if dtype == _BFLOAT16:  # NumPy has no such dtype of its own: pass the bits
        return tensor.view(torch.uint16).numpy().view(dtype)
    return tensor.numpy()


def view_as_tensor(array: Array) -> torch.Tensor:
    """Return a tensor of the same memory as `array`, which must be writable."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@dataclass(frozen=True)
class Staged:
    """What an operation works on in place of `tensor`, and the way back.

    `array` shares the memory of `tensor` where that is possible, and otherwise
    holds a copy of its values.
    """

    tensor: torch.Tensor
    array: Array
    shared: bool

    def write_back(self) -> torch.Tensor:
        """Bring the array's values into `tensor` and return that."""
        with torch.no_grad():
            if not self.shared:
                self.tensor.detach().copy_(view_as_tensor(self.array))
            elif not torch.is_inference(self.tensor):
                # Autograd must learn of a write that it did not see.
                torch.autograd.graph.increment_version(self.tensor)
        return self.tensor


def stage(tensor: torch.Tensor) -> Staged:
    """Make the values of `tensor` available to the engine.

    Raises:
        UsageError: hvlite cannot move such a tensor.
    """
    require_tensor(tensor)
    numpy_dtype(tensor)
    if tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg()):
        return Staged(tensor, view_as_array(tensor), shared=True)
    with torch.no_grad():
        host = torch.empty(
            tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
        ).copy_(tensor)
    return Staged(tensor, view_as_array(host), shared=False)


def stage_in_place(tensor: torch.Tensor) -> Staged:
    """As `stage`, for an operation that will write to `tensor`.

    Raises:
        UsageError: also where several elements of `tensor` share one memory place.
    """
    overlaps = (
        any(
            stride == 0 and extent > 1
            for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)
        )
        if tensor.layout is torch.strided
        else False
    )
    if overlaps:
        raise UsageError(
            "an expanded tensor cannot be written in place: use .contiguous()"
        )
    return stage(tensor)


def like(array: Array, tensor: torch.Tensor) -> torch.Tensor:
    """Return a new result as a tensor on the device and in the strides of `tensor`.

    Copies only where `array`, in C order and on the host, is not that already.
    """
    result = view_as_tensor(array)
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return result
    with torch.no_grad():
        return torch.empty_like(tensor, requires_grad=False).copy_(result)
