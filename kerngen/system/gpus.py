"""This machine's GPUs as their driver names them, without torch, whose import takes a second, and without a context."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

_NUM_SMS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute: MULTIPROCESSOR_COUNT, COMPUTE_CAPABILITY_MAJOR, _MINOR


class Gpu(NamedTuple):
    name: str
    num_sms: int
    mem_gib: float
    capability: tuple[int, int]


def has_driver() -> bool:
    return _driver() is not None


def gpus_here() -> list[Gpu]:
    """All, in the driver's order; none where there is no driver, or one of them does not answer."""
    driver = _driver()
    try:
        if driver is None or driver.cuInit(0):
            return []
        count = ctypes.c_int()
        _check(driver.cuDeviceGetCount(ctypes.byref(count)))
        return [_gpu(driver, index) for index in range(count.value)]
    except OSError:
        return []


def _gpu(driver: Any, index: int) -> Gpu:
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _check(driver.cuDeviceGet(ctypes.byref(device), index))
    _check(driver.cuDeviceGetName(name, len(name), device))
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(size), device))
    found = []
    for attribute in (_NUM_SMS, _MAJOR, _MINOR):
        value = ctypes.c_int()
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        found.append(value.value)
    num_sms, major, minor = found
    return Gpu(name.value.decode(errors="replace"), num_sms, round(size.value / 2**30, 1), (major, minor))


def _check(result: int) -> None:
    if result:
        raise OSError(result, "of the CUDA driver")


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
