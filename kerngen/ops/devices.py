"""Where a call runs: kerngen's kernels on CUDA, the folders' references on the CPU. One executor a device."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from kerngen.errors import DeviceError
from kerngen.runtime.executors.launch import Launch
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.launcher import Launcher
from kerngen.system.cores import usable_cores
from kerngen.templates import find_kernel

if TYPE_CHECKING:
    from kerngen.bundles.bundle import Bundle
    from kerngen.compiler.cache import CompileCache
    from kerngen.tuning_db import Source, Store
    from kerngen.tuning_db.read.boards import PerBoard

CPU = Reference()
_lock = Lock()
# Databases, the cache behind them, the bundle if it is one. None: $KERNGEN_BUNDLE, or the usual places, opened when the
# first kernel is asked for.
_looked_in: tuple[Sequence[Source | PerBoard], CompileCache | None, Bundle | None] | None = None
_on_gpu: dict[int, Launch] = {}
_replaced: list[Launch] = []  # CUDA graphs may hold their kernels


def use_stores(stores: Sequence[Store | str | os.PathLike[str]] | None = None) -> None:
    """Look winners up in these tuning databases, in this order, from the next call on; None for the bundle that
    $KERNGEN_BUNDLE names, or else the usual places.

    A store may be given open, or as a path or URL, which is opened read-only. With none in the list every kernel runs
    its default configuration. What is captured in CUDA graphs stays as it is. Raises DatabaseError.
    """
    global _looked_in
    chosen = None if stores is None else (tuple(_opened(s) for s in stores), None, None)
    with _lock:
        _looked_in = chosen
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


def load_ahead(
    asked: Iterable[tuple[str, Any]], most: int, device: torch.device, exactly: Iterable[tuple[str, Any]] = ()
) -> Counter[str]:
    """Have everything on a CUDA `device` that serves these (kernel, problem) at 1 to `most` of their dynamic field, and
    what serves each of `exactly` as it is: no such call of an op compiles, loads or allocates scratch memory then, so
    that it may be captured in a CUDA graph.

    Returns how many configurations each source gave, as `Launcher.load_ahead` raises. Raises DeviceError for a CPU.
    """
    if not isinstance(on := executor(device), Launch):
        raise DeviceError(f"nothing is loaded ahead on {device}: kernels run on CUDA")
    with torch.cuda.device(device):
        each, single = ([(find_kernel(n), p) for n, p in given] for given in (asked, exactly))
        loaded = on.launcher.load_ahead(each, most, usable_cores(), single)
    return Counter(function.source for function in loaded)


def _open(index: int) -> Launch:
    global _looked_in
    with _lock:
        if (found := _on_gpu.get(index)) is None:
            if _looked_in is None:
                from kerngen.bundles.bundle import sources_for

                _looked_in = sources_for(None, None)
            sources, cache, bundle = _looked_in
            launcher = Launcher(sources, cache, index=index)
            if bundle is not None:
                bundle.require(launcher.target.arch)
            found = _on_gpu[index] = Launch(launcher)
    return found
