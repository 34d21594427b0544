"""2:4 sparse linear weights: at most two of every four inputs of an output are not zero.

On a GPU torch's semi-structured path multiplies with half of the weight: by cuSPARSELt, or by CUTLASS, which has it for
compute capability 8.x alone. Where there are no such products, weights run dense, zeros included.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.linear import Linear
from ..proto.errors import ConfigError
from .params import Sparsity
from .quantized import Weight

_log = logging.getLogger(__name__)
_DTYPES = (torch.bfloat16, torch.float16)  # that both take, and models have


@dataclass(frozen=True, slots=True)
class Products:
    """How torch multiplies with a packed weight whose outputs and inputs are multiples of these."""

    name: str
    outputs: int
    inputs: int
    pack: Callable[[Tensor], Tensor]  # of a weight on the device; the result goes to F.linear

    def take(self, weight: Tensor) -> bool:
        """Whether they are there for this weight; its rows of activations are padded by torch as needed."""
        return weight.dtype in _DTYPES and weight.shape[0] % self.outputs == 0 and weight.shape[1] % self.inputs == 0


class SparseLinears:
    """Which weights of a model run sparse. `declared`: the checkpoint says that its weights are 2:4; `products`: how,
    or why not."""

    def __init__(self, setting: Sparsity, declared: bool, products: Products | str) -> None:
        self._setting = setting
        self._wanted = setting == "2:4" or (setting == "auto" and declared)
        self._products = products
        self._sparse = self._odd = self._dense = 0

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear | None:
        """A sparse layer for `weight` [outputs, inputs] on its device; None where it runs as any other."""
        if not self._wanted or not isinstance(weight, Tensor):
            return None
        if not is_sparse(weight):
            self._dense += 1
            return None
        self._sparse += 1
        if isinstance(self._products, str):
            return None
        if not self._products.take(weight):
            self._odd += 1
            return None
        packed = self._pack(self._products, weight.contiguous())
        return None if packed is None else lambda rows: F.linear(rows, packed, bias)

    def _pack(self, products: Products, weight: Tensor) -> Tensor | None:
        """None where the library does not know this GPU: only it can tell, and what follows runs dense."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor")
                return products.pack(weight)
        except RuntimeError as error:
            self._products = f"{products.name} refuses ({error})"
            _log.warning("2:4 sparse weights run dense: %s", self._products)
            return None

    def report(self) -> None:
        """After the last layer. Raises ConfigError when sparse weights were asked for and there are none."""
        if self._setting == "2:4" and not self._sparse:
            raise ConfigError(
                "model.sparsity: 2:4, but no linear layer of this model has two zeros in every four inputs; use none"
            )
        if not self._wanted:
            return
        if isinstance(self._products, str):
            where = f"dense, zeros included: {self._products}"
        else:
            where = f"sparse, by {self._products.name}"
        _log.info(
            "2:4 sparse weights in %d linear layers run %s; %d others", self._sparse - self._odd, where, self._dense
        )
        if self._odd:
            _log.info("2:4 sparse weights in %d linear layers run dense for their dtypes or shapes", self._odd)


def is_sparse(weight: Tensor) -> bool:
    """Whether at most two of every four inputs of each output [outputs, inputs] are not zero."""
    if weight.shape[1] % 4:
        return False
    return bool((weight.view(weight.shape[0], -1, 4).count_nonzero(dim=2) <= 2).all())


def sparse_products(device: torch.device) -> Products | str:
    """What torch has for this device, or why it has nothing."""
    if device.type != "cuda":
        return "a CPU has no sparse products"
    return choose(torch.cuda.get_device_capability(device), torch.backends.cusparselt.is_available())


def choose(capability: tuple[int, int], cusparselt: bool) -> Products | str:
    """By compute capability, and whether torch was built with cuSPARSELt."""
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

    if cusparselt:
        return Products("cuSPARSELt", 16, 16, SparseSemiStructuredTensorCUSPARSELT.from_dense)
    if capability[0] == 8:
        return Products("CUTLASS", 32, 64, SparseSemiStructuredTensorCUTLASS.from_dense)
    return f"compute capability {capability[0]}.{capability[1]} needs a torch with cuSPARSELt for sparse products"
