"""Shapes that tests, bench and tuner share: every edge of M, N, K and group first, then the model's own."""

from __future__ import annotations

from typing import Any

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.common.w4.pack import drawn, pack
from kerngen.templates.kernel import Case, asking
from kerngen.templates.w4a16_gemm.op import w4a16_gated, w4a16_gemm
from kerngen.templates.w4a16_gemm.spec import Problem


def _case(n: int, k: int, group: int, dtype: str, m: int, gated: bool = False, row_invariant: bool = False,
          weights: str = "int4", fp16_scales: bool = False, activation: str = "gelu_tanh") -> Case:  # fmt: skip
    name = f"{n}x{k}_g{group}_{dtype}_m{m}" + ("_gated" if gated else "") + ("_invariant" if row_invariant else "")
    name += (f"_{weights}" if weights != "int4" else "") + ("_fp16_scales" if fp16_scales else "")
    name += f"_{activation}" if activation != "gelu_tanh" else ""
    problem = Problem(n, k, group, dtype, m, gated, row_invariant, weights, fp16_scales, activation)
    return Case(name, problem, seed=n + k + m)


def _of(weights: str, group: int, dtype: str, *tokens: int, n: int = 320, k: int = 384, **flags: Any) -> list[Case]:
    """Cases of a format of W."""
    return [_case(n, k, group, dtype, m, weights=weights, **flags) for m in tokens]


_TOKENS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200)
CASES = (
    *(_case(256, 384, 32, "fp16", m) for m in _TOKENS),
    *(_case(256, 384, 32, "bf16", m) for m in _TOKENS),
    *(_case(192, 256, 64, dtype, m) for dtype in ("fp16", "bf16") for m in (1, 9, 65)),
    *(_case(320, 384, 128, dtype, m) for dtype in ("fp16", "bf16") for m in (1, 33, 129)),
    *(_case(128, 128, g, "fp16", m) for g in (32, 64, 128) for m in (1, 70)),
    # N and K that no tile divides: 704 = 11 x 64, 2112 = 33 x 64, 96 = 3 x 32, and a single strip
    *(_case(32, 32, 32, dtype, m) for dtype in ("fp16", "bf16") for m in (1, 3)),
    *(_case(96, 96, 32, "fp16", m) for m in (5, 66)),
    *(_case(2816, 704, 32, dtype, m) for dtype in ("fp16", "bf16") for m in (1, 40, 100)),
    *(_case(704, 2112, 64, "fp16", m) for m in (1, 16, 260)),
    *(_case(1056, 2816, 128, "bf16", m) for m in (4, 64, 500)),
    # long K on few tiles: every tile is shared by many blocks
    *(_case(64, 21504, 32, dtype, m) for dtype in ("fp16", "bf16") for m in (1, 24)),
    # gate and up: whole tiles and shared ones, strips that no tile divides
    *(_case(512, 384, 32, dtype, m, True) for dtype in ("fp16", "bf16") for m in (1, 9, 33, 130)),
    *(_case(96, 1536, 64, dtype, m, True) for dtype in ("fp16", "bf16") for m in (3, 70)),
    *(_case(512, 384, 32, d, m, True, activation="silu") for d in ("fp16", "bf16") for m in (1, 8, 16, 33, 130)),
    # tokens in several tiles, none of them shared
    *(_case(704, 2112, 64, dtype, 40, row_invariant=True) for dtype in ("fp16", "bf16")),
    *(_case(704, 2112, 64, dtype, 260, True, row_invariant=True) for dtype in ("fp16", "bf16")),
    # int8 and minima: each body, groups shorter than a tile, of a tile, of several, of a row; fp16 scales beside bf16
    *(c for d in ("fp16", "bf16") for c in _of("int8", 32, d, 1, 2, 8, 9, 64, 129)),
    *(c for d in ("fp16", "bf16") for c in _of("int8", 16, d, 1, 8, 33, 200)),
    *(c for d in ("fp16", "bf16") for c in _of("int8", 128, d, 4, 65, n=704)),
    *(c for d in ("fp16", "bf16") for c in _of("int8", 2112, d, 1, 16, 130, n=96, k=2112)),
    *(c for d in ("fp16", "bf16") for c in _of("int8", 32, d, 1, 70, n=32, k=32)),
    *(c for d in ("fp16", "bf16") for c in _of("int8", 32, d, 1, 17, 130, gated=True)),
    *_of("int8", 64, "bf16", 40, 260, n=704, k=2112, row_invariant=True),
    *(c for d in ("fp16", "bf16") for c in _of("int4_min", 32, d, 1, 2, 8, 9, 64, 129)),
    *(c for d in ("fp16", "bf16") for c in _of("int4_min", 128, d, 3, 40, n=704, gated=True)),
    *_of("int4_min", 96, "fp16", 1, 12, 100, n=96, k=96),
    *(c for d in ("fp16", "bf16") for c in _of("int8_min", 32, d, 1, 8, 16, 129)),
    *(c for d in ("fp16", "bf16") for c in _of("int8_min", 16, d, 5, 48, gated=True)),
    *(c for w in ("int4", "int4_min", "int8", "int8_min") for c in _of(w, 32, "bf16", 1, 8, 20, 150, fp16_scales=True)),
    *_of("int8", 16, "bf16", 4, 100, fp16_scales=True),
    # long K on few tiles
    *(c for w in ("int8", "int4_min") for c in _of(w, 32, "bf16", 1, 24, n=64, k=21504)),
)


def inputs(case: Case, device: str) -> dict[str, Any]:
    """Every argument but the workspace. W has a standard deviation of about K ** -0.5, x of 1; out is NaN.

    out: [M, N], or [M, N / 2] where gated. x: [M, K]. w_packed, scales: see pack.py.
    """
    p = case.problem
    draw = Draw(case.seed, device)
    of_scales = "fp16" if p.fp16_scales else p.dtype
    w_packed, scales = pack(*drawn(draw, p.n, p.k, p.group_size, of_scales, p.weights))
    return {
        "out": poisoned(p.num_tokens, p.n // 2 if p.gated else p.n, dtype=p.dtype, device=device),
        "x": draw.normal(p.num_tokens, p.k, dtype=p.dtype),
        "w_packed": w_packed,
        "scales": scales,
        "num_tokens": p.num_tokens,
    }


def case_for(problem: Problem) -> Case:
    p = problem
    return _case(
        p.n, p.k, p.group_size, p.dtype, p.num_tokens, p.gated, p.row_invariant, p.weights, p.fp16_scales, p.activation
    )


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(w4a16_gated if case.problem.gated else w4a16_gemm, case, inputs)
