"""qkv_norm_rope_2d: its own source on the host, and what its op refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch

from kerngen.arch import Target, find_device
from kerngen.errors import ProblemError
from kerngen.templates import Case, find_kernel
from kerngen.templates.qkv_norm_rope_2d.op import qkv_norm_rope_2d
from kerngen.templates.qkv_norm_rope_2d.spec import Config
from kerngen.timing.measure import compare

KERNEL = find_kernel("qkv_norm_rope_2d")
TARGET = Target.of(find_device("H200"))
MOST_HEADS = 60  # each of a few threads of the host
SMALL = [c for c in KERNEL.cases.CASES if c.problem.num_tokens * c.problem.num_heads <= MOST_HEADS]


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
@pytest.mark.parametrize(("turn", "case"), list(enumerate(SMALL)), ids=str)
def test_heads_are_normed_and_turned_where_they_lie(turn: int, case: Case, tmp_path: Path) -> None:
    config = Config((1, 2, 4)[turn % 3], min((2, 1, 3)[turn % 3], case.problem.num_heads))
    inputs = KERNEL.cases.inputs(case, "cpu")
    expected = KERNEL.reference.expected(case.problem, inputs)
    kernel_on_cpu.run_kernel(KERNEL, case.problem, config, TARGET, inputs, tmp_path)
    result = compare(KERNEL, case, inputs, expected)
    assert result.ok, result.message


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
def test_what_is_not_a_number_stays_so(tmp_path: Path) -> None:
    """In the heads that have it, clamped or not; no other head sees it."""
    case = next(c for c in SMALL if c.problem.has_bounds and c.problem.head_dim == 48)
    inputs = KERNEL.cases.inputs(case, "cpu")
    qkv = inputs["qkv"].view(case.problem.num_tokens, 3, case.problem.num_heads, case.problem.head_dim)
    hit = [(0, 0, 0, 5), (1, 1, 2, 47), (5, 2, 1, 20)]
    for at in hit:
        qkv[at] = torch.nan
    kernel_on_cpu.run_kernel(KERNEL, case.problem, Config(1, 1), TARGET, inputs, tmp_path)
    heads = {(token, part, head) for token, part, head, _ in hit}
    assert {tuple(at) for at in qkv.isnan().any(-1).nonzero().tolist()} == heads
    assert all(bool(qkv[at].isnan().all()) for at in heads)


def _asked(**changed: Any) -> dict[str, Any]:
    usual = {"qkv": torch.zeros(12, 3 * 2 * 16), "q_weight": torch.ones(16), "k_weight": torch.ones(16),
             "cos": torch.ones(6, 16), "sin": torch.zeros(6, 16), "bounds": None, "eps": 1e-6}  # fmt: skip
    return usual | changed


def test_images_share_cosines_and_sines() -> None:
    call = qkv_norm_rope_2d(**_asked())
    assert call.problem == KERNEL.problem_type(2, 16, "fp32", False, 12)
    assert call.arguments["num_positions"] == 6
    assert qkv_norm_rope_2d(**_asked(qkv=torch.zeros(0, 96))).problem is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"qkv": torch.zeros(12, 64)}, "64 columns, which are no q, k and v of heads of 16"),
        ({"qkv": torch.zeros(10, 96)}, "10 rows, which are no images of 6 patches"),
        ({"cos": torch.ones(0, 16)}, "12 rows, which are no images of 0 patches"),
    ],
)
def test_what_is_no_image_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        qkv_norm_rope_2d(**_asked(**changed))
