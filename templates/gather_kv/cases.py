"""Sequences that begin, end and are whole with a chunk, with windows and without; some heads of a cache."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.attention.kv_formats_torch import in_format
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.gather_kv.spec import Problem
from kerngen.templates.kernel import Case

NO_PAGE = 0x3FFFFFFF  # a table entry that faults if it is followed
_Q_LENS, _KV_LENS = [200, 1, 0, 64, 17, 5, 130], [200, 300, 70, 128, 0, 5, 515]


def case_for(problem: Problem, name: str = "") -> Case:
    """All keys of equal sequences, of which the last chunk's queries see all."""
    p = problem
    kind = f"d{p.head_dim}_h{p.heads}-{p.num_kv_heads}_s{p.page_size}_{p.dtype}_{p.kv_format}_b{p.batch}"
    lens = [p.num_keys] * p.batch
    options = {"q_lens": [min(n, 512) for n in lens], "kv_lens": lens}
    return Case(name or f"{kind}_k{p.num_keys}", p, p.head_dim + p.num_keys, options)


def _case(name: str, window: int = 0, first_head: int = 0, **fields: Any) -> Case:
    size = fields.get("page_size", 64)
    keys = max(_KV_LENS) if not window else window + max(_Q_LENS) + size - 2
    problem = Problem(batch=len(_Q_LENS), num_keys=-(-keys // size) * size, **fields)
    options = {"q_lens": _Q_LENS, "kv_lens": _KV_LENS, "window": window, "first_head": first_head}
    return Case(name, problem, len(name), options)


def _cases() -> list[Case]:
    cases = []
    for dtype in ("fp16", "bf16"):
        for head_dim, size in ((128, 16), (256, 64), (512, 48)):
            shape: dict[str, Any] = {
                "head_dim": head_dim,
                "page_size": size,
                "num_kv_heads": 2,
                "heads": 2,
                "dtype": dtype,
            }
            tag = f"d{head_dim}-{dtype}-int8"
            cases += [_case(tag, **shape), _case(f"{tag}-window", 40, **shape)]
        three: dict[str, Any] = {"num_kv_heads": 3, "dtype": dtype}
        for kv_format in ("int8", "shared", "shared_int8", "int4", "shared_int4", "int3", "shared_int3", "fp8"):
            some = _case(f"d512-{dtype}-{kv_format}-1-of-3", 0, 1, heads=1, kv_format=kv_format, **three)
            cases += [some, _case(f"d512-{dtype}-{kv_format}-3", heads=3, kv_format=kv_format, **three)]
    return cases


CASES = (*_cases(), case_for(Problem(heads=4, num_keys=512)), case_for(Problem(heads=2, batch=3, num_keys=100)))


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. Pages are scattered; rows that nobody sees, and all outputs, are NaN."""
    p, draw, options = case.problem, Draw(case.seed, device), case.options
    q_lens, kv_lens, window = options["q_lens"], options["kv_lens"], options.get("window", 0)
    size = p.page_size
    seen = [(max(0, kv - q - window + 1) if window else 0, kv) for q, kv in zip(q_lens, kv_lens, strict=True)]
    used = [range(low // size, -(-high // size)) for low, high in seen]
    num_pages, max_pages = sum(map(len, used)) + 2, max(-(-n // size) for n in kv_lens) + 1
    order = draw.permutation(num_pages)
    table = torch.full((p.batch, max_pages), NO_PAGE, dtype=torch.int32, device=device)
    shape = (num_pages, p.num_kv_heads, size, p.head_dim)
    k, v = (poisoned(*shape, dtype=p.dtype, device=device) for _ in range(2))
    taken = 0
    for s, (pages, (low, high)) in enumerate(zip(used, seen, strict=True)):
        table[s, pages.start : pages.stop] = order[taken : taken + len(pages)].int()
        taken += len(pages)
        at = torch.arange(low, high, device=device)
        for cache in (k, v):
            rows = draw.normal(len(at), p.num_kv_heads, p.head_dim, dtype=p.dtype)
            cache[table[s, at // size].long(), :, at % size] = rows
    k, v = in_format(k, v, p.kv_format)
    made = (p.batch * p.pages, p.heads, size, p.head_dim)
    k_out, v_out = (poisoned(*made, dtype=p.dtype, device=device) for _ in range(2))
    return {
        "k_out": k_out, "v_out": v_out, "table_out": torch.full_like(table, NO_PAGE), "k": k, "v": v,
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=device),
        "block_table": table, "max_pages": max_pages, "window": window,
        "first_head": options.get("first_head", 0),
    }  # fmt: skip


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]] | None:
    """None: ops take plain caches, and those are read where they lie."""
    return None
