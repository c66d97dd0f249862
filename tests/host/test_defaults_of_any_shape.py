"""Problems of shapes that no released model has: their defaults run on every board, and few tokens waste no tile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import golden
import pytest

from kerngen.arch import Target, find_device
from kerngen.runtime.config import Keeping
from kerngen.templates import Kernel, find_kernel
from kerngen.workload.workload import MODELS, find_model, workload


def _products(draw: random.Random) -> Iterator[dict[str, Any]]:
    for _ in range(60):
        group = draw.choice((32, 64, 128))
        yield {"n": 64 * draw.randint(1, 700), "k": group * draw.randint(1, 700 * 32 // group), "group_size": group,
               "num_tokens": draw.choice((1, 2, 3, 4, 7, 8, 16, 24, 33, 64, 100, 256, 1030, 8192)),
               "gated": draw.random() < 0.3, "row_invariant": draw.random() < 0.3}  # fmt: skip


def _attention(draw: random.Random) -> Iterator[dict[str, Any]]:
    for _ in range(60):
        kv_heads, group = draw.choice((1, 2, 3, 4, 5, 8, 16)), draw.choice((1, 2, 4, 8, 16))
        q_len = draw.choice((1, 1, 2, 4, 5, 8))
        yield {"head_dim": draw.choice((128, 256, 512)), "num_q_heads": kv_heads * group, "num_kv_heads": kv_heads,
               "q_len": q_len, "page_size": draw.choice((16, 32, 48, 64, 128)), "batch": draw.choice((1, 2, 5, 8, 33)),
               "window": draw.choice((0, 0, 512, 1024, 4096)), "kv_len": draw.randint(q_len, 40_000)}  # fmt: skip


PROBLEMS = [
    (find_kernel(name), fields)
    for name, of in (("w4a16_gemm", _products), ("attn_decode", _attention))
    for fields in of(random.Random(46))
]


@pytest.mark.parametrize("board", golden.BOARDS)
def test_each_has_a_default_that_may_run(board: str) -> None:
    target = Target.of(find_device(board))
    for kernel, problem in _problems(target):
        config = kernel.default_config(problem, target)
        assert kernel.why_invalid(problem, config, target) is None, (problem, config)


@pytest.mark.parametrize("board", golden.BOARDS)
def test_few_tokens_have_a_tile_of_few_rows(board: str) -> None:
    """A tile of more than twice the rows that there are (16 at least, as mma takes) multiplies for nothing."""
    target = Target.of(find_device(board))
    for kernel, problem in _problems(target):
        if kernel.name == "w4a16_gemm":
            config = kernel.default_config(problem, target)
            assert config.block_m < 2 * max(problem.num_tokens, 16), (problem, config)


def _problems(target: Target) -> Iterator[tuple[Kernel, Any]]:
    for kernel, fields in PROBLEMS:
        problem = kernel.problem_type(**fields, dtype="bf16" if target.arch.has_bf16 else "fp16")
        if kernel.why_unsupported(problem, target) is None:
            yield kernel, problem


@pytest.mark.parametrize("board", ["V100", "H200"])
@pytest.mark.parametrize("model", MODELS)
def test_each_problem_of_a_model_has_a_default_that_may_run(model: str, board: str) -> None:
    """With its drafter in int4, whose matrices are smaller than the model's."""
    target = Target.of(find_device(board))
    load = workload(find_model(model, kept=Keeping("int4")), target.arch)
    for item in load.items:
        kernel = find_kernel(item.kernel)
        if kernel.why_unsupported(item.problem, target) is None:
            config = kernel.default_config(item.problem, target)
            assert kernel.why_invalid(item.problem, config, target) is None, (item.problem, config)
