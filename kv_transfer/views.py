"""What is needed of a frame besides its tensor; kept, because carriers lend the same few again and again."""

from __future__ import annotations

import torch

from .carriers import bytes_of
from .frames import TRAILER_BYTES

_MOST = 16  # several times a carrier's buffers


class Views:
    """Views of frames (flat uint8, each with its trailer). One thread uses it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, memoryview]] = {}

    def payload(self, whole: torch.Tensor) -> torch.Tensor:
        """The frame without its trailer."""
        return self._of(whole)[1] if whole.device.type == "cpu" else whole[:-TRAILER_BYTES]

    def bytes(self, whole: torch.Tensor) -> memoryview:
        """All bytes; of a frame on another device a copy as it is now."""
        return self._of(whole)[2] if whole.device.type == "cpu" else bytes_of(whole.cpu())

    def _of(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, memoryview]:
        kept = self._kept.get(id(whole))
        if kept is None or kept[0] is not whole:
            if len(self._kept) == _MOST:
                self._kept.clear()
            kept = self._kept[id(whole)] = (whole, whole[:-TRAILER_BYTES], bytes_of(whole))
        return kept
