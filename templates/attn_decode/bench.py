"""What attn_decode is timed on, and torch's own attention beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import scaled_dot_product_attention

from kerngen.templates.attn_decode.cases import case_for
from kerngen.templates.attn_decode.reference import gather_pages
from kerngen.templates.attn_decode.spec import Problem
from kerngen.templates.kernel import Case


def _bench(name: str, **fields: Any) -> Case:
    case = case_for(Problem(**fields))
    return Case(name, case.problem, case.seed, case.options)


# Gemma-4 31B: sliding layers, then global ones. The others are what its peers publish.
_SLIDING = {"head_dim": 256, "num_q_heads": 32, "num_kv_heads": 16, "window": 1024}
_GLOBAL = {"head_dim": 512, "num_q_heads": 32, "num_kv_heads": 4}
_EIGHT = {"num_q_heads": 32, "num_kv_heads": 8, "batch": 8}

_E4B = {"num_q_heads": 8, "num_kv_heads": 2}

BENCH_CASES: tuple[Case, ...] = (
    _bench("b1-d256-w1024", **_SLIDING),
    _bench("b1-d256-w1024-q4", q_len=4, **_SLIDING),
    _bench("b32-d256-w1024", batch=32, **_SLIDING),
    _bench("b32-d256-w1024-q4", batch=32, q_len=4, **_SLIDING),
    _bench("b1-d512-8k", **_GLOBAL),
    _bench("b1-d512-8k-q4", q_len=4, **_GLOBAL),
    _bench("b1-d512-128k", kv_len=131072, **_GLOBAL),
    _bench("b1-d512-128k-q4", kv_len=131072, q_len=4, **_GLOBAL),
    _bench("b32-d512-8k", batch=32, **_GLOBAL),
    _bench("b8-d128-8k", head_dim=128, **_EIGHT),
    _bench("b8-d256-8k", head_dim=256, **_EIGHT),
    # From the projection, as models ask it: E4B's layers with K and V of their own and without, 31B's with K = V.
    _bench("b1-d256-w512-qkv", source="qkv", num_rotated_pairs=128, head_dim=256, window=512, **_E4B),
    _bench("b1-d512-2k-raw_q", source="raw_q", num_rotated_pairs=64, head_dim=512, kv_len=2048, **_E4B),
    _bench("b1-d512-8k-qk", source="qk", num_rotated_pairs=64, **_GLOBAL),
    _bench("b32-d512-8k-qk", source="qk", num_rotated_pairs=64, batch=32, **_GLOBAL),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch's scaled_dot_product_attention over a dense copy of the visible keys, where its masks can say the same.
    Nothing for a problem that begins with head norms and RoPE: torch has no op for all of it.

    The copy is made beforehand: torch reads no block table. One query a sequence sees all of the copy.
    """
    p = case.problem
    if p.source != "q" or p.q_len > 1 or p.logit_cap or p.batch * p.visible * p.num_kv_heads * p.head_dim > 2**29:
        return {}
    first = p.kv_len - p.visible
    tables = inputs["block_table"]
    k, v = (
        [gather_pages(inputs[name], tables[s], first, p.kv_len).transpose(0, 1)[None] for s in range(p.batch)]
        for name in ("k_cache", "v_cache")
    )
    q = inputs["q"].reshape(p.batch, p.num_q_heads, 1, p.head_dim)

    def torch_sdpa() -> None:
        for s in range(p.batch):
            scaled_dot_product_attention(q[s : s + 1], k[s], v[s], scale=inputs["sm_scale"], enable_gqa=True)

    return {"torch_sdpa": torch_sdpa}
