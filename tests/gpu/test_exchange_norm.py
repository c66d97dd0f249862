"""exchange_norm with ranks of their own: as streams of one GPU, and as processes with a GPU each.

Its folder's cases (test_kernels.py) have one rank that is its own peers, on every architecture's body.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from exchange_ranks import OneGpu, in_processes, require_right, require_right_when_replayed, sequence

from kerngen.templates import find_kernel
from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS
from kerngen.templates.exchange_norm.spec import Config, Problem
from kerngen.timing.measure import target_here

KERNEL = find_kernel("exchange_norm")
REPLAYS = 1000


def _problem(ranks: int, tokens: int, dtypes: tuple[str, str], hidden: int = 5376, **fields: Any) -> Problem:
    """Rows of a model where all ranks' blocks are resident at once, as they are on GPUs of their own; else short."""
    fits = ranks * tokens <= target_here().device.num_sms * 3 // 4  # a block of 672 threads has an SM
    problem = Problem(ranks, hidden if fits else 256, *dtypes, num_tokens=tokens, **fields)
    if (why := KERNEL.why_unsupported(problem, target_here())) is not None:
        pytest.skip(why)
    return problem


def _require_right_behind_each_other(problem: Problem, two_shot_from: int) -> None:
    """Three launches, with ranks that start late."""
    ranks, tokens = problem.ranks, problem.num_tokens
    gpu = OneGpu(problem, tokens * problem.rows)
    each = [gpu.given(problem, seed, two_shot_from) for seed in range(3)]
    torch.cuda.synchronize()
    draw = Random(tokens)
    with gpu.watched():
        for given in each:
            for rank in draw.sample(range(ranks), ranks):
                with torch.cuda.stream(gpu.streams[rank]):
                    torch.cuda._sleep(draw.randrange(30_000))
                    gpu.launch(problem, given[rank])
    for launch, given in enumerate(each):
        require_right(problem, given, f"launch {launch}")
    gpu.require_clean()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 3, 8, 32, 64, 129])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids="-".join)
@pytest.mark.parametrize("two_shot_from", [0, 1], ids=["one-shot", "two-shots"])
def test_ranks_on_one_gpu(ranks: int, tokens: int, dtypes: tuple[str, str], two_shot_from: int) -> None:
    _require_right_behind_each_other(_problem(ranks, tokens, dtypes, has_scalar=True), two_shot_from)


@pytest.mark.parametrize(("ranks", "top_k", "tokens"), [(2, 8, 32), (3, 3, 1), (8, 1, 1), (2, 8, 65), (8, 8, 9)])
@pytest.mark.parametrize("two_shot_from", [0, 1], ids=["one-shot", "two-shots"])
def test_each_rank_sums_its_experts_first(ranks: int, top_k: int, tokens: int, two_shot_from: int) -> None:
    dtypes = target_here().arch.dtype, "fp32"
    problem = _problem(ranks, tokens, dtypes, hidden=2816, top_k=top_k, has_scalar=True)
    _require_right_behind_each_other(problem, two_shot_from)


@pytest.mark.parametrize("two_shot_from", [0, 1], ids=["one-shot", "two-shots"])
@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({"top_k": 8, "has_scalar": True}, None),
        ({"has_next": False}, Config(2)),
        ({"hidden": 256}, Config(1, 4)),
        ({"hidden": 8}, Config(1, 2)),
    ],
    ids=str,
)
def test_experts_last_layers_and_rows_that_share_a_block(
    fields: dict[str, Any], config: Config | None, two_shot_from: int
) -> None:
    dtype = target_here().arch.dtype
    usual: dict[str, Any] = {"ranks": 3, "hidden": 2816, "dtype": dtype, "residual_dtype": "fp32", "num_tokens": 7}
    problem = Problem(**usual | fields)
    gpu = OneGpu(problem, 7 * problem.rows, config)
    given = gpu.given(problem, 1, two_shot_from)
    torch.cuda.synchronize()
    with gpu.watched():
        for rank, stream in enumerate(gpu.streams):
            with torch.cuda.stream(stream):
                gpu.launch(problem, given[rank])
    require_right(problem, given, str(fields))
    gpu.require_clean()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_thousand_replays_with_ranks_that_pause_at_random(ranks: int) -> None:
    """Launches of other numbers of tokens behind each other, right behind each other too, in one shot and in two."""
    problem = Problem(ranks, 512, target_here().arch.dtype, "fp32", num_tokens=5)
    gpu, draw = OneGpu(problem, 5), Random(ranks)
    problems = sequence(problem, (1, 3, 5, 1, 4))
    each = [gpu.given(p, i, two_shot_from=4) for i, p in enumerate(problems)]
    require_right_when_replayed(gpu, problems, each, draw, REPLAYS)


@pytest.mark.parametrize("two_shot_from", [0, 1], ids=["one-shot", "two-shots"])
def test_a_rank_alone_leaves_once_it_is_told(two_shot_from: int) -> None:
    problem = Problem(2, 512, target_here().arch.dtype, "fp32", num_tokens=3)
    gpu = OneGpu(problem, 3)
    given = gpu.given(problem, 1, two_shot_from)
    gpu.require_leaving(lambda: gpu.launch(problem, given[0]))
    assert given[0]["out"].isnan().all()
    assert given[0]["residual_out"].isnan().all()


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two processes with a GPU each need two GPUs")


@needs_two
@pytest.mark.whole_gpu(smoke=False)
def test_two_processes_share_memory_by_ipc_for_a_hundred_thousand_replays(tmp_path: Path) -> None:
    left, codes, _ = in_processes("exchange_norm", tmp_path, 100_000, -1)
    assert codes == [0, 0], left
    assert left == ["0 of 100000 wrong, NaN: False"] * 2


@needs_two
@pytest.mark.whole_gpu(smoke=False)
def test_a_rank_that_is_killed_ends_the_other_within_seconds(tmp_path: Path) -> None:
    (left, _), codes, took = in_processes("exchange_norm", tmp_path, 100_000, 700)
    assert codes == [0, -9]
    assert took < 5.0
    assert "NaN: True" in left or left.startswith("error:"), left
