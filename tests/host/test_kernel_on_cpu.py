"""What the host cannot run of a kernel is refused, not passed over."""

from __future__ import annotations

import ctypes
from pathlib import Path

import kernel_on_cpu
import pytest

from kerngen.arch import Target, find_arch
from kerngen.compiler.render import render
from kerngen.templates import find_kernel

PROBE = """
extern "C" __global__ void probe(unsigned* out, int asks) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("" ::: "memory");
    if (asks) asm volatile("ld.global.cv.u32 %0, [%1];" : "=r"(out[0]) : "l"(out + 1));
    out[2] = 1;
}
"""


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
def test_inline_ptx_without_a_body_is_refused_where_it_runs(tmp_path: Path) -> None:
    kernel, target = find_kernel("kv_write"), Target.of(find_arch("sm90"))
    problem = kernel.cases.CASES[0].problem
    source = str(render(kernel, problem, kernel.default_config(problem, target), target))
    library = kernel_on_cpu.on_cpu(source + PROBE, "probe", tmp_path)
    out = (ctypes.c_uint32 * 3)()
    library.run(1, 1, 0, out, 0)
    assert out[2] == 1
    with pytest.raises(NotImplementedError, match=r"^ld.global.cv.u32 %0, \[%1\];: no body stands for this inline PTX"):
        library.run(1, 1, 0, out, 1)
    library.run(1, 1, 0, out, 0)
