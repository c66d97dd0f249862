"""Shapes of attn_decode: edges first. What a kernel must not read holds NaN, or faults if it is followed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.attn_decode.op import attn_decode
from kerngen.templates.attn_decode.spec import Problem
from kerngen.templates.call import Op
from kerngen.templates.kernel import Case

NO_PAGE = 0x3FFFFFFF  # a table entry that faults if it is followed
_LOGIT_CAP = 2.0  # low enough to bend most scores of the cases


def _case(name: str, kv_lens: list[int], seed: int = 0, **fields: Any) -> Case:
    problem = Problem(batch=len(kv_lens), kv_len=max(kv_lens), **fields)
    return Case(name, problem, seed, {"kv_lens": kv_lens})


def _edges() -> list[Case]:
    cases = []
    for seed, (head_dim, dtype, page) in enumerate(
        (d, t, page) for d, page in ((128, 16), (256, 32), (512, 64)) for t in ("fp16", "bf16")
    ):
        tag = f"d{head_dim}-{dtype}"
        two: dict[str, Any] = {"head_dim": head_dim, "num_q_heads": 4, "num_kv_heads": 2, "dtype": dtype}
        eight: dict[str, Any] = {"head_dim": head_dim, "num_q_heads": 8, "num_kv_heads": 1, "dtype": dtype}
        # 0, 1, around a page, around the window, and shorter than the queries
        around_page = [0, 1, page - 1, page, page + 1, 3 * page + 5]
        around_window = [39, 40, 41, 42, 43, 44, 0, 300]
        cases += [
            _case(f"{tag}-full", around_page, seed, page_size=page, **two),
            _case(f"{tag}-window40", around_window, seed + 10, page_size=page, window=40, **two),
            _case(f"{tag}-q4", [0, 1, 3, 4, 5, *around_page[2:]], seed + 20, page_size=page, q_len=4, **eight),
            _case(f"{tag}-q4-window40", [2, *around_window], seed + 30, page_size=16, window=40, q_len=4, **two),
        ]
    return cases


def _groups() -> list[Case]:
    """Every group size and the ends of q_len: one tile of rows, several, and several blocks of rows."""
    cases = []
    for head_dim in (128, 256, 512):
        for group, q_len in ((1, 1), (1, 8), (2, 8), (4, 3), (8, 8), (16, 1), (16, 5)):
            shape = {"num_q_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim, "q_len": q_len}
            cases.append(_case(f"d{head_dim}-group{group}-q{q_len}", [130, 7, 1000], 40, dtype="fp16", **shape))
    return cases


CASES: tuple[Case, ...] = (
    *_edges(),
    *_groups(),
    *(
        _case(f"d{d}-cap", [200, 33], 50, head_dim=d, num_q_heads=8, num_kv_heads=1, q_len=2, page_size=16,
              dtype="fp16", logit_cap=True)
        for d in (128, 256, 512)
    ),
    # Fewer tiles than splits in one row, many in another; the window's first tile in the middle of a page.
    _case("ragged-window1024", [1023, 1024, 1025, 5, 0, 4099], 60, head_dim=256, num_q_heads=8, num_kv_heads=4,
          window=1024, dtype="fp16", q_len=2),
    _case("ragged-d512", [3000, 0, 17, 1], 61, head_dim=512, num_q_heads=8, num_kv_heads=1, dtype="fp16"),
    # A block table of 44 KB: it must be read where it lies.
    _case("context-177k", [177000], 62, head_dim=128, num_q_heads=8, num_kv_heads=1, page_size=16, dtype="fp16"),
    _case("context-177k-window", [177000], 63, head_dim=256, num_q_heads=2, num_kv_heads=1, page_size=16, window=1024,
          dtype="fp16"),
)  # fmt: skip


def case_for(problem: Problem) -> Case:
    """`problem` as equally long sequences, for timing."""
    kv_lens = [problem.kv_len] * problem.batch
    return Case("tuning", problem, 0, {"kv_lens": kv_lens, "sm_scale": problem.head_dim**-0.5})


def inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Every argument by name; `out` is NaN.

    Scores have a standard deviation of 3: single keys carry weight, so that one key too many or too few shows
    (options may set sm_scale). Pages are scattered; only visible rows hold numbers, only their pages are in the table.
    """
    p = case.problem
    kv_lens = list(case.options["kv_lens"])
    dtype = torch.bfloat16 if p.dtype == "bf16" else torch.float16
    generator = torch.Generator(device).manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    seen = [(max(0, n - p.q_len - p.window + 1) if p.window else 0, n) for n in kv_lens]
    used = [range(first // p.page_size, -(-end // p.page_size)) for first, end in seen]
    num_pages = sum(map(len, used)) + 2
    max_pages = max(-(-n // p.page_size) for n in kv_lens) + 1
    order = torch.randperm(num_pages, generator=generator, device=device).int()
    table = torch.full((len(kv_lens), max_pages), NO_PAGE, dtype=torch.int32, device=device)
    k, v = (random(num_pages, p.num_kv_heads, p.page_size, p.head_dim) for _ in range(2))
    taken = 0
    for s, (pages, (first, end)) in enumerate(zip(used, seen, strict=True)):
        mine = order[taken : taken + len(pages)]
        taken += len(pages)
        table[s, pages.start : pages.stop] = mine
        if len(pages):
            for cache in (k, v):
                cache[mine[0].long(), :, : first - pages.start * p.page_size] = float("nan")
                cache[mine[-1].long(), :, end - (pages.stop - 1) * p.page_size :] = float("nan")
    for cache in (k, v):
        cache[order[taken:].long()] = float("nan")
    q = random(len(kv_lens) * p.q_len, p.num_q_heads, p.head_dim)
    return {
        "out": torch.full_like(q, float("nan")),
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "block_table": table,
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "sm_scale": case.options.get("sm_scale", 3 * p.head_dim**-0.5),
        "logit_cap": _LOGIT_CAP if p.logit_cap else 0.0,
        "batch": len(kv_lens),
        "max_pages": max_pages,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    p = case.problem
    names = ("q", "k_cache", "v_cache", "block_table", "kv_lens", "sm_scale", "logit_cap")
    given = {"q_len": p.q_len, "window": p.window, "max_kv_len": p.kv_len}
    return attn_decode, {n: inputs[n] for n in names} | given
