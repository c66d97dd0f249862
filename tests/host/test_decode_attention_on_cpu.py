"""decode_layers' attention on the CPU, in each format of the caches: from a projected row to attention's output.

Producer and consumer warps of some blocks run by turns (kernel_on_cpu.py), with their mbarriers, bulk copies, tensor
cores and words by LL. Beside the reference it shows how tiles lie in slots and who waits for whom.
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

from kerngen.arch import Target, find_arch
from kerngen.compiler.render import render
from kerngen.templates import find_kernel
from kerngen.templates.common.attention.heads_torch import written_both
from kerngen.templates.decode_layers.reference import _attended, _heads, values
from kerngen.templates.decode_layers.spec import Problem, layer_tensors, smem_bytes

KERNEL, H200 = find_kernel("decode_layers"), Target.of(find_arch("sm90"))
NO_COMPILER = pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")

_HOST = r"""
#define __constant__
#define __align__(x)
using std::uint64_t;
static inline float __int_as_float(int i) { return __builtin_bit_cast(float, i); }
static inline int __float_as_int(float f) { return __builtin_bit_cast(int, f); }
template <typename T> static T __ldg(const T* p) { return *p; }
static uint64_t __shfl_sync(unsigned, uint64_t x, int) { return x; }
static float __shfl_down_sync(unsigned, float x, int) { return x; }
static unsigned max(unsigned a, float b) { return std::max(a, unsigned(b)); }

// An mbarrier, by its address.
struct Mbarrier { int count = 0, pending = 0; long bytes = 0; unsigned phase = 0; };
static std::map<const void*, Mbarrier> mbarriers;
static void mbar_init(const void* at, int count) { mbarriers[at] = {count, count}; }
static void mbar_change(const void* at, int arrivals, long bytes) {
    Mbarrier& b = mbarriers.at(at);
    b.pending -= arrivals, b.bytes += bytes;
    if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count;
}
static void mbar_wait(const void* at, unsigned parity) {
    while (mbarriers.at(at).phase == parity) pass_on();
}
// Barriers of some of a block's threads.
static std::map<std::pair<Block*, int>, std::unique_ptr<Barrier>> named;
static void named_sync(int id, int threads) {
    auto& b = named[{block_here, id}];
    if (!b) b = std::make_unique<Barrier>(threads);
    b->arrive_and_wait();
}
"""
_PROBE = r"""
// A layer's attention. raw: the projected row. tensors: of the layer, the caches the last two.
extern "C" __global__ void probe(uint8_t* memory, int block_bytes, void* workspace, const uint32_t* raw, int raw_words,
                                 const void* const* tensors, const int* table, const float* inv_freq, int64_t position,
                                 int kv_len, int64_t slot, int is_full, int owns_kv, float eps) {
    Shared& s = *reinterpret_cast<Shared*>(memory + int64_t(blockIdx.x) * block_bytes);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    LlMailbox mailbox(workspace, 0);
    if (threadIdx.x == 0) {
        s.ring.init();
        s.sights[0] = Sight(SLIDING(), kv_len);
        s.sights[1] = Sight(FULL(), kv_len);
        for (int i = 0; i < ITEM_DIMS; i++) s.zeros[i] = 0;
    }
    if (warp == 1 && lane < (is_full ? FULL::LANES : SLIDING::LANES)) {
        Vec8<Dtype::fp32> freqs;
        freqs.load_constant(inv_freq, lane);
        s.turns[is_full][lane] = is_full ? rope_terms_at<BF16, FULL::NUM_ROTATED>(float(position), freqs, lane)
                                         : rope_terms_at<BF16, SLIDING::NUM_ROTATED>(float(position), freqs, lane);
    }
    __syncthreads();
    if (warp == WARPS) {
        Ring::Producer ring{s.ring};
        const Sight& sight = s.sights[is_full];
        const int pages = sight.page_of(table, lane);
        if (is_full) fetch_keys<FULL>(ring, sight, table, pages, tensors[K_CACHE], tensors[V_CACHE]);
        else fetch_keys<SLIDING>(ring, sight, table, pages, tensors[K_CACHE], tensors[V_CACHE]);
        return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        for (int i = 0; i < raw_words; i++)
            ll_store(reinterpret_cast<uint32_t*>(mailbox.qkv()) + i, ll_encode_pair(raw[i]));
    Ring::Consumer ring{s.ring};
    Kind kind;
    kind.is_full = is_full, kind.owns_kv = owns_kv;
    attend(s, ring, mailbox, tensors, kind, slot, eps);
}
extern "C" __global__ void dump(uint32_t* out, void* workspace, int words) {
    LlMailbox mailbox(workspace, 0);
    if (threadIdx.x == 0)
        for (int i = 0; i < words; i++) out[i] = reinterpret_cast<const uint32_t*>(mailbox.attended())[turned(i)];
}
"""
_LOAD = "const volatile uint32_t* q = (const volatile uint32_t*)p; "
_BODIES = {
    "barrier_init": "mbar_init(barrier, 1);",
    "barrier_expect": "mbar_change(barrier, 1, bytes);",
    "barrier_wait": "mbar_wait(barrier, parity);",
    "copy_bulk": "if ((uintptr_t(dst) | uintptr_t(src) | bytes) % 16) __builtin_trap(); memcpy(dst, src, bytes);"
    " mbar_change(barrier, 0, -long(bytes));",
    "ll_load4_where": f"if (!(mask & bits)) return; {_LOAD} v = {{q[0], q[1], q[2], q[3]}};"
    " if (!ll_all_valid(v)) pass_on();",
    "ll_load2_where": f"if (!(mask & bits)) return; {_LOAD} v = {{q[0], q[1]}}; if (!v.x || !v.y) pass_on();",
    "ll_load2_if": f"if (!wanted) return; {_LOAD} v = {{q[0], q[1]}}; if (!v.x || !v.y) pass_on();",
    "ll_store": "*(volatile uint32_t*)p = word;",
    "ll_store2": "volatile uint32_t* q = (volatile uint32_t*)p; q[1] = words.y; q[0] = words.x;",
    "ll_store4": "volatile uint32_t* q = (volatile uint32_t*)p; q[3] = words.w; q[1] = words.y; q[0] = words.x;"
    " q[2] = words.z;",
    "smem_addr": "return uint32_t(uintptr_t(p));",
}  # fmt: skip


def _library(problem: Problem, of_config: dict[str, int], folder: Path) -> tuple[ctypes.CDLL, int, int]:
    """The probe, its warps of consumers, and the shared memory of a block."""
    config = replace(KERNEL.default_config(problem, H200), **of_config)
    source = str(render(KERNEL, problem, config, H200))
    source = source[: source.index("// The producer warp: loads the block's weights")]
    source += _PROBE
    source = kernel_on_cpu.with_tensor_cores(source)
    for pattern, call in (
        (r'asm volatile\("mbarrier\.init\.shared::cta\.b64 \[%0\], %1;".*?\);', "mbar_init(&empty[i], 32 * WARPS);"),
        (r'asm volatile\("mbarrier\.arrive\.shared::cta\.b64 _, \[%0\];"::"r"\(smem_addr\(&ring.*?\);',
         "mbar_change(&ring.empty[at.slot], 1, 0);"),
        (r'asm volatile\("barrier\.cta\.sync\.aligned 1, %0;".*?\);', "named_sync(1, THREADS);"),
        (r'asm volatile\("barrier\.cta\.sync\.aligned 4, %0;".*?\);', "named_sync(4, 32 * ATTENTION_WARPS);"),
    ):  # fmt: skip
        flexible = pattern.replace('"::"', r'"\s*::\s*"').replace(r".*?\);", r".*?: \"memory\"\);")
        source, count = re.subn(flexible, call, source, flags=re.DOTALL)
        assert count == 1, (pattern, count)
    library = kernel_on_cpu.on_cpu(_HOST + source, "probe", folder, ["dump"], _BODIES)
    return library, config.num_warps, smem_bytes(problem, config, H200)


def _case(letter: str, **fields: Any) -> Problem:
    """A layer; a sliding one has a full one behind it where that shares K and V."""
    is_shared, is_full = "shared" in fields["kv_format"], letter in "fF"
    kind = {"head_dim": 512} if is_full else {} if is_shared else {"full_head_dim": 256}
    small: dict[str, Any] = {
        "layers": letter if is_full or not is_shared else letter + "f", "hidden": 64, "num_q_heads": 2,
        "num_kv_heads": 1, "num_full_kv_heads": 1, "inner": 96, "window": 150, "page_size": 32,
        "k_eq_v": is_shared and letter != "F",
    }  # fmt: skip
    return Problem(**(small | kind | fields))


_HALF: dict[str, Any] = {"dtype": "fp16", "residual_dtype": "fp32"}
# (layer, fields of the problem, and of the configuration where it is not the default's, blocks). More tiles than stages
# hold; the ends of tiles; blocks without keys.
CASES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("f", {"kv_format": "int8", "kv_len": 333}, 1),
    ("f", {"kv_format": "shared_int8", "kv_len": 333}, 1),
    ("f", {"kv_format": "shared", "kv_len": 333}, 1),
    ("f", {"kv_format": "shared", "kv_len": 200, "num_stages": 3}, 1),  # batches of two tiles
    ("f", {"kv_format": "shared_int8", "kv_len": 200, "num_stages": 3}, 1),
    ("s", {"kv_format": "int8", "kv_len": 333}, 1),
    ("f", {"kv_format": "int8", "kv_len": 250, "num_stages": 3}, 1),
    ("f", {"kv_format": "int8", "kv_len": 333, "num_stages": 5, "stage_tiles": 40}, 1),  # two tiles a stage
    ("f", {"kv_format": "int8", "kv_len": 250, "num_stages": 5, "stage_tiles": 48}, 1),  # three
    ("f", {"kv_format": "shared_int8", "kv_len": 333, "num_stages": 5, "stage_tiles": 48}, 1),
    ("f", {"kv_format": "int8", "kv_len": 97, "num_q_heads": 8} | _HALF, 3),
    ("f", {"kv_format": "shared_int8", "kv_len": 129, "num_q_heads": 16} | _HALF, 5),
    ("f", {"kv_format": "shared", "kv_len": 80, "num_q_heads": 4} | _HALF, 2),
    ("f", {"kv_format": "shared_int8", "kv_len": 1}, 2),
    ("s", {"kv_format": "int8", "kv_len": 190, "num_q_heads": 4, "num_kv_heads": 2} | _HALF, 5),
    ("s", {"kv_format": "shared", "kv_len": 333}, 1),
    ("s", {"kv_format": "shared", "kv_len": 130, "num_q_heads": 4, "window": 100} | _HALF, 3),
    ("s", {"kv_format": "shared_int8", "kv_len": 40, "page_size": 16}, 2),
    ("F", {"kv_format": "shared_int8", "kv_len": 100}, 2),
    ("F", {"kv_format": "shared", "kv_len": 100, "page_size": 16} | _HALF, 2),
    ("S", {"kv_format": "int8", "kv_len": 301, "window": 100} | _HALF, 2),
)


def _named(x: Any) -> str:
    return f"{x['kv_format']}_{x['kv_len']}" if isinstance(x, dict) else str(x)


@NO_COMPILER
@pytest.mark.parametrize(("letter", "fields", "blocks"), CASES, ids=_named)
def test_attention_is_the_references(letter: str, fields: dict[str, Any], blocks: int, tmp_path: Path) -> None:
    of_config: dict[str, int] = {name: fields[name] for name in ("num_stages", "stage_tiles") if name in fields}
    problem = _case(letter, **{name: value for name, value in fields.items() if name not in of_config})
    library, warps, block_bytes = _library(problem, of_config, tmp_path)
    given = KERNEL.cases.inputs(KERNEL.cases.case_for(problem), "cpu")
    own = given["layers"][: len(layer_tensors(0))]
    w = dict(zip(layer_tensors(0), own, strict=True))
    dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
    raw = torch.randn(1, problem.matrices(letter)[0][0], generator=torch.Generator().manual_seed(5)).to(dtype)
    form, is_full = problem.kv_format_of(letter), letter in "fF"
    caches = [given["k_caches"][0], given["v_caches"][0]]
    table, slots = (given[f"full_{n}" if is_full else n] for n in ("block_table", "slots"))

    q, k, v = _heads(problem, letter, raw.float(), w, given)
    wanted = written_both(*caches, slots, k, v, form) if letter.islower() else caches
    out_wanted = _attended(problem, letter, q, (wanted[0], wanted[1]), given)[0]

    names = [*layer_tensors(0), "k_cache", "v_cache"]
    tensors = [*own, *caches]
    addresses = (ctypes.c_void_p * len(names))(*(None if t is None else t.data_ptr() for t in tensors))
    memory = torch.full((blocks * block_bytes + 128,), 0x7F, dtype=torch.uint8)  # NaN in all formats
    start = -memory.data_ptr() % 128
    workspace = torch.zeros(1 << 22, dtype=torch.uint8)
    out = torch.zeros(len(out_wanted), dtype=dtype)
    inv_freq = given["full_inv_freq" if is_full else "inv_freq"]

    def at(tensor: torch.Tensor, offset: int = 0) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr() + offset)

    library.set_grid(blocks, 1, blocks)
    library.run(
        blocks, 32 * (warps + 1), 0, at(memory, start), block_bytes, at(workspace), at(raw), raw.shape[1] // 2,
        addresses, at(table), at(inv_freq), ctypes.c_int64(int(given["positions"][0])), int(given["kv_lens"][0]),
        ctypes.c_int64(-1 if slots is None else int(slots[0])), int(is_full), int(letter.islower()),
        ctypes.c_float(given["eps"]),
    )  # fmt: skip
    library.set_grid(1, 1, 1)
    library.run_dump(1, 32, 0, at(out), at(workspace), len(out) // 2)
    unit = 2.0**-8 if problem.dtype == "bf16" else 2.0**-11
    torch.testing.assert_close(out.float(), out_wanted, rtol=4 * unit, atol=8 * unit)
    for name, got, want in zip(("k_caches", "v_caches"), caches, wanted, strict=True):
        got, want = values(problem, name, got), values(problem, name, want)
        same = (got == want) | (got.isnan() & want.isnan())
        assert float(same.float().mean()) > 0.999, name
