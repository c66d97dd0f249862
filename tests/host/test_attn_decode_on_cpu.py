"""attn_decode's own source on the host's threads, of caches with codes: what tensor cores multiply, and what is stored.

Blocks run one after the other, so that what a warp's lanes hand each other may lie in arrays of the library.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch
from torch import Tensor

from kerngen.arch import Target, find_arch
from kerngen.compiler.render import render
from kerngen.templates import Case, find_kernel
from kerngen.templates.attn_decode.spec import tile_bytes
from kerngen.timing.measure import compare

KERNEL = find_kernel("attn_decode")
CASES = {case.name: case for case in KERNEL.cases.CASES}
_CTYPES: dict[str, Any] = {"ptr": ctypes.c_void_p, "f32": ctypes.c_float, "i32": ctypes.c_int}

_BODIES = {
    "copy16": "memcpy(dst, src, 16);",
    "copy16_or_zero": "if (valid) memcpy(dst, src, 16); else memset(dst, 0, 16);",
    "exp2_fast": "return exp2f(x);",
    "team_barrier": "if (!teams[team]) teams[team] = new Barrier(SPLIT_D * 32); teams[team]->arrive_and_wait();",
    "transpose_8x8": "const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2, from = row / 2;"
    " const uint32_t lo = __shfl_sync(~0u, x, column * 4 + from), hi = __shfl_sync(~0u, x, column * 4 + 4 + from);"
    " return (lo >> row % 2 * 16 & 0xffff) | (hi >> row % 2 * 16) << 16;",
}
_HOST = """
static void __threadfence() {}
static void __syncwarp() { warp_here().all.arrive_and_wait(); }
alignas(128) static uint16_t smem[1 << 17];
static Barrier* teams[32];
static unsigned operands[32][32][8];  // of each warp's lanes
static unsigned* const own_operands() { return operands[threadIdx.x / 32][threadIdx.x % 32]; }
static unsigned short half_of(int lane, int word, int half) {
    return (unsigned short)(operands[threadIdx.x / 32][lane][word] >> half * 16);
}
"""
# As mma.cuh says where a lane's operands are.
_MMA_16816 = """
template <bool BF16> DEVICE void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    unsigned* const own = own_operands();
    own[0] = a[0], own[1] = a[1], own[2] = a[2], own[3] = a[3], own[4] = b0, own[5] = b1;
    warp_here().all.arrive_and_wait();
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 16; k++)
            c[e] += Half<BF16>::to_float(half_of(g * 4 + k % 8 / 2, e / 2 + k / 8 * 2, k % 2)) *
                    Half<BF16>::to_float(half_of((2 * t + e % 2) * 4 + k % 8 / 2, 4 + k / 8, k % 2));
    warp_here().all.arrive_and_wait();
}
"""
_MMA_884 = """
typedef uint32_t Word;
template <bool B_IS_ROWS> DEVICE void products_884(float (&c)[8], Word a0, Word a1, Word b0, Word b1) {
    unsigned* const own = own_operands();
    own[0] = a0, own[1] = a1, own[2] = b0, own[3] = b1;
    warp_here().all.arrive_and_wait();
    const int lane = threadIdx.x % 32, pair = lane % 16 / 4 * 4, high = lane / 16;
    for (int e = 0; e < 8; e++) {
        const int m = (lane & 1) + (e & 2) + 4 * high, n = (lane & 2) + (e & 1) + (e & 4);
        for (int k = 0; k < 4; k++) {
            const int from = B_IS_ROWS ? k + n / 4 * 16 : n % 4 + n / 4 * 16, at = B_IS_ROWS ? n % 4 : k;
            c[e] += Half<false>::to_float(half_of(pair + m % 4 + m / 4 * 16, k / 2, k % 2)) *
                    Half<false>::to_float(half_of(pair + from, 2 + at / 2, at % 2));
        }
    }
    warp_here().all.arrive_and_wait();
}
DEVICE void mma_884(float (&c)[8], Word a0, Word a1, Word b0, Word b1) { products_884<false>(c, a0, a1, b0, b1); }
DEVICE void mma_884_row(float (&c)[8], Word a0, Word a1, Word b0, Word b1) { products_884<true>(c, a0, a1, b0, b1); }
"""


def _on_cpu(source: str, folder: Path, combines: bool) -> ctypes.CDLL:
    for name, made in (("mma_16816", _MMA_16816), ("mma_884", _MMA_884)):
        if f" {name}(" in source:
            source = re.sub(rf"DEVICE void {name}(\w*)\(", rf"DEVICE void {name}\1_of_gpu(", source)
            before = source.index("template <bool BF16> DEVICE void mma_16816")
            source = source[:before] + made + source[before:]
    source = source.replace("extern __shared__ __align__(128) uint16_t smem[];", "")
    source = re.sub(r"BLOCK_MBARRIER = [^;]*;", "BLOCK_MBARRIER = false;", source)
    return kernel_on_cpu.on_cpu(_HOST + source, "attn_decode", folder, ("attn_combine",) if combines else (), _BODIES,
                                 fibers=True)  # fmt: skip


# (case, arch, what is changed of its default configuration)
RUNS: list[tuple[str, str, dict[str, Any]]] = [
    ("d256-bf16-int8", "sm90", {"num_splits": 2}),  # codes that GPUs have been seen to read: this file is right
    ("d512-fp16-shared_int8-qk-q2", "sm70", {"num_splits": 1}),
    ("d128-bf16-int4", "sm90", {"num_splits": 3}),
    ("d128-bf16-int4-qkv-q4-window40", "sm90", {"num_splits": 1}),
    ("d256-fp16-int4-qkv-q4-window40", "sm75", {"num_splits": 2}),
    ("d512-bf16-int4", "sm90", {"num_splits": 2}),
    ("d512-fp16-int4-qkv-q4-window40", "sm90", {"num_splits": 1, "split_d": 8, "num_warps": 8}),
    ("d512-fp16-int4", "sm70", {"num_splits": 2}),
    ("d512-fp16-int4-qkv-q4-window40", "sm70", {"num_splits": 1}),
    ("d512-fp16-int4-raw_q-q3", "sm90", {"num_splits": 3}),
    ("d512-bf16-shared_int4", "sm90", {"num_splits": 2}),
    ("d512-bf16-shared_int4-qk-q2", "sm90", {"num_splits": 1}),
    ("d512-fp16-shared_int4-qk-q2", "sm90", {"num_splits": 2, "block_n": 32, "split_d": 4, "num_stages": 2}),
    ("d512-fp16-shared_int4-qk-q2", "sm70", {"num_splits": 2}),
    ("shared_int4-raw_q", "sm75", {"num_splits": 2}),
    ("d512-fp16-int4-qk-rows80", "sm90", {"num_splits": 1}),
    ("d512-fp16-shared_int4-qk-rows80", "sm90", {"num_splits": 1}),
    ("d128-bf16-int3", "sm90", {"num_splits": 3}),
    ("d128-bf16-int3-qkv-q4-window40", "sm90", {"num_splits": 1, "split_d": 2}),
    ("d256-fp16-int3-qkv-q4-window40", "sm75", {"num_splits": 2}),
    ("d512-bf16-int3", "sm90", {"num_splits": 2}),
    ("d512-fp16-int3-qkv-q4-window40", "sm90", {"num_splits": 1, "split_d": 8, "num_warps": 8}),
    ("d512-fp16-int3", "sm70", {"num_splits": 2}),
    ("d512-fp16-int3-qkv-q4-window40", "sm70", {"num_splits": 1}),
    ("d512-fp16-int3-raw_q-q3", "sm90", {"num_splits": 3}),
    ("d512-bf16-shared_int3", "sm90", {"num_splits": 2}),
    ("d512-bf16-shared_int3-qk-q2", "sm90", {"num_splits": 1}),
    ("d512-bf16-shared_int3", "sm80", {"num_splits": 1, "split_d": 1, "num_warps": 4, "num_stages": 3}),
    ("d512-fp16-shared_int3-qk-q2", "sm90", {"num_splits": 2, "block_n": 32, "split_d": 4, "num_stages": 2}),
    ("d512-fp16-shared_int3-qk-q2", "sm80", {"num_splits": 1, "split_d": 8, "num_warps": 8}),
    ("d512-fp16-shared_int3-qk-q2", "sm70", {"num_splits": 2}),
    ("shared_int3-raw_q", "sm75", {"num_splits": 2}),
    ("d512-fp16-int3-qk-rows80", "sm90", {"num_splits": 1}),
    ("d512-fp16-shared_int3-qk-rows80", "sm90", {"num_splits": 1}),
    ("d128-fp16-fp8", "sm90", {"num_splits": 3}),
    ("d256-bf16-fp8", "sm90", {"num_splits": 2}),
    ("d256-bf16-fp8-qkv-q4-window40", "sm80", {"num_splits": 1}),
    ("d512-bf16-fp8-qkv-q4-window40", "sm90", {"num_splits": 1, "split_d": 8, "num_warps": 8}),
    ("d512-fp16-fp8", "sm70", {"num_splits": 2}),
    ("d512-fp16-fp8-qkv-q4-window40", "sm70", {"num_splits": 1}),
    ("d512-fp16-fp8-raw_q-q3", "sm75", {"num_splits": 3}),
    ("d512-fp16-fp8-qk-rows80", "sm90", {"num_splits": 1}),
]  # fmt: skip


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
@pytest.mark.parametrize(("name", "arch", "changed"), RUNS, ids=lambda x: x if isinstance(x, str) else "")
def test_codes_are_multiplied_and_stored(name: str, arch: str, changed: dict[str, Any], tmp_path: Path) -> None:
    case: Case = CASES[name]
    problem, target = case.problem, Target.of(find_arch(arch))
    config = replace(KERNEL.default_config(problem, target), **changed)
    KERNEL.require_valid(problem, config, target)
    launches = KERNEL.launches(problem, config, target)
    source = str(render(KERNEL, problem, config, target))
    if target.arch.has_ldmatrix:
        source += f"static_assert(KvTile::BYTES == {tile_bytes(problem, config)});"
    library = _on_cpu(source, tmp_path, len(launches) > 1)
    inputs = KERNEL.cases.inputs(case, torch.device("cpu"))
    expected = KERNEL.reference.expected(problem, inputs)
    inputs["workspace"] = torch.full((KERNEL.workspace_bytes(problem, config, target),), 255, dtype=torch.uint8)
    runs = (library.run, library.run_attn_combine) if len(launches) > 1 else (library.run,)
    for launch, run in zip(launches, runs, strict=True):
        x, y, z = launch.grid
        library.set_grid(x, y, 1)
        values = []
        for a in KERNEL.body(config, target.arch).args[launch.entry]:
            given = inputs[a.name]
            if isinstance(given, Tensor):
                given = given.data_ptr()
            values.append(_CTYPES[a.kind](given))
        run(x * y * z, launch.block[0], 0, *values)
    result = compare(KERNEL, case, inputs, expected)
    assert result.ok, result.message
