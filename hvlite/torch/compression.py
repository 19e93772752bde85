"""What travels in place of a tensor: itself, or a shorter float."""

from __future__ import annotations

import torch


class Compressor:
    """A pair of functions; subclass it to make one of your own.

    `compress` must give the same dtype for every tensor of one dtype, on every rank.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return what to send, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Turn what was received back into the dtype that was compressed."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends every tensor as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return `tensor` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return `tensor` itself."""
        return tensor


def _shorten(
    tensor: torch.Tensor, wire: torch.dtype
) -> tuple[torch.Tensor, torch.dtype | None]:
    if not tensor.is_floating_point() or tensor.element_size() <= wire.itemsize:
        return tensor, None
    return tensor.to(wire), tensor.dtype


def _restore(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
    return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(Compressor):
    """Sends floats of more than 16 bits as float16 (range 6e-5 to 65504)."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return a float16 copy; other dtypes, and shorter floats, as they are."""
        return _shorten(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return a copy in the dtype that was compressed."""
        return _restore(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends floats of more than 16 bits as bfloat16: range of float32, 3 digits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return a bfloat16 copy; other dtypes, and shorter floats, as they are."""
        return _shorten(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return a copy in the dtype that was compressed."""
        return _restore(tensor, ctx)


class Compression:
    """The compressors that come with hvlite; all-reduces sum them in float32."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
