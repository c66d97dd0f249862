"""A kernel's rendered text as a C++ library: each CUDA thread has a stack of its own, and PTX is what it means there.

For kernels whose blocks or ranks wait for each other: what they do to memory, step by step and in any order, is seen
without a GPU. It knows the instructions of exchange_norm, exchange_best, w4a16_norm's norm, kv_write, qkv_norm_rope,
qkv_norm_rope_2d, check_pages, key_means and tile_lists, in bf16 and fp32, and what of fp16 a cache with codes or a norm
needs, and with `with_tensor_cores` mma.sync and ldmatrix; those of decode_layers' attention, of greedy_head and of
W4A16's products are beside their tests, and other inline PTX is refused where it runs. It says nothing of times, nor of
what a GPU's weaker memory order allows.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from kerngen.arch import Target
from kerngen.compiler.render import render
from kerngen.templates import Kernel
from kerngen.templates.kernel import Arg

CTYPES: Mapping[str, Any] = {
    "ptr": ctypes.c_void_p, "i32": ctypes.c_int, "i64": ctypes.c_int64, "f32": ctypes.c_float,
}  # fmt: skip
COMPILER = shutil.which("g++") or shutil.which("clang++")
_OPTIONS = "-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC", "-pthread"
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends

# What inline PTX does, by function. Words are read and written one by one, as `relaxed` allows.
_BODIES = {
    "from_float": "uint32_t u = __builtin_bit_cast(uint32_t, f);"
    " return f != f ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);",
    "fma2": "uint32_t r = 0; for (int s = 0; s < 32; s += 16) r |= uint32_t(from_float(fmaf(to_float(a >> s),"
    " to_float(b >> s), to_float(c >> s)))) << s; return r;",
    "pack": "return uint32_t(from_float(lo)) | uint32_t(from_float(hi)) << 16;",
    "ll_load": "return *(const volatile uint32_t*)p;",
    "peer_load": "return *(const volatile uint32_t*)p;",
    "peer_store4": "volatile uint32_t* q = (volatile uint32_t*)p; q[3] = words.w; q[1] = words.y; pass_on();"
    " q[0] = words.x; q[2] = words.z;",
    "peer_load4_if": "if (!wanted) return; pause_once(); const volatile uint32_t* q = (const volatile uint32_t*)p;"
    " v = {q[0], q[1], q[2], q[3]}; if (!ll_all_valid(v)) pass_on();",
    "ll_load4_if": "if (!wanted) return; pause_once(); const volatile uint32_t* q = (const volatile uint32_t*)p;"
    " v = {q[0], q[1], q[2], q[3]}; if (!v.x || !v.y || !v.z || !v.w) pass_on();",
    "load_l2": "return *p;",
    "exp2_fast": "return exp2f(x);",
    "reciprocal": "return 1.0f / x;",
    "load16": "return *(const uint4*)p;",
    "load16_constant": "return *(const uint4*)p;",
    "load_or_zero": "return valid ? *(const uint4*)p : uint4{};",
    "load_stream_or_zero": "return valid ? *(const uint4*)p : uint4{};",
    "clamp2": "using H = Half<BF16>; uint32_t r = 0; for (int s = 0; s < 32; s += 16) {"
    " const float f = H::to_float(x >> s), low = H::to_float(lowest >> s), high = H::to_float(highest >> s);"
    " r |= uint32_t(H::from_float(f < low ? low : f > high ? high : f)) << s; } return r;",
    "warp_max_u32": "Warp& w = warp_here(); w.word[threadIdx.x % 32] = x; w.all.arrive_and_wait();"
    " for (unsigned other : w.word) x = other > x ? other : x; w.all.arrive_and_wait(); return x;",
}
# Inline PTX that is left out: launches are one after the other here, the host's memory needs no fence, and where a copy
# has a body that is done at once.
_LEFT_OUT = ("griddepcontrol.", "fence.", "prefetch.", "createpolicy.", "cp.async.commit_group", "cp.async.wait_group")
_HALF = r"""
template <> struct Half<false> {
    static float to_float(uint16_t h) { return float(__builtin_bit_cast(_Float16, h)); }
    static uint16_t from_float(float f) { return __builtin_bit_cast(uint16_t, _Float16(f)); }
    static uint32_t pack(float lo, float hi) { return uint32_t(from_float(lo)) | uint32_t(from_float(hi)) << 16; }
    static float2 unpack(uint32_t r) { return {to_float(uint16_t(r)), to_float(uint16_t(r >> 16))}; }
    static uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
        return pack(fmaf(unpack(a).x, unpack(b).x, unpack(c).x), fmaf(unpack(a).y, unpack(b).y, unpack(c).y));
    }
    static uint32_t mul2(uint32_t a, uint32_t b) {
        return pack(unpack(a).x * unpack(b).x, unpack(a).y * unpack(b).y);
    }
    static uint32_t add2(uint32_t a, uint32_t b) {
        return pack(unpack(a).x + unpack(b).x, unpack(a).y + unpack(b).y);
    }
    static uint32_t sub2(uint32_t a, uint32_t b) {
        return pack(unpack(a).x - unpack(b).x, unpack(a).y - unpack(b).y);
    }
};
"""
_HEADERS = """
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>
#include <functional>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>
#include <unistd.h>
"""
_HOST = r"""
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
using std::min, std::max;
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned u) { return __builtin_bit_cast(float, u); }
inline unsigned __float_as_uint(float f) { return __builtin_bit_cast(unsigned, f); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <typename T> T atomicAdd(T* p, T x) { return __atomic_fetch_add(p, x, __ATOMIC_RELAXED); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
template <typename T> T atomicMin(T* p, T x) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (x < old && !__atomic_compare_exchange_n(p, &old, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
template <typename T> T atomicMax(T* p, T x) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (x > old && !__atomic_compare_exchange_n(p, &old, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
inline float __fdiv_rn(float x, float y) { return x / y; }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned from) {
    const unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) r |= unsigned(both >> (from >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return r;
}
inline unsigned __cvta_generic_to_shared(const void*) { return 0; }
#ifdef FIBERS
static void pass_on();  // to the other threads
struct Barrier {
    const int count; int here = 0; unsigned times = 0;
    explicit Barrier(int count) : count(count) {}
    void arrive_and_wait() {
        const unsigned before = times;
        if (++here == count) here = 0, ++times;
        while (times == before) pass_on();
    }
};
#else
static void pass_on() { sched_yield(); }
typedef std::barrier<> Barrier;
#endif
struct Eight : Barrier { Eight() : Barrier(8) {} };
struct Warp { Barrier all{32}; Eight eight[4]; unsigned word[32]; bool vote[32]; };
struct Block {
    explicit Block(int threads) : all(threads), warps(threads / 32), shared(1 << 15) {}
    Barrier all; std::vector<Warp> warps; std::vector<char> shared; int pause_us = 0;
};
// The first inline PTX that ran and that means nothing here: run() returns it, which is an error.
static std::atomic<const char*> unknown_ptx;
static void ptx_without_stand_in(const char* text) {
    const char* none = nullptr;
    unknown_ptx.compare_exchange_strong(none, text);
}
struct Index { unsigned x, y, z; };
// Of a grid of several rows: run() counts its blocks through all of them. Blocks run `at_once` at a time.
static unsigned grid_x, grid_y, at_once = ~0u;
extern "C" void set_grid(unsigned x, unsigned y, unsigned most) { grid_x = x, grid_y = y, at_once = most; }
static thread_local Index threadIdx, blockIdx, gridDim;
static thread_local Block* block_here;
// A launch that is late before it first polls, so that other ranks run ahead of it.
static void pause_once() {
    static thread_local bool has_paused = false;
    if (!has_paused && block_here->pause_us) usleep(block_here->pause_us);
    has_paused = true;
}
static Warp& warp_here() { return block_here->warps[threadIdx.x / 32]; }
static void __syncthreads() { block_here->all.arrive_and_wait(); }
// Of a whole warp, or of eight neighbours that are there without the others.
template <typename T> static T __shfl_xor_sync(unsigned lanes, T x, int mask) {
    Warp& w = warp_here();
    Barrier& met = lanes == 0xffffffffu ? w.all : (Barrier&)w.eight[threadIdx.x % 32 / 8];
    w.word[threadIdx.x % 32] = __builtin_bit_cast(unsigned, x);
    met.arrive_and_wait();
    const unsigned found = w.word[(threadIdx.x % 32) ^ mask];
    met.arrive_and_wait();
    return __builtin_bit_cast(T, found);
}
template <typename T> static T __shfl_sync(unsigned lanes, T x, int from) {
    if constexpr (sizeof(T) == 8) {
        const unsigned long long bits = __builtin_bit_cast(unsigned long long, x);
        const unsigned low = __shfl_sync(lanes, unsigned(bits), from);
        const unsigned high = __shfl_sync(lanes, unsigned(bits >> 32), from);
        return __builtin_bit_cast(T, (unsigned long long)high << 32 | low);
    } else {
        Warp& w = warp_here();
        w.word[threadIdx.x % 32] = __builtin_bit_cast(unsigned, x);
        w.all.arrive_and_wait();
        const unsigned found = w.word[from % 32];
        w.all.arrive_and_wait();
        return __builtin_bit_cast(T, found);
    }
}
static int __shfl_up_sync(unsigned lanes, int x, int lower) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(lanes, x, lane < lower ? lane : lane - lower);
}
static unsigned __match_any_sync(unsigned, int x) {
    Warp& w = warp_here();
    w.word[threadIdx.x % 32] = x;
    w.all.arrive_and_wait();
    unsigned same = 0;
    for (int i = 0; i < 32; i++) same |= unsigned(w.word[i] == unsigned(x)) << i;
    w.all.arrive_and_wait();
    return same;
}
static bool __any_sync(unsigned, bool mine) {
    Warp& w = warp_here();
    w.vote[threadIdx.x % 32] = mine;
    w.all.arrive_and_wait();
    bool any = false;
    for (bool v : w.vote) any |= v;
    w.all.arrive_and_wait();
    return any;
}
static bool __all_sync(unsigned lanes, bool mine) { return !__any_sync(lanes, !mine); }
static unsigned __ballot_sync(unsigned, bool mine) {
    Warp& w = warp_here();
    w.vote[threadIdx.x % 32] = mine;
    w.all.arrive_and_wait();
    unsigned found = 0;
    for (int i = 0; i < 32; i++) found |= unsigned(w.vote[i]) << i;
    w.all.arrive_and_wait();
    return found;
}
#ifdef FIBERS
// Each CUDA thread has a stack of its own on one thread of the host, and goes on where another waits: many times faster
// where threads wait for each other often. Blocks run one after the other where set_grid() says nothing else.
constexpr size_t STACK = 1 << 18;
struct Fiber {
    jmp_buf here; ucontext_t first; Block* block; Index thread, in_grid;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool has_begun = false, has_ended = false;
};
static jmp_buf scheduler;
static std::vector<Fiber> fibers;
static Fiber* fiber;
static std::function<void()> run_fiber;
static void pass_on() {
    if (!_setjmp(fiber->here)) _longjmp(scheduler, 1);
}
static void fiber_main() {
    run_fiber();
    fiber->has_ended = true;
    _longjmp(scheduler, 1);
}
static void step_fiber() {
    threadIdx = fiber->thread, blockIdx = fiber->in_grid, block_here = fiber->block;
    if (_setjmp(scheduler)) return;
    if (fiber->has_begun) _longjmp(fiber->here, 1);
    fiber->has_begun = true;
    setcontext(&fiber->first);
}
template <typename Run> static void grid_of(int blocks, int threads, int, Run run) {
    const unsigned gx = grid_x ? grid_x : blocks, gy = grid_y ? grid_y : 1;
    const int together = int(std::min<unsigned>(blocks, at_once == ~0u ? 1 : at_once));
    gridDim = {gx, gy, blocks / gx / gy};
    run_fiber = run;
    if (fibers.size() < size_t(together) * threads) fibers = std::vector<Fiber>(together * threads);
    for (int first = 0; first < blocks; first += together) {
        std::vector<std::unique_ptr<Block>> all;
        const int count = std::min(together, blocks - first) * threads;
        for (int i = 0; i < count; i++) {
            const int b = first + i / threads;
            if (i % threads == 0) all.push_back(std::make_unique<Block>(threads));
            Fiber& f = fibers[i];
            f.block = all.back().get(), f.thread = {unsigned(i % threads)};
            f.in_grid = {b % gx, b / gx % gy, b / gx / gy};
            getcontext(&f.first);
            f.first.uc_stack.ss_sp = f.stack.get(), f.first.uc_stack.ss_size = STACK;
            makecontext(&f.first, fiber_main, 0);
            f.has_begun = f.has_ended = false;
        }
        for (int left = count; left;)
            for (int i = 0; i < count; i++) {
                fiber = &fibers[i];
                if (fiber->has_ended) continue;
                step_fiber();
                left -= fiber->has_ended;
            }
    }
}
#else
template <typename Run> static void grid_of(int blocks, int threads, int pause_us, Run run) {
    std::vector<std::unique_ptr<Block>> all;
    std::vector<std::thread> running;
    const unsigned gx = grid_x ? grid_x : blocks, gy = grid_y ? grid_y : 1;
    for (int b = 0; b < blocks; b++) {
        if (b && b % at_once == 0) {
            for (auto& t : running) t.join();
            running.clear();
        }
        Block* block = all.emplace_back(std::make_unique<Block>(threads)).get();
        block->pause_us = pause_us;
        for (int t = 0; t < threads; t++)
            running.emplace_back([=] {
                threadIdx = {unsigned(t)}, blockIdx = {b % gx, b / gx % gy, b / gx / gy};
                gridDim = {gx, gy, blocks / gx / gy}, block_here = block;
                run();
            });
    }
    for (auto& t : running) t.join();
}
#endif
"""

_TENSOR_CORES = r"""
// What lanes of a warp give each other in tensor-core instructions.
struct Lanes { unsigned a[32][4], b[32][2]; const char* row[32]; };
static std::mutex guard_of_lanes;
static void __syncwarp() { warp_here().all.arrive_and_wait(); }
static Lanes& lanes_here() {
    static std::map<Warp*, Lanes> all;
    std::lock_guard lock(guard_of_lanes);
    return all[&warp_here()];
}
template <class Halves> static void mma_on_cpu(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Lanes& l = lanes_here();
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) l.a[lane][i] = a[i];
    l.b[lane][0] = b0, l.b[lane][1] = b1;
    __syncwarp();
    for (int e = 0; e < 4; e++) {
        const int high = e / 2, column = 2 * t + e % 2;
        double sum = c[e];
        for (int k = 0; k < 16; k++) {
            const unsigned x = l.a[g * 4 + k % 8 / 2][high + k / 8 * 2] >> k % 2 * 16;
            const unsigned y = l.b[column * 4 + k % 8 / 2][k / 8] >> k % 2 * 16;
            sum += double(Halves::to_float(uint16_t(x))) * Halves::to_float(uint16_t(y));
        }
        c[e] = float(sum);
    }
    __syncwarp();
}
static void ldmatrix_on_cpu(unsigned (&r)[4], const void* row, bool turns) {
    Lanes& l = lanes_here();
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    l.row[lane] = (const char*)row;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const auto at = [&](int y, int x) { uint16_t v; memcpy(&v, l.row[i * 8 + y] + x * 2, 2); return unsigned(v); };
        r[i] = turns ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
    }
    __syncwarp();
}
// m8n8k4 of a quad-pair: lanes 4 q .. 4 q + 3 and those 16 further. B_IS_ROWS: a lane has a row of B, else a column.
template <bool B_IS_ROWS>
static void mma_884_on_cpu(float (&c)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    typedef Half<false> H;
    Lanes& l = lanes_here();
    const int lane = threadIdx.x % 32, first = lane / 4 % 4 * 4, high = lane / 16;
    const auto of = [&](int row) { return first + row % 4 + row / 4 * 16; };
    l.a[lane][0] = a0, l.a[lane][1] = a1, l.b[lane][0] = b0, l.b[lane][1] = b1;
    __syncwarp();
    for (int i = 0; i < 8; i++) {
        const int row = (lane & 1) + (i & 2) + 4 * high, column = (lane & 2) + (i & 1) + (i & 4);
        double sum = c[i];
        for (int k = 0; k < 4; k++) {
            const int from = B_IS_ROWS ? of(k + column / 4 * 4) : of(column), at = B_IS_ROWS ? column % 4 : k;
            sum += double(H::to_float(uint16_t(l.a[of(row)][k / 2] >> k % 2 * 16))) *
                   H::to_float(uint16_t(l.b[from][at / 2] >> at % 2 * 16));
        }
        c[i] = float(sum);
    }
    __syncwarp();
}
"""


def with_tensor_cores(source: str) -> str:
    """A rendered text whose mma.sync and ldmatrix are what they mean, sums in double."""
    half = source.index("template <> struct Half<true> {")
    end = matching(source, source.index("{", half), "{}") + 1
    source = source[:end] + _TENSOR_CORES + source[end:]
    for name, call in (
        ("mma_16816", "mma_on_cpu<Half<BF16>>(c, a, b0, b1);"),
        ("mma_884", "mma_884_on_cpu<false>(c, a0, a1, b0, b1);"),
        ("mma_884_row", "mma_884_on_cpu<true>(c, a0, a1, b0, b1);"),
        ("ldmatrix4", "ldmatrix_on_cpu(r, row, false);"),
        ("ldmatrix4_trans", "ldmatrix_on_cpu(r, row, true);"),
    ):
        at = source.index(") {", source.index(f"DEVICE void {name}(")) + 2
        source = source[:at] + f"{{ {call} }}" + source[matching(source, at, "{}") :]
    return source


def matching(text: str, start: int, pair: str) -> int:
    """Behind the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if not depth:
            return at + 1
    raise ValueError("a bracket is not closed")


def _launching(source: str, entry: str, name: str) -> str:
    arguments = re.search(rf"\b{entry}\(([^)]*)\)", source)
    assert arguments, entry
    names = ", ".join(re.findall(r"(\w+)(?:,|$)", arguments[1]))
    return (
        f'extern "C" const char* {name}(int blocks, int threads, int pause_us, {arguments[1]}) '
        f"{{ grid_of(blocks, threads, pause_us, [=] {{ ::{entry}({names}); }});"
        " return unknown_ptx.exchange(nullptr); }"
    )


def on_cpu(
    source: str, entry: str, folder: Path, others: Sequence[str] = (), bodies: Mapping[str, str] | None = None,
    *, threads: bool = False,
) -> ctypes.CDLL:  # fmt: skip
    """Compiles `source` with `run(blocks, threads, pause_us, ...)`, which launches `entry` with the arguments behind
    them and returns when all its threads have ended. pause_us: that each thread waits before it first polls. others:
    entries that `run_ENTRY` launches. bodies: what more functions with inline PTX do. threads: CUDA threads
    are threads of the host, for blocks or ranks that wait for each other in any order; else all run on one thread of
    the host, blocks one after the other, or as many together as set_grid() says, which is many times faster. A launch
    that comes to inline PTX without a body raises NotImplementedError.
    """
    half = source.find("template <> struct Half<false> {")
    source = source[:half] + _HALF + source[matching(source, source.index("{", half), "{}") + 1 :]
    for name, body in (_BODIES | dict(bodies or {})).items():
        if f" {name}(" not in source:
            continue
        found = list(re.finditer(rf"DEVICE \w+ {name}\([^)]*\) {{", source))
        assert found, name
        for at in reversed(found):
            if re.search(r"\bp\b", body) and not re.search(r"\bp\b", at[0]):
                continue  # a method of the same name, which hands on to the function
            source = source[: at.end()] + body + "}" + source[matching(source, at.end() - 1, "{}") :]
    while asm := re.search(r"\basm(?: volatile)?\s*\(", source):
        end = matching(source, asm.end() - 1, "()")
        source = source[: asm.start()] + _stand_in(source[asm.end() : end]) + source[end:]
    source = re.sub(r"__shared__ alignas\(16\) float scratch((?:\[[^;]*\])+);",
                    r"auto& scratch = *reinterpret_cast<float(*)\1>(block_here->shared.data());", source)  # fmt: skip
    source = re.sub(
        r"__shared__ (\w+) (\w+\[[^;,]*\]), (\w+\[[^;,]*\]);", r"__shared__ \1 \2; __shared__ \1 \3;", source
    )
    variables = re.findall(r"__shared__ (?:alignas\(\d+\) )?(\w+) (\w+)((?:\[[^;]*\])*);", source)
    for i, (of, name, sizes) in enumerate(variables):  # each with room of its own
        source = re.sub(rf"__shared__ (?:alignas\(\d+\) )?{of} {name}(?:\[[^;]*)?;",
                        f"auto& {name} = *reinterpret_cast<{of}(*){sizes}>(block_here->shared.data() + {i << 13});",
                        source)  # fmt: skip
    # The host's own headers have these.
    source = re.sub(r"typedef (?:unsigned |signed )?(?:char|short|int|long long) u?int\d+_t;", "", source)
    call = "\n".join(_launching(source, name, f"run_{name}" if i else "run") for i, name in enumerate((entry, *others)))
    (folder / "kernel.cpp").write_text(f"{_HOST}\n{source}\n{call}\n")
    assert COMPILER is not None
    options = [*_OPTIONS, *([] if threads else ["-DFIBERS"])]
    command = [COMPILER, *options, "-shared", "-include", f"{_headers(COMPILER, *options)}/host.hpp"]
    subprocess.run([*command, str(folder / "kernel.cpp"), "-o", str(folder / "kernel.so")], check=True)
    library = ctypes.CDLL(str(folder / "kernel.so"))
    for name in ("run", *(f"run_{other}" for other in others)):
        run = getattr(library, name)
        run.restype, run.errcheck = ctypes.c_char_p, _refuse_unknown
    return library


@cache
def _headers(compiler: str, *options: str) -> str:
    """A folder with the host's headers, compiled: they are half of what a kernel takes."""
    folder = tempfile.TemporaryDirectory(prefix="kerngen-on-cpu-")
    _FOLDERS.append(folder)
    header = Path(folder.name) / "host.hpp"
    header.write_text(_HEADERS)
    subprocess.run([compiler, *options, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)
    return folder.name


def _stand_in(asm: str) -> str:
    """What the text behind an asm's bracket becomes: nothing, or what refuses it where it runs."""
    literals = re.match(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', asm)
    text = asm if literals is None else "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literals[1]))
    if not text or text.startswith(_LEFT_OUT):  # an empty one keeps a compiler from moving something
        return "(void)0"
    return f'ptx_without_stand_in("{re.sub(r"[^ -!#-~]", " ", text)[:80]}")'.replace("\\", "/")


def _refuse_unknown(unknown: bytes | None, *_: Any) -> None:
    if unknown is not None:
        raise NotImplementedError(f"{unknown.decode()}: no body stands for this inline PTX (kernel_on_cpu.py)")


def arguments_of(args: Sequence[Arg], inputs: Mapping[str, Any]) -> list[Any]:
    """What an entry with these `args` is given of a case's inputs: tensors by their address."""
    given = [inputs[a.name] for a in args]
    return [CTYPES[a.kind](x.data_ptr() if isinstance(x, Tensor) else x) for a, x in zip(args, given, strict=True)]


def run_kernel(
    kernel: Kernel, problem: Any, config: Any, target: Target, inputs: Mapping[str, Any], folder: Path
) -> None:
    """Launch a kernel of one entry on a case's inputs."""
    library = on_cpu(str(render(kernel, problem, config, target)), kernel.name, folder)
    (launch,), (args,) = kernel.launches(problem, config, target), kernel.body(config, target.arch).args.values()
    args = [a for a in args if not a.only or getattr(problem, a.only)]
    library.run(launch.grid[0], launch.block[0], 0, *arguments_of(args, inputs))
