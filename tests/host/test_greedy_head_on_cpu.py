"""greedy_head's own source over packed tables, on a thread of the host: every format, of few rows left and of all."""

from __future__ import annotations

import ctypes
import re
from math import prod
from typing import Any

import kernel_on_cpu
import pytest
import torch

from kerngen.arch import Target, find_arch
from kerngen.compiler.render import render
from kerngen.templates import find_kernel
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, Draw
from kerngen.templates.common.screen.screen import head_screen, packed_head_screen
from kerngen.templates.common.w4.pack import dequantize, drawn_table, eighths_table, unpack
from kerngen.templates.common.w4.tiling import STRIP
from kerngen.templates.greedy_head.spec import Config, Problem
from kerngen.timing.measure import compare

pytestmark = pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")

KERNEL, TARGET = find_kernel("greedy_head"), Target.of(find_arch("sm90"))
# Two blocks of greedy_choose share a token, and the last one of greedy_screen has strips for some of its warps; K is no
# whole number of tiles of codes, or of those that are under way together.
RUNS = {
    "int8 in 16s": (Problem(608, 96, "bf16", 1, 6, "int8", 16), Config(4, 1, 4, 2, choose_warps=4)),
    "int8 in 32s": (Problem(608, 288, "fp16", 3, 7, "int8", 32), Config(4, 1, 4, 4, choose_warps=4, first_bits=6)),
    "int8 with minima": (Problem(608, 96, "fp16", 2, 4, "int8_min", 16), Config(4, 2, 4, 1, choose_warps=4)),
    "int4": (Problem(608, 160, "bf16", 5, 8, "int4", 32), Config(4, 1, 4, 2, choose_warps=4)),
    "int4 with minima": (Problem(608, 320, "bf16", 2, 4, "int4_min", 64), Config(4, 1, 4, 3, choose_warps=4)),
}
# Blocks run one after the other, so an array that one shares may be static.
_ON_CPU = r"""
#include <cstdint>
static char dynamic_shared[1 << 16] __attribute__((aligned(16)));
template <typename T> static T __ldg(const T* p) { return *p; }
template <typename T> static T __ldcg(const T* p) { return *p; }
template <typename T, typename U> static T atomicExch(T* p, U x) { const T old = *p; *p = x; return old; }
static int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += int8_t(a >> i) * int8_t(b >> i);
    return sum;
}
static struct { unsigned a[32][4], b[32][2]; } operands[32];  // of each warp
"""
_MMA = r"""{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    auto& warp = operands[threadIdx.x / 32];
    for (int i = 0; i < 4; i++) warp.a[lane][i] = a[i];
    warp.b[lane][0] = b[0], warp.b[lane][1] = b[1];
    warp_here().all.arrive_and_wait();
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 8; k++)
            c[e] = __dp4a(warp.a[g * 4 + k % 4][e / 2 + k / 4 * 2], warp.b[(2 * t + e % 2) * 4 + k % 4][k / 4], c[e]);
    warp_here().all.arrive_and_wait();
}"""
_BODIES = {"load_stream_if": "if (valid) v = *(const uint4*)p;", "arrive": "return (*counter)++;"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """All RUNS' sources behind the headers that they share, which take longest to compile."""
    headers: set[str] = set()
    own, entries = [], []
    for i, (problem, config) in enumerate(RUNS.values()):
        source = str(render(KERNEL, problem, config, TARGET))
        source = re.sub(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];",
                        r"\1* const \2 = reinterpret_cast<\1*>(dynamic_shared);", source)  # fmt: skip
        at = source.index("constexpr int VOCAB")
        headers.add(source[:at])
        named = re.sub(r"\b(greedy_(?:screen|choose))\(", rf"\1_{i}(", source[at:].replace("__shared__", "static"))
        own.append(f"namespace run_{i} {{\n{named}\n}}\nusing namespace run_{i};\n")
        entries += [f"greedy_screen_{i}", f"greedy_choose_{i}"]
    (shared,) = headers
    at = shared.index(") {", shared.index("DEVICE void mma_s8s8(")) + 2
    shared = shared[:at] + _MMA + shared[kernel_on_cpu.matching(shared, at, "{}") :]
    text = _ON_CPU + shared + "".join(own)
    return kernel_on_cpu.on_cpu(text, entries[0], tmp_path_factory.mktemp("head"), entries, bodies=_BODIES)


def _inputs(problem: Problem) -> tuple[dict[str, Any], int]:
    """Of a table with each row twice, and with some three times; and the first token's best row, which is excluded."""
    p, dtype, draw = problem, TORCH_DTYPE[problem.dtype], Draw(problem.hidden, "cpu")
    once = p.vocab_size // STRIP // 2
    again = torch.arange(p.vocab_size // STRIP) % once
    table, scales = (t[again] for t in eighths_table(draw, p.vocab_size, p.hidden, p.table, p.group_size))
    x = draw.normal(p.num_tokens, p.hidden, dtype=p.dtype, std=4.0).clamp_(-16, 16).round_().div_(8)
    weight = dequantize(*unpack(table, scales), dtype)
    best = int((x[0].float() @ weight.float().T).to(dtype).argmax())
    codes, bounds = packed_head_screen(table, scales, dtype, [best], p.bits)
    return {
        "ids": torch.full((p.num_tokens,), -(2**62)), "x": x, "weight": table, "table_scales": scales, "codes": codes,
        "bounds": bounds, "num_tokens": p.num_tokens,
    }, best  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_tokens_are_those_of_the_reference(run: str, library: ctypes.CDLL) -> None:
    problem, config = RUNS[run]
    inputs, best = _inputs(problem)
    workspace = torch.zeros(KERNEL.workspace_bytes(problem, config, TARGET), dtype=torch.uint8)
    for widened in (0.0, 1e4):  # few rows are left to multiply, or all
        inputs["bounds"][:, 1::2] += widened
        for launch in KERNEL.launches(problem, config, TARGET):
            args = KERNEL.body(config, TARGET.arch).args[launch.entry]
            library.set_grid(*launch.grid[:2], 1)
            enter = getattr(library, f"run_{launch.entry}_{list(RUNS).index(run)}")
            enter(prod(launch.grid), launch.block[0], 0,
                  *kernel_on_cpu.arguments_of(args, inputs | {"workspace": workspace}))  # fmt: skip
        expected = KERNEL.reference.expected(problem, inputs)
        result = compare(KERNEL, KERNEL.cases.case_for(problem, kind=run), inputs, expected)
        assert result.ok, result.message
        assert inputs["ids"][0] == best + problem.vocab_size // STRIP // 2 * STRIP, "the next of the same rows"
        inputs["ids"].fill_(-1)


@pytest.mark.parametrize("run", RUNS)
def test_a_packed_tables_screen_is_of_the_values_that_are_multiplied(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to the dtype, whose bounds they are, also where a part of it begins within a strip."""
    p, _ = RUNS[run]
    table, scales = drawn_table(Draw(0, "cpu"), 96, p.hidden, p.table, p.group_size)
    weight = dequantize(*unpack(table, scales), TORCH_DTYPE[p.dtype])
    codes, bounds = head_screen(weight, [70], p.bits)
    monkeypatch.setattr("kerngen.templates.common.screen.screen._AT_ONCE", 1)
    made = packed_head_screen(table, scales, weight.dtype, [70], p.bits)
    assert torch.equal(made[0], codes)
    assert torch.equal(made[1].nan_to_num(), bounds.nan_to_num())
