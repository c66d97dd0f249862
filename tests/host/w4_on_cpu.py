"""W4A16 kernels on the CPU (kernel_on_cpu.py): what their inline PTX does, and the shared memory of a launch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kernel_on_cpu
import torch

from kerngen.arch import Target
from kerngen.compiler.render import render
from kerngen.templates.kernel import Kernel

_ON_CPU = r"""
static inline float __int_as_float(int i) { return __builtin_bit_cast(float, i); }
static inline int __float_as_int(float f) { return __builtin_bit_cast(int, f); }
static char dynamic_shared[1 << 18] __attribute__((aligned(1024)));
"""
_BODIES = {
    "and_or": "return (a & MASK) | BITS;",
    "and_xor": "return (a & MASK) ^ BITS;",
    "w4_words": "return valid ? *p : uint4{};",
    "w4_scales": "return valid ? *p : std::decay_t<decltype(*p)>{};",
    "w4_token": "return valid ? *p : 0u;",
    "copy16": "memcpy(dst, src, 16);",
    "copy16_or_zero": "if (valid) memcpy(dst, src, 16); else memset(dst, 0, 16);",
    "exp2_fast": "return exp2f(x);",
    # A word is the phase in its upper half, and bytes that are on their way.
    "barrier_init": "*barrier = 0;",
    "barrier_expect": "*barrier += bytes; if (!bytes) *barrier += 1ull << 32;",
    "copy_bulk": "if ((uintptr_t(dst) | uintptr_t(src) | bytes) % 16) __builtin_trap(); memcpy(dst, src, bytes);"
    " *barrier -= bytes; if (!uint32_t(*barrier)) *barrier += 1ull << 32;",
    "barrier_wait": "while ((*barrier >> 32 & 1) == parity) pass_on();",
    "evict_first": "return 0;",
    "max_abs2": "__builtin_trap();",
    "max_nan": "__builtin_trap();",
}  # fmt: skip


def run(
    kernel: Kernel, problem: Any, config: Any, target: Target, inputs: Mapping[str, Any], folder: Path
) -> None:  # fmt: skip
    """Runs all launches of `kernel` on `inputs`, with a workspace of zeros."""
    source = kernel_on_cpu.with_tensor_cores(str(render(kernel, problem, config, target)))
    source = re.sub(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];",
                    r"\1* const \2 = reinterpret_cast<\1*>(dynamic_shared);", source)  # fmt: skip
    args = kernel.body(config, target.arch).args
    first, *others = args
    library = kernel_on_cpu.on_cpu(_ON_CPU + source, first, folder, others, bodies=_BODIES)
    given = dict(inputs) | {"workspace": torch.zeros(kernel.workspace_bytes(problem, config, target) // 4 + 4)}
    for launch in kernel.launches(problem, config, target):
        launched = library.run if launch.entry == first else getattr(library, f"run_{launch.entry}")
        launched(launch.grid[0], launch.block[0], 0, *kernel_on_cpu.arguments_of(args[launch.entry], given))
