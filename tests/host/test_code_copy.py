"""On a CPU: producer warps of attn_prefill make the right elements of codes, at their places (wgmma_code_copy.cuh)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import kernel_on_cpu
import pytest
import torch

from kerngen.arch import Target, find_arch
from kerngen.compiler.render import render
from kerngen.templates import find_kernel
from kerngen.templates.attn_prefill.spec import Problem
from kerngen.templates.common.attention.kv_formats_torch import codes_and_scales, read_rows
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE
from kerngen.templates.values import KV_FORMATS

KERNEL, H200 = find_kernel("attn_prefill"), Target.of(find_arch("sm90"))
NO_PAGE = 0x3FFFFFFF  # an entry that nobody may follow
NUM_WARPS, LINE_BYTES = 4, 128

# Shared memory is an array; stages of codes lie at its begin. A warp's steps write one behind the other.
_HOST = """
static unsigned char arena[1 << 25];
static void __syncwarp() { warp_here().all.arrive_and_wait(); }
"""
_BODIES = {
    "copy16_at": "if (valid) memcpy(arena + to, from, 16); else memset(arena + to, 0, 16);",
    "copy4_at": "if (valid) memcpy(arena + to, from, 4); else memset(arena + to, 0, 4);",
    "load16_shared": "return *(const uint4*)(arena + from);",
    "load2_shared": "return *(const uint16_t*)(arena + from);",
    "store16_shared": "memcpy(arena + to, &x, 16);",
    "barrier_wait": "",
    "barrier_arrive_for": "",
}
_PROBE = """
struct Written : CodeSteps {
    uint32_t to;
    DEVICE uint32_t begin() const { return to; }
    DEVICE uint64_t* full() const { return nullptr; }
    DEVICE void advance() { CodeSteps::advance(), to += Copy::CHUNK * 128; }
};
typedef const KvFormat::Element* Pool;
extern "C" __global__ void probe(void* out, Pool k, Pool v, const int32_t* pages, int first, int end) {
    const KeySpan keys{first, end};
    const Rows k_rows{k, pages, keys, true}, v_rows{v, pages, keys, false};
    const int warp = threadIdx.x / 32;
    const uint32_t at = 4 * RAW_BYTES + warp * (1 << 22);
    if (threadIdx.x % 32 == 0) memset(arena + warp * RAW_BYTES, 0xff, RAW_BYTES);  // in e4m3 all are NaN
    __syncwarp();
    Copy{uint32_t(warp) * RAW_BYTES}.run(Written{STEPS, at});
    __syncwarp();
    if (threadIdx.x % 32 == 0) memcpy((char*)out + warp * (1 << 22), arena + at, 1 << 22);
}
"""
_TILES = "{k_rows, v_rows, Tiles(keys), nullptr, 0, Tiles(keys).first, warp * 64}"
_CHUNKS = (
    "{k_rows, v_rows, 0, nullptr, nullptr, (end - 1) / 64, ((end - 1) / 64 - first / 64 + 2) / 2, warp / 2, warp % 2}"
)


def _lines_of_tiles(head_dim: int, block_n: int, first: int, end: int, warp: int) -> list[tuple[bool, int, int]]:
    """(of K, key, block of 64 columns) of each line of a warp, in order: wgmma.cu.jinja."""
    found = []
    for tile in range((end - 1) // block_n, first // block_n - 1, -1):
        for is_key in (True, False):
            lines = [(is_key, tile * block_n + row, b) for b in range(head_dim // 64) for row in range(block_n)]
            found += lines[warp * 64 : warp * 64 + 64]
    return found


def _lines_of_chunks(first: int, end: int, mine: int) -> list[list[tuple[bool, int, int]]]:
    """Likewise of each chunk of the pipeline of one of two warpgroups that split head_dim."""
    top = (end - 1) // 64
    pairs = (top - first // 64 + 2) // 2
    chunks = []
    for pair in range(pairs + 1):
        if pair < pairs:
            tile = (top - 2 * pair - mine) * 64
            chunks += [[(True, tile + row, c) for row in range(64)] for c in range(8)]
        if pair > 0:
            for whose in (mine, 1 - mine):
                tile = (top - 2 * (pair - 1) - whose) * 64
                chunks += [
                    [(False, tile + c * 16 + row, mine * 4 + b) for b in range(4) for row in range(16)]
                    for c in range(4)
                ]
    return chunks


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(("kv_format", "head_dim", "page_size", "dtype", "span"), [
    ("int8", 128, 16, "fp16", (37, 300)), ("int8", 256, 64, "bf16", (0, 129)),
    ("int8", 512, 16, "bf16", (70, 331)), ("shared_int8", 512, 16, "bf16", (70, 331)),
    ("int8", 512, 64, "fp16", (3, 64)), ("shared_int8", 512, 64, "bf16", (0, 200)),
    ("fp8", 256, 64, "bf16", (0, 129)), ("fp8", 512, 16, "fp16", (70, 331)),
])  # fmt: skip
def test_lines_are_the_values_of_codes(
    kv_format: str, head_dim: int, page_size: int, dtype: str, span: tuple[int, int], tmp_path: Path
) -> None:
    """Keys outside of `span` are zeros, and pages without any of it are not looked up."""
    problem = Problem(head_dim, 4, 2, page_size, dtype=dtype, kv_format=kv_format)
    config = KERNEL.default_config(problem, H200)
    by_chunks = config.warps_d == 2
    source = str(render(KERNEL, problem, config, H200))
    steps = "CodeSteps" + (_CHUNKS if by_chunks else _TILES)
    source = _HOST + source[: source.index('extern "C" __global__')] + _PROBE.replace("STEPS", steps)
    library = kernel_on_cpu.on_cpu(source, "probe", tmp_path, bodies=_BODIES)

    first, end = span
    torch.manual_seed(3)
    form = KV_FORMATS[kv_format]
    kv = form.allocate((40, 2, page_size, head_dim), TORCH_DTYPE[dtype], torch.device("cpu"))
    for of_k, pool in zip((True, False), (kv.k_cache, kv.v_cache), strict=True):
        codes, scales = codes_and_scales(pool, form, of_k)
        codes.random_(-127, 128)
        if form.is_static:
            codes[codes & 127 == 127] = 0  # NaN
        scales.copy_(torch.rand(scales.shape) / 64)
    pages = torch.full((-(-end // page_size) + 2,), NO_PAGE, dtype=torch.int32)
    used = slice(first // page_size, -(-end // page_size))
    pages[used] = torch.randperm(39)[: len(pages[used])].int() + 1
    out = torch.full((NUM_WARPS, 1 << 22), 77, dtype=torch.uint8)
    pools = (kv.k_cache, kv.v_cache)
    library.run(1, 128, 0, *(ctypes.c_void_p(t.data_ptr()) for t in (out, *pools, pages)), first, end)

    keys = torch.arange(first, end)
    at = pages[keys // page_size].long(), keys % page_size, 0
    values = {
        is_key: read_rows(pool, kv_format, TORCH_DTYPE[dtype], *at, keys=is_key)
        for is_key, pool in zip((True, False), pools, strict=True)
    }
    for warp in range(NUM_WARPS):
        if by_chunks:
            lines = [x for chunk in _lines_of_chunks(first, end, warp // 2)[warp % 2 :: 2] for x in chunk]
        else:
            lines = _lines_of_tiles(head_dim, config.block_n, first, end, warp)
        got = out[warp, : len(lines) * LINE_BYTES].view(TORCH_DTYPE[dtype]).view(-1, 8, 8)
        assert not bool(out[warp, len(lines) * LINE_BYTES :].any())
        for i, (is_key, key, block) in enumerate(lines):
            line = torch.cat([got[i, c ^ key % 8] for c in range(8)])
            wanted = torch.zeros(64, dtype=TORCH_DTYPE[dtype])
            if first <= key < end:
                wanted = values[is_key][key - first, block * 64 :][:64].to(TORCH_DTYPE[dtype])
            assert torch.equal(line, wanted), (warp, i, is_key, key, block)
