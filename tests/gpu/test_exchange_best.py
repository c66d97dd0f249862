"""exchange_best with ranks of their own: as streams of one GPU, and as processes with a GPU each.

Its folder's cases (test_kernels.py) have one rank that is its own peers, on every architecture's body.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from exchange_ranks import OneGpu, in_processes, require_right, require_right_when_replayed, sequence

from kerngen.templates import find_kernel
from kerngen.templates.exchange_best.spec import Config, Problem
from kerngen.timing.measure import target_here

REPLAYS = 1000


def _problem(ranks: int, tokens: int, dtype: str, source: str) -> Problem:
    problem = Problem(ranks, 5376 if source == "rows" else 8, dtype, source, tokens)
    if (why := find_kernel("exchange_best").why_unsupported(problem, target_here())) is not None:
        pytest.skip(why)
    return problem


@pytest.mark.parametrize("source", ["rows", "logits"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [1, 3, 32, 128])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_on_one_gpu(ranks: int, tokens: int, dtype: str, source: str) -> None:
    """Of logits many are equal, on one rank or on several."""
    problem = _problem(ranks, tokens, dtype, source)
    gpu, draw = OneGpu(problem, tokens), Random(tokens)
    each = [gpu.given(problem, seed) for seed in range(3)]
    torch.cuda.synchronize()
    with gpu.watched():
        for given in each:
            for rank in draw.sample(range(ranks), ranks):
                with torch.cuda.stream(gpu.streams[rank]):
                    torch.cuda._sleep(draw.randrange(30_000))
                    gpu.launch(problem, given[rank])
    for launch, given in enumerate(each):
        require_right(problem, given, f"launch {launch}")
    gpu.require_clean()


@pytest.mark.parametrize("config", [Config(4, 6), Config(2, 12)], ids=str)
def test_warps_of_a_block_have_a_token_each(config: Config) -> None:
    problem = Problem(3, 5376, target_here().arch.dtype, num_tokens=7)
    gpu = OneGpu(problem, 7, config)
    given = gpu.given(problem, 1)
    torch.cuda.synchronize()
    with gpu.watched():
        for rank, stream in enumerate(gpu.streams):
            with torch.cuda.stream(stream):
                gpu.launch(problem, given[rank])
    require_right(problem, given, str(config))
    gpu.require_clean()


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_thousand_replays_with_ranks_that_pause_at_random(ranks: int) -> None:
    """Launches of other numbers of tokens behind each other, right behind each other too."""
    problem = Problem(ranks, 2816, target_here().arch.dtype, num_tokens=5)
    gpu, draw = OneGpu(problem, 5), Random(ranks)
    problems = sequence(problem, (1, 3, 5, 1, 4))
    each = [gpu.given(p, i) for i, p in enumerate(problems)]
    require_right_when_replayed(gpu, problems, each, draw, REPLAYS)


def test_a_rank_alone_chooses_no_token_once_it_is_told() -> None:
    problem = Problem(2, 512, target_here().arch.dtype, num_tokens=3)
    gpu = OneGpu(problem, 3)
    given = gpu.given(problem, 1)
    gpu.require_leaving(lambda: gpu.launch(problem, given[0]))
    assert given[0]["ids"].tolist() == [-1, -1, -1]


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two processes with a GPU each need two GPUs")


@needs_two
@pytest.mark.whole_gpu(smoke=False)
def test_two_processes_share_memory_by_ipc_for_ten_thousand_replays(tmp_path: Path) -> None:
    left, codes, _ = in_processes("exchange_best", tmp_path, 10_000, -1)
    assert codes == [0, 0], left
    assert left == ["0 of 10000 wrong, NaN: False"] * 2


@needs_two
@pytest.mark.whole_gpu(smoke=False)
def test_a_rank_that_is_killed_ends_the_other_within_seconds(tmp_path: Path) -> None:
    (left, _), codes, took = in_processes("exchange_best", tmp_path, 10_000, 700)
    assert codes == [0, -9]
    assert took < 5.0
    assert "NaN: True" in left or left.startswith("error:"), left
