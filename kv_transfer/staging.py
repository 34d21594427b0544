"""Buffers that a link uses again and again, so that moving a payload allocates nothing."""

from __future__ import annotations

import torch

from ..kernels.memory import prefer_huge_pages

_STEP_BYTES = 1 << 16


class Staging:
    """Flat uint8 buffers on one device. Not thread-safe.

    As many exist as were ever lent at the same time; a link lends one for each payload that is on its way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}  # by address

    def lend(self, size: int) -> torch.Tensor:
        """A buffer of exactly `size` bytes with any content, until `give`."""
        at = next((at for at, buffer in enumerate(self._free) if buffer.numel() >= size), None)
        if at is None:
            if self._free:
                self._free.pop()  # too small: the new one takes its place
            rounded = -(-size // _STEP_BYTES) * _STEP_BYTES
            whole = prefer_huge_pages(torch.empty(rounded, dtype=torch.uint8, device=self._device))
        else:
            whole = self._free.pop(at)
        self._lent[whole.data_ptr()] = whole
        return whole[:size]

    def give(self, buffer: torch.Tensor) -> None:
        """Take a lent buffer back. One that is not ours (another carrier lent it) is left alone."""
        whole = self._lent.pop(buffer.data_ptr(), None)
        if whole is not None:
            self._free.append(whole)
            self._free.sort(key=torch.Tensor.numel)
