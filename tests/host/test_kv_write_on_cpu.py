"""kv_write's own source, on the host: every case, and pages of more heads than a cache has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch
from torch import Tensor

from kerngen.arch import Target, find_device
from kerngen.errors import ProblemError
from kerngen.templates import Case, find_kernel
from kerngen.templates.kv_write.op import kv_write
from kerngen.templates.kv_write.spec import Config
from kerngen.templates.values import KVView
from kerngen.timing.measure import compare

KERNEL = find_kernel("kv_write")
TARGET = Target.of(find_device("H200"))
MOST_THREADS = 8192  # of a launch, each a thread of the host
SMALL = [c for c in KERNEL.cases.CASES if c.problem.elements // 8 <= MOST_THREADS and c.problem.dtype == "bf16"]


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
@pytest.mark.parametrize(("turn", "case"), list(enumerate(SMALL)), ids=str)
def test_rows_go_to_their_slots(turn: int, case: Case, tmp_path: Path) -> None:
    config = Config(64, (1, 2, 4)[turn % 3])
    inputs = KERNEL.cases.inputs(case, "cpu")
    expected = KERNEL.reference.expected(case.problem, inputs)
    kernel_on_cpu.run_kernel(KERNEL, case.problem, config, TARGET, inputs, tmp_path)
    result = compare(KERNEL, case, inputs, expected)
    assert result.ok, result.message


def _rows(**changed: Any) -> dict[str, Any]:
    whole = torch.zeros(2, 4, 16, 64, dtype=torch.float16)
    qkv = torch.zeros(3, 8, 64, dtype=torch.float16)
    usual = {"k": qkv[:, 4:6], "v": qkv[:, 6:], "kv": KVView(whole[:, :2], whole[:, 2:])}
    return usual | {"slot_mapping": torch.zeros(3, dtype=torch.int64)} | changed


def test_k_and_v_may_be_parts_of_a_projection() -> None:
    call = kv_write(**_rows())
    assert (call.arguments["k_stride"], call.arguments["v_stride"]) == (512, 512)
    assert call.problem == KERNEL.problem_type(2, 64, 16, "fp16", 3, 4)
    none = torch.zeros(0, 2, 64, dtype=torch.float16)
    assert kv_write(**_rows(k=none, v=none, slot_mapping=torch.zeros(0, dtype=torch.int64))).problem is None


@pytest.mark.parametrize(
    "v",
    [
        torch.zeros(3, 4, 64, dtype=torch.float16)[:, ::2],
        torch.zeros(3, 2, 128, dtype=torch.float16)[..., ::2],
        torch.zeros(2, 3, 64, dtype=torch.float16).transpose(0, 1),
        torch.zeros(3 * 132, dtype=torch.float16).as_strided((3, 2, 64), (132, 64, 1)),
    ],
    ids=["every other head", "every other element", "heads first", "no whole vectors"],
)
def test_heads_that_are_apart_are_refused(v: Tensor) -> None:
    with pytest.raises(ProblemError, match=r"v has strides \(.*tokens are a multiple of 8 elements apart"):
        kv_write(**_rows(v=v))
