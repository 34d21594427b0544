"""2:4 sparse linear weights: at most two of every four inputs of an output are not zero.

On a GPU torch's semi-structured path multiplies with half of the weight; a CPU has no such products, so there they run
dense, zeros included.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.linear import Linear
from ..proto.errors import ConfigError
from .params import Sparsity
from .quantized import Weight

_log = logging.getLogger(__name__)


class SparseLinears:
    """Which weights of a model run sparse. `declared`: the checkpoint says that its weights are 2:4."""

    def __init__(self, setting: Sparsity, declared: bool, device: torch.device) -> None:
        self._setting = setting
        self._wanted = setting == "2:4" or (setting == "auto" and declared)
        self._device = device
        self._sparse = self._dense = 0

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear | None:
        """A sparse layer for `weight` [outputs, inputs] on its device; None where it runs as any other."""
        if not self._wanted or not isinstance(weight, Tensor):
            return None
        if not is_sparse(weight):
            self._dense += 1
            return None
        self._sparse += 1
        return semi_structured(weight, bias) if self._device.type == "cuda" else None

    def report(self) -> None:
        """After the last layer. Raises ConfigError when sparse weights were asked for and there are none."""
        if self._setting == "2:4" and not self._sparse:
            raise ConfigError(
                "model.sparsity: 2:4, but no linear layer of this model has two zeros in every four inputs; use none"
            )
        if self._wanted:
            where = "sparse" if self._device.type == "cuda" else "dense, zeros included: a CPU has no sparse products"
            _log.info("2:4 sparse weights in %d linear layers run %s; %d others", self._sparse, where, self._dense)


def is_sparse(weight: Tensor) -> bool:
    """Whether at most two of every four inputs of each output [outputs, inputs] are not zero."""
    if weight.shape[1] % 4:
        return False
    return bool((weight.view(weight.shape[0], -1, 4).count_nonzero(dim=2) <= 2).all())


def semi_structured(weight: Tensor, bias: Tensor | None) -> Linear:
    """The layer by torch's semi-structured products; `weight` is 2:4 sparse, on a GPU. Not run without one."""
    from torch.sparse import to_sparse_semi_structured  # its kernels need CUDA

    packed = to_sparse_semi_structured(weight)
    return lambda rows: F.linear(rows, packed, bias)
