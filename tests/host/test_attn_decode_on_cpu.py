"""attn_decode's own source on the host: what tensor cores multiply, and what is stored.

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
    "team_barrier": "if (!teams[team]) teams[team] = new Barrier(SPLIT_D * 32); teams[team]->arrive_and_wait();",
    "transpose_8x8": "const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2, from = row / 2;"
    " const uint32_t lo = __shfl_sync(~0u, x, column * 4 + from), hi = __shfl_sync(~0u, x, column * 4 + 4 + from);"
    " return (lo >> row % 2 * 16 & 0xffff) | (hi >> row % 2 * 16) << 16;",
}
_HOST = """
static void __threadfence() {}
alignas(128) static uint16_t smem[1 << 17];
static Barrier* teams[32];
"""


def _on_cpu(source: str, folder: Path, combines: bool) -> ctypes.CDLL:
    source = kernel_on_cpu.with_tensor_cores(source)
    source = source.replace("extern __shared__ __align__(128) uint16_t smem[];", "")
    source = re.sub(r"BLOCK_MBARRIER = [^;]*;", "BLOCK_MBARRIER = false;", source)
    return kernel_on_cpu.on_cpu(_HOST + source, "attn_decode", folder, ("attn_combine",) if combines else (), _BODIES)


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
    # sixteen tokens, and tokens that see each other
    ("qkv-q16-window40", "sm80", {"num_splits": 2}),
    ("qkv-q16-window40", "sm70", {"num_splits": 3}),
    ("d512-qkv-group8-q12", "sm80", {"num_splits": 3}),
    ("d128-bf16-not-causal-window0", "sm80", {"num_splits": 3}),
    ("d128-fp16-not-causal-window40", "sm70", {"num_splits": 2}),
    ("d256-fp16-not-causal-window40", "sm75", {"num_splits": 1}),
]  # fmt: skip


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
@pytest.mark.parametrize(("name", "arch", "changed"), RUNS, ids=lambda x: x if isinstance(x, str) else "")
def test_keys_are_multiplied_and_stored(name: str, arch: str, changed: dict[str, Any], tmp_path: Path) -> None:
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
