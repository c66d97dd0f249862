"""Decode attention by warpgroups on a GPU that has them: every case, lengths around edges, one launch on another."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from bodies import valid_here, wrong_of

from kerngen.runtime.launcher import Function
from kerngen.templates import Case, find_kernel
from kerngen.templates.attn_decode.spec import Config, Problem
from kerngen.timing.measure import check_function, compare, load

KERNEL = find_kernel("attn_decode")
# (num_splits, cluster): merged by a second launch, by clusters, and by both.
SPLITS = ((1, 1), (3, 1), (2, 2), (8, 8), (20, 4), (4, 4), (16, 8), (8, 2), (32, 1))
# (split_d, num_warps, num_stages, k_column_parts): one team of one warpgroup, two of them, one of two, if they fit;
# rings so small that two blocks share an SM, and that a piece is used while the next comes.
TEAMS = (
    (4, 8, 12, 4), (8, 8, 9, 4), (4, 4, 6, 2), (4, 8, 5, 2), (4, 4, 20, 4), (8, 8, 5, 4), (4, 4, 2, 2), (8, 8, 8, 2),
)  # fmt: skip
# Handed over from registers: pushed in clusters and merged there, or by a second launch; stored.
PUSHED = (
    (8, 8), (2, 2), (4, 4), (16, 8), (8, 2), (12, 4), (3, 1), (40, 1), (2, 1), (9, 1), (18, 1),
)  # fmt: skip
# As Gemma 4 has them: a window's layer and a full one, and one whose K and V another kernel has made.
WINDOW = Problem(256, 32, 16, window=1024, kv_len=8192, source="qkv", num_rotated_pairs=128)
FULL = Problem(512, 32, 4, kv_len=8192, source="qk", num_rotated_pairs=64)
PLAIN = Problem(512, 16, 2, kv_len=8192)
MODEL = [replace(p, q_len=q_len) for p in (WINDOW, FULL, PLAIN) for q_len in (1, 4, 5, 8)]
READY = [Problem(256, 32, 16, q_len, window=1024, kv_len=8192) for q_len in (1, 4)]
LENGTHS = (0, 1, 4, 5, 8, 15, 16, 17, 63, 64, 65, 79, 80, 81, 1023, 1024, 1025, 1029, 1087, 8192)


def _configs(case: Case, splits: tuple[int, int], count: int, first: int = 0, partial_bits: int = 0) -> list[Config]:
    """`count` of those that serve here, from the `first` on: the fewest blocks of rows that the registers allow.

    Columns that are fewer than are pushed at once stay in shared memory.
    """
    num_splits, cluster = splits
    if case.problem.head_dim // cluster < 32:
        partial_bits = 0
    found = []
    for split_d, num_warps, num_stages, k_column_parts in TEAMS:
        prefetch_stages = min((0, 3, 1)[len(found) % 3], num_stages - 1)
        shapes = [
            Config(m, 16, split_d, num_warps, num_stages, num_splits, "wgmma_ws", cluster, k_column_parts, partial_bits,
                   prefetch_stages)
            for m in range(64, 0, -8)
        ]  # fmt: skip
        found += valid_here(KERNEL, case, shapes)[:1]
    assert found
    return [found[(first + i) % len(found)] for i in range(min(count, len(found)))]


@cache
def _loaded(problem: Problem, config: Config) -> Function:
    return load(KERNEL, problem, config)


@pytest.mark.parametrize(("turn", "case"), list(enumerate(KERNEL.cases.CASES)), ids=str)
def test_by_warpgroups(turn: int, case: Case) -> None:
    """Each case takes its turn of the shapes and of the splits: the numbers of both have no common divisor."""
    configs = _configs(case, SPLITS[turn % len(SPLITS)], 1, turn)
    assert wrong_of(KERNEL, case, configs) == []


@pytest.mark.parametrize(("turn", "case"), list(enumerate(KERNEL.cases.CASES)), ids=str)
def test_pushed(turn: int, case: Case) -> None:
    """Each case in its turn, as above. No key at all, or fewer chunks than splits: then blocks push zeros and -inf."""
    configs = _configs(case, PUSHED[turn % len(PUSHED)], 1, turn, 16)
    assert wrong_of(KERNEL, case, configs) == []


def _require_right_at_lengths(problem: Problem, configs: tuple[Config, ...]) -> None:
    for config in configs:
        function = _loaded(problem, config)
        for kv_len in LENGTHS:
            case = KERNEL.cases.case_for(replace(problem, kv_len=kv_len))
            result = check_function(function, case)
            assert result.ok, f"{config} kv_len={kv_len}: {result.message}"


@pytest.mark.parametrize("problem", MODEL, ids=lambda p: f"{p.source}-d{p.head_dim}-q{p.q_len}")
def test_pushed_at_lengths_of_a_model(problem: Problem) -> None:
    """A window's and one more or less, and splits without keys among those of a cluster, or whole clusters of them."""
    full = KERNEL.cases.case_for(problem)
    _require_right_at_lengths(problem, (
        *_configs(full, (8, 8), 3, 0, 16), *_configs(full, (6, 2), 1, 4, 16), *_configs(full, (32, 8), 2, 2, 16),
        *_configs(full, (16, 4), 1, 5, 16), *_configs(full, (33, 1), 3, 1, 16), *_configs(full, (8, 1), 2, 4, 16),
        *_configs(full, (4, 1), 1, 2, 16), *_configs(full, (13, 1), 1, 6, 16),
    ))  # fmt: skip


@pytest.mark.parametrize("problem", MODEL, ids=lambda p: f"{p.source}-d{p.head_dim}-q{p.q_len}")
def test_at_lengths_of_a_model(problem: Problem) -> None:
    """One Function at every length: splits without keys, tiles of fewer chunks, rows whose windows begin elsewhere."""
    full = KERNEL.cases.case_for(problem)
    _require_right_at_lengths(problem, (
        *_configs(full, (8, 8), 3), *_configs(full, (8, 1), 1, 3), *_configs(full, (33, 1), 1, 1),
        *_configs(full, (32, 8), 2, 2), *_configs(full, (6, 2), 1, 4), *_configs(full, (16, 4), 1, 5),
    ))  # fmt: skip


def _windows(problem: Problem) -> list[Config]:
    """The default, and others of one team and keys in two parts, whose blocks may have a chunk beside their tiles."""
    rows = -(-problem.rows // 8) * 8
    ways = [  # (split_d, places, splits, cluster, on their way, asked into L2)
        (4, 6, 8, 8, 2, 2), (4, 6, 8, 8, 1, 26), (8, 4, 8, 8, 0, 1), (4, 2, 4, 4, 1, 5), (4, 5, 16, 8, 3, 0),
        (8, 9, 2, 2, 2, 7), (4, 3, 12, 4, 2, 3), (4, 12, 6, 2, 0, 9),
    ]  # fmt: skip
    configs = [
        Config(
            rows, 16, split_d, split_d, places, splits, "wgmma_ws", cluster, 2, 16, prefetch_stages, l2_prefetch_stages,
        )
        for split_d, places, splits, cluster, prefetch_stages, l2_prefetch_stages in ways
    ]  # fmt: skip
    return valid_here(KERNEL, KERNEL.cases.case_for(problem), configs)


@pytest.mark.parametrize("window", [1024, 100])
@pytest.mark.parametrize("q_len", [1, 2, 4, 5, 8])
@pytest.mark.parametrize(("head_dim", "source"), [(256, "q"), (256, "raw_q"), (128, "q"), (512, "q")])
def test_windows_with_a_chunk_beside_their_tiles(head_dim: int, source: str, q_len: int, window: int) -> None:
    """At all lengths whose last chunk has other keys, and at those around the window's; with a cap, in fp16 too."""
    turned = 0 if source == "q" else head_dim // 4
    problem = Problem(head_dim, 8, 4, q_len, window=window, kv_len=8192, source=source, num_rotated_pairs=turned)
    for turn, config in enumerate(_windows(problem)):
        its = replace(problem, dtype=("bf16", "fp16")[turn % 2], logit_cap=turn % 3 == 2)
        function = _loaded(its, config)
        for kv_len in (*LENGTHS, *range(2000 + turn, 2064, 5), window + q_len + 15, 5003):
            case = KERNEL.cases.case_for(replace(its, kv_len=kv_len))
            result = check_function(function, case)
            assert result.ok, f"{config} kv_len={kv_len}: {result.message}"


@pytest.mark.parametrize(
    ("head_dim", "group", "q_len", "page_size"),
    [(d, g, q, s) for (d, s), (g, q) in product(
        ((256, 48), (512, 16), (512, 80)), ((1, 3), (2, 5), (4, 7), (8, 2), (8, 6), (16, 4), (16, 8)))],
)  # fmt: skip
def test_groups_pages_and_ragged_batches(head_dim: int, group: int, q_len: int, page_size: int) -> None:
    for window, source in ((0, "q"), (40, "qkv")):
        turned = 0 if source == "q" else head_dim // 4
        problem = Problem(
            head_dim, 2 * group, 2, q_len, page_size, window, "bf16", False, 7, 700, source, turned,
        )  # fmt: skip
        lens = [0, q_len - 1, page_size - 1, page_size + 1, 0, 700, 39 + q_len]
        case = Case("ragged", problem, head_dim + group + q_len, {"kv_lens": lens})
        configs = [
            c for i, splits in enumerate(((3, 1), (4, 4), (6, 2)))
            for c in _configs(case, splits, 1, group + q_len * i)
        ] + [
            c for i, splits in enumerate(((8, 8), (4, 4), (6, 2), (5, 1), (2, 1), (12, 1)))
            for c in _configs(case, splits, 1, group + q_len * i, 16)
        ]  # fmt: skip
        assert wrong_of(KERNEL, case, configs) == []


@pytest.mark.parametrize("problem", [*MODEL, *READY], ids=lambda p: f"{p.source}-d{p.head_dim}-w{p.window}-q{p.q_len}")
def test_right_behind_another_with_the_same_bits(problem: Problem) -> None:
    """As in a forward: a launch begins while the one before it, of other inputs, still has the same workspace."""
    cases = [replace(KERNEL.cases.case_for(problem), seed=seed) for seed in range(3)]
    inputs: list[dict[str, Any]] = [KERNEL.cases.inputs(case, torch.device("cuda")) for case in cases]
    expected = [KERNEL.reference.expected(problem, given) for given in inputs]
    for config in (
        *_configs(cases[0], (8, 1), 2), *_configs(cases[0], (8, 8), 2), *_configs(cases[0], (16, 4), 1, 2),
        *_configs(cases[0], (8, 8), 3, 0, 16), *_configs(cases[0], (32, 8), 1, 1, 16),
        *_configs(cases[0], (16, 4), 1, 0, 16), *_configs(cases[0], (33, 1), 3, 0, 16),
        *_configs(cases[0], (8, 1), 1, 3, 16),
        *(_windows(problem)[:4] if problem.window else ()),
    ):  # fmt: skip
        function = _loaded(problem, config)
        given = [inputs[i % 3] | {"out": torch.full_like(inputs[i % 3]["out"], float("nan"))} for i in range(60)]
        torch.cuda.synchronize()
        for arguments in given:
            function.run(problem, arguments, in_forward=True)
        torch.cuda.synchronize()
        for i, arguments in enumerate(given):
            if i < 3:
                result = compare(KERNEL, cases[i], arguments, expected[i])
                assert result.ok, f"{config}, launch {i}: {result.message}"
            assert torch.equal(arguments["out"], given[i % 3]["out"]), f"{config}: launch {i} is another than {i % 3}"
