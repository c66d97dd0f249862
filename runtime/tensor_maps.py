"""Tensor maps: how the driver describes a tensor to bulk copies (CUDA driver API, "Tensor Map Object Management")."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from kerngen.errors import LaunchError
from kerngen.templates.kernel import TensorMap

_BYTES, _BOUNDARY = 128, 128
# Of CUtensorMap's enumerations: 16-bit elements, not interleaved, rows of 128 bytes swizzled or as they are, zeros for
# what lies outside; what L2 fetches at once, by bytes.
_UINT16, _NOT_INTERLEAVED, _NOT_SWIZZLED, _SWIZZLE_128B, _ZEROS = 1, 0, 0, 3, 0
_L2_PROMOTIONS = {128: 2, 256: 3}


class Encoded:
    """Memory of a CUtensorMap, zeros at first, on the boundary that the driver asks for: an argument of a launch."""

    def __init__(self) -> None:
        self._memory = (ctypes.c_byte * (_BYTES + _BOUNDARY))()
        self._address = -(-ctypes.addressof(self._memory) // _BOUNDARY) * _BOUNDARY

    def getPtr(self) -> int:  # what cuda.bindings asks of an argument
        return self._address


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise LaunchError(f"the GPU's driver cannot be loaded: {e}") from e


def encode(what: str, seen: TensorMap, address: int) -> Encoded:
    """The map of the tensor at `address`, in the current context. Raises LaunchError where the driver refuses it."""
    found, rank = Encoded(), len(seen.dims)
    code: int = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(found.getPtr()),
        ctypes.c_int(_UINT16),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*seen.dims),
        (ctypes.c_uint64 * (rank - 1))(*seen.strides),
        (ctypes.c_uint32 * rank)(*seen.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(_NOT_INTERLEAVED),
        ctypes.c_int(_SWIZZLE_128B if seen.swizzled else _NOT_SWIZZLED),
        ctypes.c_int(_L2_PROMOTIONS[seen.l2_bytes]),
        ctypes.c_int(_ZEROS),
    )
    if code:
        raise LaunchError(f"{what}: cuTensorMapEncodeTiled of {seen} gave CUresult {code}")
    return found
