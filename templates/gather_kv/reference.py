"""gather_kv in torch: common/attention/kv_formats_torch.py says what a cache holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.attention.kv_formats_torch import read_rows
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE
from kerngen.templates.gather_kv.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """k_out, v_out in fp32 and table_out in fp64; what nobody sees keeps what it holds."""
    p, size, window = problem, problem.page_size, inputs["window"]
    k_out, v_out, table_out = (inputs[name].clone() for name in ("k_out", "v_out", "table_out"))
    heads = slice(inputs["first_head"], inputs["first_head"] + p.heads)
    starts, table = inputs["cu_seqlens_q"].tolist(), inputs["block_table"]
    for s, kv_len in enumerate(inputs["kv_lens"].tolist()):
        q_len = starts[s + 1] - starts[s]
        first = max(kv_len - q_len - window + 1, 0) if window else 0
        if not q_len or first >= kv_len:
            continue
        at = torch.arange(first, kv_len, device=table.device)
        index = at // size
        own = s * p.pages + index - first // size
        table_out[s, index] = own.int()
        for out, name in ((k_out, "k"), (v_out, "v")):
            rows = read_rows(inputs[name], p.kv_format, TORCH_DTYPE[p.dtype], table[s, index].long(), at % size, heads,
                             keys=name == "k")  # fmt: skip
            out[own, :, at % size] = rows.to(out.dtype)
    return {"k_out": k_out.float(), "v_out": v_out.float(), "table_out": table_out.double()}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "a code times its scale is rounded once, by both")
