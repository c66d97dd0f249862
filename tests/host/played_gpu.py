"""The GPU's process, played: what does not depend on what it is asked for."""

from __future__ import annotations

from typing import Self

from kerngen.arch import Device, find_device
from kerngen.timing.measure import Ceilings


class PlayedWorker:
    """In place of GpuWorker: an H200."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def device(self) -> Device:
        return find_device("H200")

    def ceilings(self) -> Ceilings:
        return Ceilings(4580.0, 4100.0, 790.0, {})
