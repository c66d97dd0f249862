"""The sheets of what an H200 measured, as databases for tests: without what is carried, which is much."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from once import once

from kerngen.arch import Arch
from kerngen.compiler.compile import DEFAULT_OPTIONS, Cubin, Resources, cache_key
from kerngen.templates import find_kernel, kernel_names
from kerngen.tuning_db import Store
from kerngen.tuning_db.dist.results_folder import build, read
from kerngen.tuning_db.read.places import PREBUILT

H200 = PREBUILT / "H200"
MEASURED = sorted(p for p in H200.glob("*.txt") if not p.name.endswith((".carried.txt", ".predicted.txt")))
_NVRTC = (12, 9)
_BODIES = [body for name in kernel_names() for body in find_kernel(name).spec.BODIES]
_ENTRY = re.compile(rf"\b({'|'.join(entry for body in _BODIES for entry in body.args)})\(")


class PlayedCompiler:
    """In place of a CachedCompiler: bytes that are no machine code, of the size of some, at once."""

    def submit(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Future[Cubin]:
        key = cache_key(source, arch.nvrtc_target, options, _NVRTC)
        image = hashlib.shake_256(source.encode()).digest(8192)
        done: Future[Cubin] = Future()
        entries = dict.fromkeys(_ENTRY.findall(source), Resources(40, 0, 0, 0, 1024))
        done.set_result(Cubin(key, arch.name, _NVRTC, image, entries, ""))
        return done


def measured_store(path: Path, kernels: Collection[str] = ()) -> Path:
    """`path`, a database of what an H200 measured (of these kernels, or all), with images that are none."""
    compiler: Any = PlayedCompiler()

    def make(part: Path) -> None:
        with Store.open(part) as store:
            done = build(read([p for p in MEASURED if not kernels or p.stem in kernels]), store, compiler)
        assert done.faults == []

    shutil.copyfile(once(f"{'+'.join(sorted(kernels)) or 'H200'}.sqlite", make), path)
    return path


def measured_sheets(folder: Path, kernels: Collection[str] = ()) -> Path:
    """`folder`, as an installation's prebuilt folder that has what an H200 measured (of these kernels, or all)."""
    board = folder / "H200"
    board.mkdir(parents=True)
    for sheet in MEASURED:
        if not kernels or sheet.stem in kernels:
            (board / sheet.name).symlink_to(sheet)
    return folder
