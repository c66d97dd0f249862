"""Where a call runs: kerngen's kernels on CUDA, the folders' references on the CPU. One executor a device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

import torch

from kerngen.errors import DeviceError
from kerngen.runtime.executors.launch import Launch
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.launcher import Launcher

if TYPE_CHECKING:
    from kerngen.tuning_db import Source, Store
    from kerngen.tuning_db.read.boards import PerBoard

CPU = Reference()
_lock = Lock()
_sources: tuple[Source | PerBoard, ...] | None = (
    None  # None: the default ones, opened when the first kernel is asked for
)
_on_gpu: dict[int, Launch] = {}
_replaced: list[Launch] = []  # CUDA graphs may hold their kernels


def use_stores(stores: Sequence[Store | str | os.PathLike[str]] | None = None) -> None:
    """Look winners up in these tuning databases, in this order, from the next call on; None for the usual places.

    A store may be given open, or as a path or URL, which is opened read-only. With none in the list every kernel runs
    its default configuration. What is captured in CUDA graphs stays as it is. Raises DatabaseError.
    """
    global _sources
    chosen = None if stores is None else tuple(_opened(s) for s in stores)
    with _lock:
        _sources = chosen
        _replaced.extend(_on_gpu.values())
        _on_gpu.clear()


def _opened(store: Store | str | os.PathLike[str]) -> Source:
    from kerngen.tuning_db import open_source

    return open_source(store) if isinstance(store, str | os.PathLike) else store


def executor(device: torch.device) -> Launch | Reference:
    """What runs calls on tensors of `device`. Raises DeviceError for one that is neither CPU nor CUDA."""
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise DeviceError(f"kerngen's ops run on CUDA, and slowly on the CPU; not on {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    return _on_gpu.get(index) or _open(index)


def _open(index: int) -> Launch:
    global _sources
    with _lock:
        if (found := _on_gpu.get(index)) is None:
            if _sources is None:
                from kerngen.tuning_db import default_sources

                _sources = tuple(default_sources())
            found = _on_gpu[index] = Launch(Launcher(_sources, index=index))
    return found
