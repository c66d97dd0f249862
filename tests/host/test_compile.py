"""NVRTC without a GPU: resources, determinism, errors."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from kerngen.arch import ARCHES, Arch, find_arch
from kerngen.compiler import compile as compiler
from kerngen.compiler.compile import (
    CompilePool,
    cache_key,
    compile_cubin,
    compile_ptx,
    elf_resources,
    parse_report,
    require_target,
    whole_elf,
)
from kerngen.compiler.render import Chunk, assemble
from kerngen.errors import CompileError, ToolchainError, UnknownName
from kerngen.templates import find_kernel

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(128) reverse(float* x) {
    __shared__ float tile[256];
    extern __shared__ float more[];
    tile[threadIdx.x] = x[threadIdx.x];
    more[threadIdx.x] = tile[threadIdx.x] * 2.0f;
    __syncthreads();
    x[threadIdx.x] = tile[127 - threadIdx.x] + more[127 - threadIdx.x];
}
"""
SPILLING = r"""
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(const float* x, float* y) {
    float v[128];
#pragma unroll
    for (int i = 0; i < 128; i++) v[i] = x[threadIdx.x + i * 1024];
    for (int round = 0; round < 8; round++) {
#pragma unroll
        for (int i = 0; i < 128; i++) v[i] = v[i] * v[(i + 37) % 128] + y[round];
    }
#pragma unroll
    for (int i = 0; i < 128; i++) y[threadIdx.x + i * 1024] = v[i];
}
"""


@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_every_arch_compiles_with_its_resources(arch: Arch) -> None:
    cubin = compile_cubin(SOURCE, arch)
    assert cubin.image[:4] == b"\x7fELF"
    resources = cubin.entries["reverse"]
    assert resources.static_smem_bytes == 1024
    assert 0 < resources.registers <= 64
    assert not cubin.spills
    registers, shared = elf_resources(cubin.image)["reverse"]
    assert registers == resources.registers
    assert shared - 1024 in (0, 1024)


@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_cubin_is_a_whole_file(arch: Arch) -> None:
    image = compile_cubin(SOURCE, arch).image
    elf = ELFFile(BytesIO(image))
    ends = [s["sh_offset"] + s["sh_size"] for s in elf.iter_sections() if s["sh_type"] != "SHT_NOBITS"]
    ends.append(elf["e_shoff"] + elf["e_shnum"] * elf["e_shentsize"])
    ends.append(elf["e_phoff"] + elf["e_phnum"] * elf["e_phentsize"])
    assert len(image) == max(ends)
    assert whole_elf(image) == image == whole_elf(image[:-1])
    with pytest.raises(CompileError, match="whole"):
        whole_elf(image[:-2])


def test_same_input_same_bytes_in_another_process() -> None:
    arch = find_arch("sm70")
    with CompilePool(1) as pool:
        elsewhere = pool.submit(SOURCE, arch).result()
    here = compile_cubin(SOURCE, arch)
    assert (here.image, here.key) == (elsewhere.image, elsewhere.key)


def test_spills_are_seen() -> None:
    cubin = compile_cubin(SPILLING, find_arch("sm80"))
    assert cubin.spills
    assert cubin.entries["crowded"].spill_store_bytes > 0


def test_key_covers_each_of_its_parts() -> None:
    base = cache_key("s", "sm_70", ("-a",), (12, 9))
    others = [
        cache_key("t", "sm_70", ("-a",), (12, 9)),
        cache_key("s", "sm_75", ("-a",), (12, 9)),
        cache_key("s", "sm_70", ("-a", "-b"), (12, 9)),
        cache_key("s", "sm_70", ("-a",), (13, 0)),
    ]
    assert len({base, *others}) == 5


def test_wrong_source_gives_the_compilers_words() -> None:
    with pytest.raises(CompileError, match="undefined_thing") as e:
        compile_cubin('extern "C" __global__ void k() { undefined_thing(); }', find_arch("sm90"))
    assert "kernel.cu" in e.value.log


def test_source_without_a_kernel_is_an_error() -> None:
    with pytest.raises(CompileError, match="no ptxas report"):
        compile_cubin("__device__ int f() { return 1; }", find_arch("sm90"))


def test_report_and_elf_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = parse_report

    def lie(log: str) -> dict[str, compiler.Resources]:
        return {k: compiler.Resources(r.registers + 1, 0, 0, 0, r.static_smem_bytes) for k, r in parse(log).items()}

    monkeypatch.setattr(compiler, "parse_report", lie)
    with pytest.raises(CompileError, match="registers"):
        compile_cubin(SOURCE, find_arch("sm90"))


def test_toolchain_that_cannot_target_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "supported_targets", lambda: frozenset({75, 80, 90}))
    with pytest.raises(ToolchainError, match="sm70") as e:
        require_target(find_arch("sm70"))
    assert "kerngen[cuda12]" in str(e.value)
    monkeypatch.setattr(compiler, "supported_targets", lambda: frozenset({70, 75}))
    with pytest.raises(ToolchainError) as e:
        require_target(find_arch("sm120"))
    assert "kerngen[cuda13]" in str(e.value)


def test_ptx_targets_the_virtual_arch() -> None:
    ptx = compile_ptx(SOURCE, find_arch("sm70"))
    assert b".target sm_70" in ptx.image
    assert ptx.image.endswith(b"}\n\n\0") or ptx.image.endswith(b"\0")


@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_common_headers_parse_on_every_arch(arch: Arch) -> None:
    common = Path(__file__).parents[2] / "templates" / "common"
    own = ("types.cuh", "copy.cuh", "mma.cuh")
    text = "".join(f'#include "common/ptx/{name}"\n' for name in own)
    body = 'extern "C" __global__ void k(float* x) { x[0] = tanh_exact(x[1]) + warp_sum(x[2]); }'
    assert compile_cubin(assemble([Chunk(text + body)], arch, (common,)), arch).entries


def test_unknown_kernel() -> None:
    with pytest.raises(UnknownName, match="kernel"):
        find_kernel("flash_attention_9")
