"""A warp that reads a stage and copies the next bytes into it itself: no read may still be on its way.

A load of shared memory waits in a queue behind other warps' loads, bulk copies do not. So machine code is looked at: at
each bulk copy that can meet a stage in use (UBLKCP), each load of shared memory (LDS) before it has been waited for by
its scoreboard, or a proxy fence came between.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from machine_code import instructions_of

from kerngen.arch import ARCHES, Target
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.compiler.compile import Cubin
from kerngen.compiler.render import source_of
from kerngen.templates import find_kernel
from kerngen.templates.common.w4.tiling import Tiling
from kerngen.templates.w4a16_gemm.spec import Problem

LDS, UBLKCP, FENCE_VIEW = 0x984, 0x3BA, 0x3C6  # opcodes of sm90
SM90 = Target.of(ARCHES["sm90"])
SHAPE = {"n": 43008, "k": 5376, "group_size": 32, "dtype": "bf16", "num_tokens": 1}
# What gave wrong sums on an H200, and int4 where a load was pending at a copy, too.
CONFIGS = {
    "int8": Tiling(8, 32, 448, 32, 1, 14, 12, 1, "tma_mma"),
    "int4": Tiling(1, 32, 1024, 32, 1, 8, 5, 1, "tma_warp"),
}


def instructions(cubin: Cubin) -> Iterator[tuple[int, int, int]]:
    """(opcode, scoreboards waited for, scoreboard that its result sets or 7), in order."""
    for code in instructions_of(cubin):
        for low, high in struct.iter_unpack("<QQ", code):
            control = high >> 41
            yield low & 0xFFF, control >> 11 & 63, control >> 5 & 7


def unordered(cubin: Cubin) -> tuple[int, int]:
    """How many bulk copies there are, and before how many of them a load may be pending."""
    pending: set[int] = set()
    copies = found = 0
    for opcode, waited, sets in instructions(cubin):
        pending -= {board for board in range(6) if waited >> board & 1}
        if opcode == LDS and sets < 7:
            pending.add(sets)
        if opcode == FENCE_VIEW:
            pending.clear()
        if opcode == UBLKCP:
            copies += 1
            found += bool(pending)
    return copies, found


@pytest.mark.parametrize("weights", CONFIGS)
def test_reads_of_a_stage_come_before_the_next_copy_into_it(weights: str) -> None:
    kernel, problem = find_kernel("w4a16_gemm"), Problem(**SHAPE, weights=weights)
    with CachedCompiler(1, CompileCache()) as compiler:
        cubin = compiler.submit(str(source_of(kernel, problem, CONFIGS[weights], SM90.arch)), SM90.arch).result()
    copies, found = unordered(cubin)
    assert copies > 10
    assert found == 0
