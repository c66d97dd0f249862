"""Gemma-4 26B-A4B's experts, and what torch takes for the same with dense 16-bit weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import gelu

from kerngen.templates.common.w4.pack import dequantize, separate, unpack
from kerngen.templates.kernel import Case
from kerngen.templates.moe_w4a16.cases import case_for
from kerngen.templates.moe_w4a16.spec import Problem

_FORMATS = ("int4_min", "int8_min"), ("int8", "int8")  # of Q4_K_M and of Q8_0
BENCH_CASES = (
    *(case_for(Problem(128, 8, 2816, 704, 32, "bf16", t)) for t in (1, 4, 16, 32, 128, 2048)),
    *(case_for(Problem(128, 8, 2816, 704, 32, "bf16", t, *formats, fp16_scales=True))
      for formats in _FORMATS for t in (1, 16, 128, 2048)),
)  # fmt: skip


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """The chosen experts' dense matrices gathered and multiplied: of int4 four times the bytes, for up to 8 tokens."""
    p, x, ids = case.problem, inputs["x"], inputs["topk_ids"].long()
    if p.num_tokens > 8:
        return {}
    gate_up, down = [], []
    for e in range(p.num_experts):
        packed, scales = unpack(inputs["gate_up"][e], inputs["gate_up_scales"][e])
        gate_up.append(dequantize(separate(packed), separate(scales), x.dtype))
        down.append(dequantize(*unpack(inputs["down"][e], inputs["down_scales"][e]), x.dtype))
    up_all, down_all = torch.stack(gate_up), torch.stack(down)

    def gathered() -> torch.Tensor:
        gate, up = (up_all[ids] @ x[:, None, :, None]).squeeze(-1).chunk(2, dim=-1)
        return down_all[ids] @ (gelu(gate, approximate="tanh") * up)[..., None]

    return {"torch, dense": gathered}
