"""Gradients made smaller while they travel."""

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """What travels in place of a tensor, and back; subclass it for one of your own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor as it was, but for what was lost."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """As it is."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating point as 16 bit."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Half precision, of whatever is floating point."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Back to the dtype it had."""
        return tensor.to(ctx)


class Compression:
    """The ways to compress: `Compression.none`, `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
