"""A plugin of vLLM, 0.24 to 0.26, for `--load-format dummy`: weights that are spread as kerngen's generated ones are.

Of itself that format leaves int4 weights as the memory was, often zeros, which a GPU multiplies faster than others, and
norms near zero. Here int4 weights are random bits, their scales such that rows stay of one size, and norms are one. A
tensor's values follow from its name, so that they are the same whichever kernels serve it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

INT4_STD = sqrt((16**2 - 1) / 12)  # of 16 values that are equally likely
FAN_IN = 4096  # about what a product sums over
FLAT = 0.25  # of q's and k's norms: ones would have each token look at one other alone


class FlatConfig(PretrainedConfig):
    """A configuration's fields as they are written: transformers' own class has heads of two sizes in a form that vLLM
    does not read.
    """

    model_type = "gemma4_text"


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.transformers_utils import config

    def load_weights(self: Any, model: nn.Module, model_config: Any) -> None:
        fill(model)

    config._CONFIG_REGISTRY[FlatConfig.model_type] = FlatConfig
    dummy_loader.DummyModelLoader.load_weights = load_weights


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Every tensor that a checkpoint would give."""
    for name, tensor in _tensors(model):
        generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
        if tensor.dim() == 3 and tensor.shape[1] < tensor.shape[2]:
            tensor = tensor.mT  # experts, which a method of vLLM's holds with rows or with columns first
        if tensor.dtype == torch.int32 and tensor.dim() > 1:
            _random_bits(tensor, generator)
        elif not tensor.is_floating_point():
            continue  # shapes, permutations: what vLLM has made of them
        elif "scale" in name.rpartition(".")[2] and tensor.dim() > 1:
            typical = 1 / INT4_STD / sqrt(FAN_IN)
            drawn = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            tensor.copy_(drawn.uniform_(typical / 2, 3 * typical / 2, generator=generator))
        elif tensor.dim() < 2:
            tensor.fill_(FLAT if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)  # norms and factors
        else:
            tensor.normal_(0.0, 1 / sqrt(tensor.shape[-1]), generator=generator)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each once, though layers may share some."""
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.device.type != "meta" and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


def _random_bits(tensor: Tensor, generator: torch.Generator) -> None:
    """In place, in pieces: drawing takes eight bytes for each of their four."""
    for piece in tensor.split(max(2**24 // max(tensor[0].numel(), 1), 1)):
        piece.copy_(torch.randint(-(2**31), 2**31, piece.shape, generator=generator, device=piece.device))
