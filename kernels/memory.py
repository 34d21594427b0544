"""Hints to the operating system about large tensors in main memory."""

from __future__ import annotations

import ctypes

import torch

_HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14


def prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The same CPU tensor, its memory on pages of 2 MiB where the system has them; call it before the first write.

    Copies that jump from block to block spend a good part of their time on looking 4 KiB pages up. A hint: where it
    cannot be followed nothing changes. Other devices' tensors are left alone.
    """
    if tensor.device.type == "cpu":
        start = -(-tensor.data_ptr() // _HUGE_BYTES) * _HUGE_BYTES
        length = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _HUGE_BYTES * _HUGE_BYTES - start
        advise = getattr(ctypes.CDLL(None), "madvise", None)
        if length > 0 and advise is not None:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return tensor
