"""Compile one kernel for every architecture that this NVRTC knows, and print what each build takes. Needs no GPU.

python examples/compile_a_kernel.py
python examples/compile_a_kernel.py w4a16_gemm n=4096,k=4096,group_size=32,dtype=fp16
"""

from __future__ import annotations

import sys

from kerngen.arch import ARCHES, Target
from kerngen.compiler.compile import compile_cubin, supported_targets
from kerngen.compiler.render import render
from kerngen.errors import KerngenError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import describe, parse_fields


def main(name: str = "attn_decode", fields: str = "head_dim=256,num_q_heads=32,num_kv_heads=16,dtype=fp16") -> None:
    """Render and compile kernel `name` for the problem in `fields`, with its default configuration, arch by arch."""
    kernel = find_kernel(name)
    problem = parse_fields(kernel.problem_type, fields)
    print(f"{name} {describe(problem)}")
    for arch in ARCHES.values():
        if arch.number not in supported_targets():
            print(f"{arch!s:6} this NVRTC cannot compile for it; the cuda12 extra can")
            continue
        target = Target.of(arch)
        if why := kernel.why_unsupported(problem, target):
            print(f"{arch!s:6} {why}")
            continue
        config = kernel.default_config(problem, target)
        cubin = compile_cubin(render(kernel, problem, config, target), arch)
        spills = "spills" if cubin.spills else "no spills"
        smem = kernel.smem_bytes(problem, config, target)
        print(
            f"{arch!s:6} {len(cubin.image):7,} B of machine code in {cubin.compile_ms:4.0f} ms, "
            f"{cubin.registers:3} registers, {spills}, {smem:7,} B of shared memory  {describe(config)}"
        )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except KerngenError as e:
        sys.exit(str(e))
