"""What decode_layers is timed on: the models' layers, a few of each kind, and a drafter's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerngen.templates.decode_layers.cases import case_for
from kerngen.templates.decode_layers.spec import Problem
from kerngen.templates.kernel import Case

# hidden, q heads, KV heads of sliding and of full layers, inner
_E2B: dict[str, Any] = {
    "hidden": 1536, "num_q_heads": 8, "num_kv_heads": 1, "num_full_kv_heads": 1, "k_eq_v": False, "inner": 6144,
    "shared_inner": 12288, "ple_width": 256, "window": 512,
}  # fmt: skip
_E4B: dict[str, Any] = {
    "hidden": 2560, "num_q_heads": 8, "num_kv_heads": 2, "num_full_kv_heads": 2, "k_eq_v": False, "inner": 10240,
    "ple_width": 256, "window": 512,
}  # fmt: skip
_12B: dict[str, Any] = {
    "hidden": 3840, "num_q_heads": 16, "num_kv_heads": 8, "num_full_kv_heads": 1, "inner": 15360,
}  # fmt: skip
_31B: dict[str, Any] = {}  # the defaults
_26B: dict[str, Any] = {
    "hidden": 2816, "num_q_heads": 16, "num_kv_heads": 8, "num_full_kv_heads": 2, "inner": 2112, "num_experts": 128,
    "top_k": 8, "expert_inner": 704,
}  # fmt: skip
# The 31B's drafter, which attends to the 31B's keys and values.
_DRAFTER: dict[str, Any] = {"hidden": 1024, "k_eq_v": False, "inner": 8192, "window": 1025}

BENCH_CASES: tuple[Case, ...] = (
    case_for(Problem("sfSF", **_E2B)),
    case_for(Problem("sfSF", **_E4B)),
    case_for(Problem("ssf", **_12B)),
    case_for(Problem("ssf", **_26B)),
    case_for(Problem("ssf", **_31B)),
    case_for(Problem("ssf", **_31B, kv_len=8192)),
    case_for(Problem("ssf", **_31B, taps="-tt")),
    case_for(Problem("ssf", **_26B, taps="-tt")),
    case_for(Problem("ssf", **_31B, kv_len=131072)),
    *(case_for(Problem("ssf", **_31B, kv_len=131072, kv_format=f)) for f in ("int8", "shared", "shared_int8")),
    case_for(Problem("ssf", **_31B, kv_len=8192, kv_format="shared_int8")),
    case_for(Problem("sfSF", **_E2B, kv_len=8192, kv_format="int8")),
    case_for(Problem("SSSF", **_DRAFTER), signed=True),
    case_for(Problem("SSSF", **_DRAFTER, kv_len=8192), signed=True),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """None in torch: what it replaces are launches of attn_decode, w4a16_gemm and others, which have benches."""
    return {}
