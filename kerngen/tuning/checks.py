"""Checks of a compiled kernel before it is judged or stored: each returns a reason to refuse it, or None."""

from __future__ import annotations

import struct
from math import prod
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.compiler.compile import Cubin
from kerngen.cost.predict import occupancy
from kerngen.templates.kernel import Kernel
from kerngen.tuning_db.read.values import Build

_EM_CUDA = 190


def why_unlaunchable(kernel: Kernel, problem: Any, config: Any, target: Target, build: Build | Cubin) -> str | None:
    """Why the compiled kernel cannot be launched although why_invalid allowed it, with the numbers, or None."""
    arch = target.arch
    for launch in kernel.launches(problem, config, target):
        r = build.entries.get(launch.entry)
        if r is None:
            return f"the compiled source has no entry {launch.entry}; it has: {', '.join(build.entries)}"
        smem, threads = launch.smem_bytes + r.static_smem_bytes, prod(launch.block)
        if smem > arch.max_smem_bytes:
            return f"{launch.entry} takes {smem:,} B of shared memory; {arch} allows {arch.max_smem_bytes:,} B a block"
        if occupancy(arch, threads, r.registers, smem).blocks_per_sm == 0:
            return (
                f"{launch.entry}: {threads} threads of {r.registers} registers each do not fit in the "
                f"{arch.regs_per_sm:,} of an SM"
            )
    return None


def why_not_cubin(image: bytes, arch: Arch) -> str | None:
    """Why `image` is not machine code for `arch`, or None if it is: its ELF header names the architecture."""
    if image[:4] != b"\x7fELF" or struct.unpack_from("<H", image, 18)[0] != _EM_CUDA:
        return "the compiled image is not a CUDA ELF"
    flags = struct.unpack_from("<I", image, 48)[0]
    number = flags >> 8 & 0xFF if image[8] >= 8 else flags & 0xFF  # ABI 8 moved it
    return None if number == arch.cubin_number else f"the compiled image is for sm_{number}, not {arch}"
