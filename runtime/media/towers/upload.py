"""What items hold, on its way to a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Above this the GPU computes so long that waiting for a copy costs little, and torch keeps what it has page-locked.
MOST_PINNED_BYTES = 16 << 20


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    """The arrays one below another, of one dtype and row shape, as a tensor on `device`. They may be read-only.

    To a GPU through page-locked memory, without waiting. torch hands such memory out again once the copies that read it
    are done: it records an event behind each copy that does not block.
    """
    if device.type != "cuda" or sum(a.nbytes for a in arrays) > MOST_PINNED_BYTES:
        return torch.from_numpy(np.concatenate(arrays)).to(device)
    shape = sum(map(len, arrays)), *arrays[0].shape[1:]
    dtype = torch.from_numpy(np.empty(0, arrays[0].dtype)).dtype
    staged = torch.empty(shape, dtype=dtype, pin_memory=True)
    np.concatenate(arrays, out=staged.numpy())
    return staged.to(device, non_blocking=True)
