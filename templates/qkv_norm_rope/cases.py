"""Shapes that tests, bench and tuner share: edges first, then the models' own layers."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.attention.heads_torch import in_pages, inverse_frequencies
from kerngen.templates.common.attention.kv_formats_torch import in_format
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.kernel import Case, asking
from kerngen.templates.qkv_norm_rope.op import kv_norm_rope, q_norm_rope, qk_norm_rope, qkv_norm_rope
from kerngen.templates.qkv_norm_rope.spec import Problem

LAST_POSITION = 262143
SLIDING: dict[str, Any] = {"head_dim": 256, "num_rotated_pairs": 128}
DFLASH: dict[str, Any] = {"head_dim": 128, "num_rotated_pairs": 64}
FULL: dict[str, Any] = {"head_dim": 512, "num_rotated_pairs": 64}


def case_for(problem: Problem) -> Case:
    p = problem
    kind = "q-only" if p.q_only else "k=v" if p.k_eq_v else "qkv" if p.v_norm else "qk-norm"
    heads = f"{p.num_q_heads}-{p.num_kv_heads}" + (f"-of-{p.page_heads}" if p.page_heads else "")
    stored = "" if p.kv_format == "plain" else f"_{p.kv_format}"
    heads += f"-rows-of-{p.row_heads}" if p.row_heads else ""
    heads += f"-x{p.num_layers}" if p.num_layers else ""
    name = f"d{p.head_dim}_r{p.num_rotated_pairs}_h{heads}_{kind}_{p.dtype}{stored}_t{p.num_tokens}"
    return Case(name, p, p.head_dim + p.num_tokens)


def _cases(num_q_heads: int, num_kv_heads: int, *tokens: int, **fields: Any) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(num_q_heads, num_kv_heads, dtype=d, num_tokens=t, **fields))
        for d in ("bf16", "fp16")
        for t in tokens
    )


CASES = (
    *_cases(1, 1, 1, 3, head_dim=64, num_rotated_pairs=32, page_size=1),
    *_cases(3, 1, 1, 9, head_dim=64, num_rotated_pairs=0, page_size=16),  # nothing turns
    *_cases(5, 2, 7, head_dim=128, num_rotated_pairs=20, page_size=16),  # pairs that no vector boundary divides
    *_cases(8, 2, 1, 33, page_size=32, **SLIDING),
    *_cases(8, 1, 5, page_size=16, **FULL),
    *_cases(16, 2, 6, page_size=48, k_eq_v=True, **FULL),
    *_cases(
        8, 2, 33, page_size=32, page_heads=4, **SLIDING
    ),  # K and V in one tensor, side by side, or with one between
    *_cases(16, 2, 6, page_size=48, page_heads=5, k_eq_v=True, **FULL),
    *_cases(8, 2, 33, page_size=32, kv_format="int8", **SLIDING),
    *_cases(16, 2, 6, page_size=48, k_eq_v=True, kv_format="int8", **FULL),
    *_cases(5, 2, 7, head_dim=128, num_rotated_pairs=20, page_size=16, kv_format="int8"),
    *_cases(16, 2, 6, page_size=32, k_eq_v=True, kv_format="shared", **FULL),
    *_cases(16, 2, 6, page_size=32, k_eq_v=True, kv_format="shared_int8", **FULL),
    *_cases(16, 2, 6, page_size=48, kv_format="int4", **FULL),
    *_cases(5, 2, 7, head_dim=128, num_rotated_pairs=20, page_size=16, kv_format="int4"),
    *_cases(16, 2, 6, page_size=32, k_eq_v=True, kv_format="shared_int4", **FULL),
    *_cases(16, 2, 6, page_size=48, kv_format="int3", **FULL),
    *_cases(5, 2, 7, head_dim=128, num_rotated_pairs=20, page_size=16, kv_format="int3"),
    *_cases(16, 2, 6, page_size=32, k_eq_v=True, kv_format="shared_int3", **FULL),
    *_cases(16, 2, 6, page_size=48, k_eq_v=True, kv_format="fp8", **FULL),
    *_cases(5, 2, 7, head_dim=128, num_rotated_pairs=20, page_size=16, kv_format="fp8"),
    *_cases(32, 16, 1, 4, 130, **SLIDING),
    *_cases(32, 4, 1, 4, 130, k_eq_v=True, **FULL),
    *_cases(4, 0, 1, 17, q_only=True, **SLIDING),
    *_cases(32, 0, 3, q_only=True, **FULL),
    *_cases(3, 2, 1, 9, head_dim=64, num_rotated_pairs=32, page_size=16, v_norm=False),
    *_cases(0, 1, 7, head_dim=128, num_rotated_pairs=64, page_size=16, v_norm=False, row_heads=5),
    *_cases(5, 2, 7, head_dim=128, num_rotated_pairs=20, page_size=16, row_heads=12),
    *_cases(64, 8, 16, v_norm=False, **DFLASH),  # a block
    *_cases(0, 2, 7, page_size=16, v_norm=False, row_heads=9, kv_format="int8", **DFLASH),
    *_cases(4, 2, 7, page_size=16, v_norm=False, kv_format="int4", **DFLASH),
    *_cases(0, 2, 1, 7, page_size=16, v_norm=False, num_layers=3, **DFLASH),
    *_cases(0, 2, 7, page_size=16, v_norm=False, num_layers=3, kv_format="int8", **DFLASH),
    *_cases(0, 2, 7, page_size=16, v_norm=False, num_layers=2, kv_format="int4", **DFLASH),
    *_cases(0, 2, 7, page_size=16, v_norm=False, num_layers=2, kv_format="fp8", **DFLASH),
    *_cases(0, 8, 1, 16, 130, v_norm=False, num_layers=5, **DFLASH),  # a context's K and V of five layers
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. qkv normal, NaN behind what a row has of its own, weights about 1; positions hold 0 and the last
    one (262143).

    Slots are distinct rows all over caches with three pages more than needed; with three tokens or more the second
    token has slot -1. Outputs, and so all cache rows that no slot names, are NaN.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    t = p.num_tokens
    positions = draw.integers(0, LAST_POSITION + 1, t)
    positions[0] = 0
    positions[-1] = LAST_POSITION
    num_pages = -(-t // p.page_size) + 3
    slots = draw.permutation(num_pages * p.page_size)[:t]
    if t > 2:
        slots[1] = -1
    layers = max(p.num_layers, 1)
    cache_shape = layers * num_pages, p.num_kv_heads, p.page_size, p.head_dim

    k = v = None
    if not p.q_only:
        k, v = (poisoned(*cache_shape, dtype=p.dtype, device=device) for _ in range(2))
        k, v = in_format(*in_pages(k, v, p.page_heads, is_one=True), p.kv_format)

    width = layers * p.num_heads * p.head_dim
    beside = poisoned(t, max(p.row_heads * p.head_dim - width, 0), dtype=p.dtype, device=device)

    def weight(*rows: int) -> torch.Tensor:
        return draw.normal(*rows, p.head_dim, dtype=p.dtype, mean=1.0, std=0.25)

    return {
        "q": poisoned(t, p.num_q_heads, p.head_dim, dtype=p.dtype, device=device),
        "k_cache": k,
        "v_cache": v,
        "qkv": torch.cat((draw.normal(t, width, dtype=p.dtype, std=2.0), beside), dim=1),
        "q_weight": weight(),
        "k_weight": None if p.q_only else weight(p.num_layers) if p.num_layers else weight(),
        "inv_freq": inverse_frequencies(p.head_dim, p.num_rotated_pairs, device),
        "positions": positions,
        "slot_mapping": None if p.q_only else slots,
        "eps": 1e-6,
        "layer_entries": 0 if k is None else k.numel() // layers,
        "num_tokens": t,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]] | None:
    """The op that asks for this case, and its arguments. None for a cache with scales, which no library's op takes."""
    p: Problem = case.problem
    if p.kv_format != "plain":
        return None
    if p.num_layers:
        return asking(kv_norm_rope, case, inputs, kv_rows=inputs["qkv"])
    rows = inputs["qkv"][:, : p.num_heads * p.head_dim]
    if p.q_only:
        return asking(q_norm_rope, case, inputs, q_raw=rows)
    return asking(qkv_norm_rope if p.v_norm else qk_norm_rope, case, inputs, qkv=rows)
