"""Pages that begin, end and are whole with a chunk; formats of a cache; sequences of which nothing is whole."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.attention.kv_formats_torch import in_format
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.kernel import Case, asking
from kerngen.templates.key_means.op import key_means
from kerngen.templates.key_means.spec import Problem

NO_PAGE = 0x3FFFFFFF  # a table entry that faults if it is followed
# Of a sequence the position of its first new key, and its keys.
_STARTS, _LENS = [0, 128, 64, 5, 0, 300, 0], [200, 384, 127, 5, 15, 333, 16]


def case_for(problem: Problem, name: str = "") -> Case:
    p = problem
    kind = f"d{p.head_dim}_h{p.num_kv_heads}_s{p.page_size}_m{p.mean_keys}_{p.dtype}_{p.kv_format}_b{p.batch}"
    each, left = divmod(p.num_tokens, p.batch)
    behind = p.mean_keys - 1 if each < p.mean_keys else 0  # so that something is whole
    starts = [64 * (i % 3) + behind for i in range(p.batch)]
    lens = [start + each + (left if i == 0 else 0) for i, start in enumerate(starts)]
    return Case(name or f"{kind}_t{p.num_tokens}", p, p.head_dim + p.num_tokens, {"starts": starts, "kv_lens": lens})


def _case(name: str, **fields: Any) -> Case:
    problem = Problem(batch=len(_LENS), num_tokens=sum(_LENS) - sum(_STARTS), **fields)
    return Case(name, problem, len(name), {"starts": _STARTS, "kv_lens": _LENS})


CASES = (
    *(
        _case(f"d{d}-{dtype}-{m}-of-{s}", head_dim=d, num_kv_heads=2, page_size=s, mean_keys=m, dtype=dtype)
        for d, s, m in ((128, 16, 16), (256, 64, 32), (512, 64, 32), (512, 48, 16))
        for dtype in ("bf16", "fp16")
    ),
    *(
        _case(f"d512-{dtype}-{kv_format}", num_kv_heads=1, kv_format=kv_format, dtype=dtype)
        for kv_format in ("int8", "shared", "shared_int8", "int4", "shared_int4", "int3", "shared_int3", "fp8")
        for dtype in ("bf16", "fp16")
    ),
    case_for(Problem(num_kv_heads=1, num_tokens=1)),
    case_for(Problem(num_tokens=2048)),
    case_for(Problem(batch=3, num_tokens=1000)),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. Pages are scattered; keys behind a sequence's last one, and all means, are NaN."""
    p, draw = case.problem, Draw(case.seed, device)
    starts, lens = case.options["starts"], case.options["kv_lens"]
    used = [-(-n // p.page_size) for n in lens]
    order = draw.permutation(sum(used) + 2)
    table = torch.full((len(lens), max(used) + 1), NO_PAGE, dtype=torch.int32, device=device)
    shape = (sum(used) + 2, p.num_kv_heads, p.page_size, p.head_dim)
    k, v = (poisoned(*shape, dtype=p.dtype, device=device) for _ in range(2))
    taken = 0
    for s, (count, n) in enumerate(zip(used, lens, strict=True)):
        table[s, :count] = order[taken : taken + count].int()
        taken += count
        at = torch.arange(n, device=device)
        for cache in (k, v):
            rows = draw.normal(n, p.num_kv_heads, p.head_dim, dtype=p.dtype)
            cache[table[s, at // p.page_size].long(), :, at % p.page_size] = rows
    k, _ = in_format(k, v, p.kv_format)
    return {
        "means": poisoned(shape[0], p.num_kv_heads, p.page_size // p.mean_keys, p.head_dim, dtype=p.dtype,
                          device=device),
        "k": k,
        "kv_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "block_table": table,
        "starts": torch.tensor(starts, dtype=torch.int32, device=device),
        "max_pages": table.shape[1],
    }  # fmt: skip


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]] | None:
    """The op that asks for this case, and its arguments; none for a cache with scales or one pool."""
    if case.problem.kv_format != "plain":
        return None
    k = inputs["k"]
    return asking(key_means, case, inputs, k_cache=k, v_cache=k, num_tokens=case.problem.num_tokens)
