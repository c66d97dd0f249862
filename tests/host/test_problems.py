"""Problems that contradict themselves are refused by what is wrong with them, whatever the kernel."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kerngen.errors import ProblemError
from kerngen.templates import find_kernel

OF_8, DTYPES = "is not a positive multiple of 8", "dtype='fp64' is not one of: "
# Kernel -> fields and what the message must have; the figure of the field where that is None.
REFUSED: dict[str, list[tuple[dict[str, Any], str | None]]] = {
    "attn_decode": [
        *(({name: value}, None) for name, value in (
            ("head_dim", 64), ("q_len", 17), ("q_len", 0), ("page_size", 24), ("page_size", 8), ("dtype", "fp64"),
            ("window", -1), ("batch", 0), ("source", "kv"), ("num_rotated_pairs", 1))),
        ({"num_q_heads": 6, "num_kv_heads": 4}, "4"), ({"num_q_heads": 24, "num_kv_heads": 8}, "3"),
        ({"source": "qkv", "num_rotated_pairs": 65}, "65"),
    ],
    "attn_prefill": [
        ({"head_dim": 96}, "128, 256, 512"), ({"dtype": "fp64"}, "fp16, bf16"), ({"num_kv_heads": 5}, "5"),
        ({"window": -1}, "negative"),
    ],
    "w4a16_gemm": [
        ({"n": 48}, None), ({"k": 100}, None), ({"k": 192, "group_size": 128}, "k=192"), ({"group_size": 16}, None),
        ({"dtype": "fp64"}, "fp64"), ({"num_tokens": 0}, None),
    ],
    "dense_gemv": [({"n": 12}, None), ({"k": 100}, None), ({"dtype": "fp64"}, "fp64"), ({"num_tokens": 0}, None)],
    "rmsnorm": [
        ({"hidden": 100}, f"hidden=100 {OF_8}"), ({"dtype": "fp64"}, f"{DTYPES}fp16, bf16, fp32"),
        ({"dtype": "fp16", "residual_dtype": "bf16"}, "residual_dtype='bf16' is not one of: fp16"),
    ],
    "add_norm": [({"num_tokens": 0}, "num_tokens=0 is not in 1")],
    "gelu_gate": [({"num_tokens": 2**20, "width": 21504}, "2,818,572,288 vectors of 8; at most")],
    "embed": [({"vocab_size": 0}, "vocab_size=0 is not positive")],
    "ple_inputs": [
        ({"width": 2056}, "width=2056 is more than 2048"), ({"num_layers": 0}, "num_layers=0 is not positive"),
        ({"num_tokens": 2**21}, "2,348,810,240 vectors of 8; at most"),
    ],
    "softcap_argmax": [({"vocab_size": 262145}, f"vocab_size=262145 {OF_8}")],
    "qkv_norm_rope": [
        ({"head_dim": 96}, "head_dim=96 is not one of"),
        ({"num_rotated_pairs": 129}, "num_rotated_pairs=129 is not in 0..128"),
        ({"q_only": True}, "num_kv_heads=16 must be 0"), ({"num_kv_heads": 0}, "num_kv_heads=0 is not positive"),
    ],
    "qkv_norm_rope_2d": [
        ({"head_dim": 100}, f"head_dim=100 {OF_8}"), ({"head_dim": 264}, "head_dim=264 is more than 256"),
        ({"num_heads": 0}, "num_heads=0 is not positive"), ({"dtype": "fp64"}, f"{DTYPES}fp16, bf16, fp32"),
        ({"num_tokens": 2**28}, "4,294,967,296 heads; at most 2,147,483,647"),
    ],
    "attn_relative": [
        ({"head_dim": 48}, "head_dim=48 is not one of: 8, 16"), ({"num_heads": 0}, "num_heads=0 is not in 1"),
        ({"window": 33}, "window=33 is not in 1..32"), ({"dtype": "fp64"}, f"{DTYPES}fp16, bf16, fp32"),
    ],
    "glu_conv": [({"width": 100}, f"width=100 {OF_8}"), ({"num_taps": 9}, "num_taps=9 is not in 1..8")],
    "mel_conv": [({"mels": 513}, "mels=513 is not in 1..512"), ({"channels": 24}, "channels=24 is not one of: 8, 16")],
    "residual_norms": [({"hidden": 100}, f"hidden=100 {OF_8}"), ({"num_tokens": 0}, "num_tokens=0 is not in 1")],
    "silu": [({"num_tokens": 2**20, "width": 21504}, "2,818,572,288 vectors of 8; at most")],
    "exchange_best": [
        ({"ranks": 9}, "ranks=9 is not in 2..8"), ({"width": 100}, f"width=100 {OF_8}"),
        ({"source": "row"}, "source='row' is not one of: rows, logits"),
    ],
    "exchange_norm": [
        ({"ranks": 1}, "ranks=1 is not in 2..8"), ({"ranks": 9}, "ranks=9 is not in 2..8"),
        ({"hidden": 100}, f"hidden=100 {OF_8}"), ({"dtype": "fp64"}, f"{DTYPES}fp16, bf16, fp32"),
        ({"top_k": 9}, "top_k=9 is not in 0..8"),
    ],
    "moe_combine": [
        ({"top_k": 9}, "top_k=9 is not in 1..8"),
        ({"has_norms": False, "residual_dtype": "fp32"}, "residual_dtype='fp32' without norms"),
    ],
    "moe_route": [({"num_experts": 257}, "num_experts=257 is not in 1..256"),
                  ({"num_experts": 4}, "top_k=8 is not in 1..4")],
    "moe_router": [
        ({"hidden": 100}, f"hidden=100 {OF_8}"), ({"num_experts": 100}, f"num_experts=100 {OF_8}"),
        ({"num_experts": 264}, "num_experts=264 is not in 8..256"), ({"top_k": 9}, "top_k=9 is not in 1..8"),
        ({"dtype": "fp16"}, "residual_dtype='bf16' is not one of: fp16"),
        ({"num_tokens": 0}, "num_tokens=0 is not in 1"),
    ],
    "centroid_head": [
        ({"hidden": 1032}, "hidden=1032 is more than 1024"), ({"hidden": 100}, f"hidden=100 {OF_8}"),
        ({"num_centroids": 8193}, "num_centroids=8193 is not in 1..8192"),
        ({"top_k": 257}, "top_k=257 is not in 1..256 (num_centroids=2048)"),
        ({"num_centroids": 8}, "top_k=32 is not in 1..8 (num_centroids=8)"),
        ({"cluster_size": 2**20}, "cluster_size=1048576 is not in 1..1048575"),
    ],
    "ple_block": [
        ({"hidden": 4104}, "hidden=4104 is more than 4096"), ({"width": 264}, "width=264 is more than 256"),
        ({"width": 100}, f"width=100 {OF_8}"),
        ({"dtype": "fp16", "residual_dtype": "bf16"}, "residual_dtype='bf16' is not one of: fp16"),
    ],
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {"w4a16_gemm": {"n": 64, "k": 128}, "dense_gemv": {"n": 64, "k": 128}}


@pytest.mark.parametrize(
    ("name", "fields", "says"), [(name, *row) for name, rows in REFUSED.items() for row in rows], ids=str
)
def test_a_problem_that_contradicts_itself_is_refused(name: str, fields: dict[str, Any], says: str | None) -> None:
    field, value = next(iter(fields.items()))
    with pytest.raises(ProblemError, match=re.escape(says or f"{field}={value!r}")):
        find_kernel(name).problem_type(**NEEDED.get(name, {}) | fields)
