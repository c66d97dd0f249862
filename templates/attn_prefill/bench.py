"""What attn_prefill is timed on, and torch's own attention beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import scaled_dot_product_attention

from kerngen.templates.attn_prefill.cases import case_for
from kerngen.templates.attn_prefill.reference import gather_pages
from kerngen.templates.attn_prefill.spec import Problem
from kerngen.templates.kernel import Case


def _bench(name: str, **fields: Any) -> Case:
    case = case_for(Problem(**fields))
    return Case(name, case.problem, case.seed, case.options)


_D128 = {"head_dim": 128, "num_q_heads": 32, "num_kv_heads": 8}
_D256 = {"head_dim": 256, "num_q_heads": 32, "num_kv_heads": 16}
_D512 = {"head_dim": 512, "num_q_heads": 32, "num_kv_heads": 4}
_D512_GROUP8 = {"head_dim": 512, "num_q_heads": 16, "num_kv_heads": 2}  # the 26B-A4B's

BENCH_CASES: tuple[Case, ...] = (
    _bench("d128-8k", **_D128),
    _bench("d256-8k", **_D256),
    _bench("d256-8k-window", window=1024, **_D256),
    _bench("d512-8k", **_D512),
    _bench("d256-8k-window-paged", window=1024, page_size=16, **_D256),
    _bench("d256-8k-window-images", window=1024, page_size=16, ends=True, **_D256),
    _bench("d512-8k-paged", page_size=16, **_D512),
    _bench("d512-chunk2k-of-32k-paged", page_size=16, num_tokens=2048, kv_len=32768, **_D512),
    # Lists of a quarter of the tiles, and the same with all of them; TFLOPS are those of all.
    _bench("d512-chunk2k-of-32k-lists.25", page_size=64, num_tokens=2048, kv_len=32768, lists=True, **_D512),
    _bench("d512-chunk2k-of-131k", page_size=64, num_tokens=2048, kv_len=131072, **_D512_GROUP8),
    _bench("d512-chunk2k-of-131k-lists.25", page_size=64, num_tokens=2048, kv_len=131072, lists=True, **_D512_GROUP8),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch's scaled_dot_product_attention where it says the same: whole sequences under a causal mask alone."""
    p = case.problem
    same = p.causal and not (p.window or p.logit_cap or p.ends or p.lists) and p.num_tokens == p.batch * p.kv_len
    if not same or p.head_dim > 256:  # above 256 torch has only its unfused path, which holds all scores at once
        return {}
    if p.page_size:
        pages = inputs["block_table"]
        k, v = ([gather_pages(inputs[name], pages[s], 0, p.kv_len) for s in range(p.batch)] for name in ("k", "v"))
    else:
        k, v = ([*inputs[name].split(p.kv_len)] for name in ("k", "v"))
    by_head = [t.transpose(0, 1).contiguous() for t in (*inputs["q"].split(p.kv_len), *k, *v)]
    q, k, v = (by_head[i * p.batch : (i + 1) * p.batch] for i in range(3))

    def torch_sdpa() -> None:
        for s in range(p.batch):
            scaled_dot_product_attention(
                q[s][None], k[s][None], v[s][None], is_causal=True, enable_gqa=True, scale=inputs["sm_scale"]
            )

    return {"torch_sdpa": torch_sdpa}
