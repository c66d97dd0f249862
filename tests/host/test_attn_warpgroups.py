"""attn_decode by warpgroups without a GPU: refusals, launches, boxes, and by emulation who waits for whom and what lies
where. test_warpgroup_bodies.py builds it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import ceil, prod

import pytest
import torch
from test_tensor_maps import box_of

from kerngen.arch import Target, find_arch, find_device
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.templates import find_kernel
from kerngen.templates.attn_decode.spec import Config, Problem, partials, resident_cluster_blocks
from kerngen.templates.attn_decode.wgmma_ws import (
    TILE,
    fragment_combine,
    has_fragment_partials,
    receive_buffer,
    register_split,
    stage_bytes,
)
from kerngen.tuning.space import candidates

KERNEL = find_kernel("attn_decode")
H200 = Target.of(find_device("H200"))
FULL = Problem(512, 32, 4, q_len=4, source="qk", num_rotated_pairs=64)
CONFIG = Config(32, 16, 8, 8, 10, num_splits=33, body="wgmma_ws", k_column_parts=4)


def _fragment_partials(problem: Problem) -> Config:
    """Of one wave."""
    return next(c for c in KERNEL.candidates(problem, H200) if has_fragment_partials(c))


@pytest.mark.parametrize(("changes", "why"), [
    ({"split_d": 2}, "split_d=2: one warpgroup or two, 4 or 8 warps"),
    ({"num_warps": 12, "split_d": 4}, "num_warps=12: one warpgroup or two"),
    ({"num_warps": 16}, "num_warps=16: one warpgroup or two"),
    ({"num_warps": 4}, "num_warps=4 is no multiple of split_d=8"),
    ({"block_n": 32}, "block_n=32: any page is sure to hold boxes of 16 keys"),
    ({"block_m": 12}, "block_m=12: a multiple of 8 up to 64"),
    ({"block_m": 72}, "block_m=72: a multiple of 8 up to 64"),
    ({"block_m": 40}, "block_m=40: 32 rows fill 32"),
    ({"num_stages": 1}, "num_stages=1: one is in use, one awaited"),
    ({"num_stages": 33}, "bit for the phase of each; 2 to 32"),
    ({"num_stages": 3}, "65,536 B of results of 1 teams meet in a ring of 49,152 B"),
    ({"cluster": 3}, "cluster=3: a cluster has 1, 2, 4 or 8 blocks"),
    ({"cluster": 2}, "num_splits=33: whole clusters have them; a multiple of cluster=2"),
    ({"cluster": 3, "body": "mma", "num_stages": 2}, "cluster=3 is body=wgmma_ws's; cluster=1"),
    ({"body": "mma", "num_stages": 2}, "k_column_parts=4 is body=wgmma_ws's; k_column_parts=2"),
    ({"k_column_parts": 3}, "k_column_parts=3: 2 or 4 parts"),
    ({"num_splits": 0}, "num_splits=0: whole clusters have them"),
    ({"k_column_parts": 1}, "k_column_parts=1: 2 or 4 parts"),
    ({"num_stages": 13}, "B of shared memory"),
    ({"partial_bits": 8, "cluster": 8, "num_splits": 8}, "partial_bits=8: values are pushed in 16 bits"),
    ({"partial_bits": 16, "num_splits": 1}, "partial_bits=16: num_splits=1 leaves nothing to combine; 0"),
    ({"partial_bits": 16, "cluster": 8, "num_splits": 8}, "B of shared memory"),
    (
        {"partial_bits": 16, "body": "mma", "k_column_parts": 2, "num_stages": 2},
        "partial_bits=16 is body=wgmma_ws's; partial_bits=0",
    ),
    ({"l2_prefetch_stages": -1}, "l2_prefetch_stages=-1: after num_stages=10 at most 54"),
    ({"l2_prefetch_stages": 55}, "l2_prefetch_stages=55: after num_stages=10 at most 54"),
    (
        {"l2_prefetch_stages": 1, "body": "mma", "k_column_parts": 2, "num_stages": 2},
        "l2_prefetch_stages=1 is body=wgmma_ws's; l2_prefetch_stages=0",
    ),
], ids=str)  # fmt: skip
def test_refusals_say_what_decided(changes: dict[str, int], why: str) -> None:
    assert KERNEL.why_invalid(FULL, CONFIG, H200) is None
    assert why in (KERNEL.why_invalid(FULL, replace(CONFIG, **changes), H200) or "")


def test_rows_of_one_warpgroup_take_no_more_registers_than_there_are() -> None:
    many, config = replace(FULL, q_len=8), replace(CONFIG, block_m=64, split_d=4, num_warps=4, num_stages=8)
    assert "a thread holds 336 registers; with 24" in (KERNEL.why_invalid(many, config, H200) or "")


@pytest.mark.parametrize("problem", [
    Problem(256, 32, 16, window=1024), Problem(256, 32, 16, 4, window=1024), Problem(512, 32, 4, 4),
    Problem(512, 16, 2, 5, kv_len=5003, batch=7), Problem(256, 16, 8, batch=8),
], ids=str)  # fmt: skip
def test_no_product_is_waited_for_one_by_one(problem: Problem) -> None:
    """ptxas says so of a default (C7510 and those beside it) where accumulators are made by something else."""
    config = KERNEL.default_config(problem, H200)
    assert config.warpgroups
    assert "serialized" not in compile_cubin(render(KERNEL, problem, config, H200), H200.arch).log


def test_results_of_many_teams_need_the_room_of_the_rings() -> None:
    problem = Problem(128, 64, 4, q_len=4)
    config = Config(64, 16, 4, 8, 7, body="wgmma_ws")
    parts = replace(config, k_column_parts=4)
    assert KERNEL.why_invalid(problem, parts, H200) == (
        "k_column_parts=4: parts have whole blocks of 64 columns; 2 at most"
    )
    why = KERNEL.why_invalid(problem, config, H200)
    assert why == "65,536 B of results of 2 teams meet in a ring of 57,344 B"
    assert KERNEL.why_invalid(problem, replace(config, num_stages=8), H200) is None


@pytest.mark.parametrize("name", ["sm70", "sm80", "sm120"])
def test_others_have_no_such_products(name: str) -> None:
    problem = replace(FULL, dtype="fp16")
    assert "needs wgmma" in (KERNEL.why_invalid(problem, CONFIG, Target.of(find_arch(name))) or "")


def _is_wgmma_ws(config: Config) -> bool:
    return KERNEL.body(config, H200.arch).template == "wgmma_ws.cu.jinja"


def test_a_search_may_choose_it() -> None:
    found = candidates(KERNEL, FULL, H200).valid
    assert {_is_wgmma_ws(c) for c in found} == {False, True}
    assert {c.cluster for c in found if _is_wgmma_ws(c)} == {1, 2, 4, 8}
    assert {(c.cluster > 1, c.partial_bits) for c in found} == {(False, 0), (False, 16), (True, 0), (True, 16)}


# The heads of the models: (head_dim, q heads, kv heads, window).
HEADS = (
    (512, 32, 4, 0), (512, 16, 2, 0), (512, 16, 1, 0), (512, 8, 1, 0), (256, 32, 16, 1024), (256, 8, 2, 512),
    (128, 32, 8, 0),
)  # fmt: skip


def _problems(target: Target) -> Iterator[Problem]:
    """Steps of few sequences and of many, of few keys and of many, whose q is ready or made in the launch."""
    for (head_dim, heads, kv_heads, window), tokens, batch, keys, source in product(
        HEADS, (1, 2, 4, 5, 8), (1, 2, 7, 17, 32), (64, 512, 2048, 5003, 32768, 262144), ("q", "qk", "qkv")
    ):
        yield Problem(
            head_dim, heads, kv_heads, tokens, window=window, dtype=target.arch.dtype, batch=batch, kv_len=keys,
            source=source, num_rotated_pairs=0 if source == "q" else head_dim // 8,
        )  # fmt: skip


@pytest.mark.parametrize("board", ["V100", "A100", "H100", "H200", "RTX5090"])
def test_candidates_cover_rows_and_keys(board: str) -> None:
    target = Target.of(find_device(board))
    for problem in _problems(target):
        found = KERNEL.candidates(problem, target)
        assert 1 <= len(found) <= 12, (problem, len(found))
        assert {type(config.num_splits) for config in found} == {int}
        for config in found:
            decode, *_ = KERNEL.launches(problem, config, target)
            m_blocks = ceil(problem.rows / config.block_m)
            assert prod(decode.grid) == m_blocks * config.num_splits * problem.num_kv_heads * problem.batch
            assert m_blocks * config.block_m - problem.rows < config.block_m, "no block has padding alone"
            tile = TILE if config.warpgroups else config.block_n
            assert (config.num_splits - 1) * tile < max(problem.visible, 1), (problem, config)


@pytest.mark.parametrize("board", ["H100", "H200"])
def test_candidates_in_clusters_are_resident_and_fragment_partials_use_most_sms(board: str) -> None:
    target = Target.of(find_device(board))
    sms, seen = target.device.num_sms, Counter[str]()
    for problem, config in ((p, c) for p in _problems(target) for c in KERNEL.candidates(p, target)):
        blocks = prod(KERNEL.launches(problem, config, target)[0].grid)
        if config.cluster > 1:
            seen[f"cluster={config.cluster}"] += 1
            # Clusters of four and eight leave SMs of a GPC over.
            held = register_split(problem, config, target.arch)[0] * resident_cluster_blocks(target)
            assert config.cluster == 2 or blocks <= held, (problem, config)
        if has_fragment_partials(config):
            seen["has_fragment_partials"] += 1
            share = blocks / (ceil(blocks / sms) * sms)
            few_keys = config.num_splits == ceil(problem.visible / (2 * TILE if problem.head_dim == 512 else TILE))
            assert share > 0.5 or few_keys, (problem, config)
            _, combine = KERNEL.launches(problem, config, target)
            # Those that merge find room beside: two on an SM that has a block of those, eight where there is none.
            assert combine.grid[0] <= 2 * min(blocks, sms) + 8 * max(0, sms - blocks)
    assert set(seen) == {"cluster=2", "cluster=4", "cluster=8", "has_fragment_partials"}


def test_a_board_of_few_sms_gets_clusters_that_it_holds() -> None:
    problem = Problem(512, 16, 2, q_len=4, kv_len=8192, source="qk", num_rotated_pairs=64)
    assert any(c.cluster == 8 for c in KERNEL.candidates(problem, H200))
    few = Target(H200.arch, replace(H200.device, num_sms=16))
    assert not any(c.cluster == 8 and c.num_splits > 8 for c in KERNEL.candidates(problem, few))


@pytest.mark.parametrize(("config", "says"), [
    (replace(CONFIG, prefetch_stages=CONFIG.num_stages), "fewer, or 0 for all"),
    (Config(8, 16, 4, 8, 4, 32, prefetch_stages=4), "prefetch_stages=4 of num_stages=4: fewer, or 0 for all"),
    (Config(8, 16, 4, 8, 4, 32, prefetch_stages=3), None),
])  # fmt: skip
def test_fewer_tiles_are_on_their_way_than_there_is_room_for(config: Config, says: str | None) -> None:
    why = KERNEL.why_invalid(FULL, config, H200)
    assert why is None if says is None else says in str(why)
    older = KERNEL.why_invalid(
        replace(FULL, dtype="fp16"), replace(config, prefetch_stages=1), Target.of(find_arch("sm80"))
    )
    assert "prefetch_stages=1 is for launches that begin before others end" in str(older)


def test_few_splits_are_merged_several_chunks_at_a_time() -> None:
    """A lane has up to nine loads under way, whatever the splits."""
    problem = Problem(512, 16, 2, q_len=5, kv_len=5003, batch=7)
    chosen = _fragment_partials(problem)
    for splits, lanes, chunks_at_once in (
        (2, 8, 16), (3, 8, 8), (4, 8, 8), (5, 8, 4), (9, 8, 4), (10, 16, 2), (18, 16, 2), (19, 32, 1), (132, 32, 1)
    ):  # fmt: skip
        config = replace(chosen, num_splits=splits)
        assert fragment_combine(problem, config)[4:] == (lanes, chunks_at_once), splits
        of_lane = chunks_at_once * lanes // 32
        assert splits > 36 or of_lane * -(-splits * 8 // lanes) <= 9
        constants = KERNEL.spec.constants(problem, config, H200.arch)
        assert (constants["CHUNK_LANES"], constants["SPAN"]) == (lanes, chunks_at_once)
    decode, combine = KERNEL.launches(problem, chosen, H200)
    assert (prod(decode.grid), combine.grid[0] * 4) == (126, 7 * 2 * 20 * 16 // 4), "each warp has one span"


def test_blocks_that_store_leave_room_for_those_that_merge() -> None:
    """Or the next launch's blocks could not begin before those have ended: registers and shared memory of an SM."""
    for problem, beside in (
        (Problem(512, 32, 4), 2), (Problem(512, 32, 4, q_len=4), 2), (Problem(512, 8, 1, q_len=2, kv_len=32768), 2),
        (Problem(512, 8, 1, q_len=4, kv_len=32768), 1),  # 132 splits
        (Problem(512, 16, 2, q_len=5, kv_len=5003, batch=7), 2),  # registers are dealt
        (Problem(256, 32, 16, q_len=4, window=1024, source="qkv", num_rotated_pairs=128), 2),
    ):  # fmt: skip
        config = _fragment_partials(problem)
        bound = KERNEL.spec.bound_threads(problem, config, H200.arch)["attn_decode"]
        assert f"__launch_bounds__({bound}, BLOCKS_PER_SM)" in render(KERNEL, problem, config, H200)
        granted = [H200.arch.registers_of(threads) for threads in (bound, bound - 128)]
        _, copiers, most, _ = register_split(problem, config, H200.arch)
        at_first = most if copiers == 1 else (config.num_warps * most + 4 * 32) // (config.num_warps + 4)
        assert granted[0] <= at_first < granted[1]
        decode, combine = KERNEL.launches(problem, config, H200)
        built = compile_cubin(render(KERNEL, problem, config, H200), H200.arch)
        registers, threads = 0, (-(-decode.block[0] // 128) * 128, combine.block[0])
        for entry, its_threads, blocks in (("attn_decode", threads[0], 1), ("attn_combine", threads[1], beside)):
            its = built.entries[entry]
            assert its.spill_store_bytes == 0
            registers += blocks * its_threads * (-(-its.registers // 8) * 8)
        assert registers <= H200.arch.regs_per_sm, config
        assert decode.smem_bytes + 3 * H200.arch.reserved_smem_bytes <= H200.arch.smem_per_sm
        assert combine.grid[0] <= 2 * prod(decode.grid) + 8 * (H200.device.num_sms - prod(decode.grid))


@pytest.mark.parametrize(("head_dim", "split_d"), [(128, 4), (256, 8), (512, 4), (512, 8)])
def test_each_value_is_stored_where_a_lane_of_the_merge_finds_it(head_dim: int, split_d: int) -> None:
    """fragment_partials.cuh.jinja: who stores which columns of which rows, in which 16 bytes; who merges them."""
    problem = Problem(head_dim, 16, 2, q_len=5)
    config = Config(24, 16, split_d, 8, 8, 5, body="wgmma_ws", partial_bits=16)
    blocks, parts = 2, split_d // 4
    _, _, pairs, of_pair, _, _ = fragment_combine(problem, config)
    assert (pairs, of_pair) == (12, head_dim // (16 * blocks))
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # (pair, chunk, lane g): (row, column) in its words
    for part, w, i, j, t, g in product(
        range(parts), range(4), range(0, head_dim // 64 // parts, blocks), range(3), range(4), range(8)
    ):
        chunk = (part * (head_dim // 64 // parts) + i) // blocks * 4 + w
        cells = [
            (j * 8 + 2 * t + e, (part * (head_dim // 64 // parts) + i + n) * 64 + w * 16 + h * 8 + g)
            for n, h, e in product(range(blocks), range(2), range(2))
        ]
        assert found.setdefault((j * 4 + t, chunk, g), cells) is cells
    assert {key[:2] for key in found} == set(product(range(pairs), range(of_pair)))
    merged: Counter[tuple[int, int]] = Counter()
    for pair, chunk, lane in product(range(pairs), range(of_pair), range(32)):
        first, g, m = lane // 8, lane % 8, lane % 4
        if first >= blocks:
            continue
        # By `transposed` lane m of four has the m-th value of each of the four: row m % 2 at columns 8 (m / 2) on.
        row, column = 2 * pair + m % 2, (chunk // 4 * blocks + first) * 64 + chunk % 4 * 16 + m // 2 * 8 + g // 4 * 4
        had = [found[pair, chunk, g // 4 * 4 + k][first * 4 + m] for k in range(4)]
        assert had == [(row, column + k) for k in range(4)]
        merged.update(had)
    assert merged == Counter(product(range(24), range(head_dim)))
    # Two KV heads, of 40 rows each in two blocks of 24; five splits.
    assert KERNEL.workspace_bytes(problem, config, H200) == 2 * 2 * (12 * of_pair * 5 * 128 + 24 * 5 * 4)


def test_launches_have_warps_that_copy() -> None:
    """One; or four, where the registers of all are dealt out. Splits are merged as those of other bodies."""
    decode, combine = KERNEL.launches(FULL, CONFIG, H200)
    assert (decode.grid, decode.block, decode.reads_ahead) == ((33, 4, 1), (9 * 32, 1, 1), True)
    apart = KERNEL.launches(FULL, Config(32, 16, 4, 8, 4, 33), H200)
    assert combine == apart[1]
    assert KERNEL.workspace_bytes(FULL, CONFIG, H200) == 4 * 32 * 33 * (512 + 1) * 4
    one_each = replace(CONFIG, split_d=4)
    assert register_split(FULL, one_each, H200.arch) == (1, 4, 232, 12 * 32)
    assert KERNEL.launches(FULL, one_each, H200)[0].block == (12 * 32, 1, 1)


def test_two_blocks_share_an_sm_where_they_fit() -> None:
    problem, config = Problem(512, 32, 4), Config(8, 16, 4, 4, 6, body="wgmma_ws", k_column_parts=4)
    assert register_split(problem, config, H200.arch) == (2, 1, 128, 8 * 32)
    assert 2 * (KERNEL.smem_bytes(problem, config, H200) + 1024) <= H200.arch.smem_per_sm
    assert register_split(problem, replace(config, num_stages=7), H200.arch) == (1, 1, 255, 8 * 32)
    assert register_split(replace(problem, q_len=3), replace(config, block_m=24, num_stages=4), H200.arch) == (
        2, 4, 224, 8 * 32,
    )  # fmt: skip


def test_what_is_compiled_leaves_room_for_the_second_block() -> None:
    """An SM's registers are dealt out by four warps of a block and eight registers of a thread."""
    window = Problem(256, 32, 16, window=1024)
    for problem, config in (
        (Problem(512, 32, 4), Config(8, 16, 8, 8, 5, 8, body="wgmma_ws", cluster=8, k_column_parts=4)),
        (Problem(512, 32, 4), Config(8, 16, 4, 4, 3, 48, "wgmma_ws", 8)),
        (window, Config(8, 16, 4, 8, 11, 8, body="wgmma_ws", cluster=8, k_column_parts=4)),
        (window, Config(8, 16, 4, 4, 12, 8, body="wgmma_ws", cluster=8, k_column_parts=4)),
        (replace(window, q_len=4, source="qkv", num_rotated_pairs=128), Config(8, 16, 4, 4, 5, 1, body="wgmma_ws")),
        (Problem(512, 32, 4, q_len=2), Config(16, 16, 8, 8, 4, 32, "wgmma_ws", 8, 4)),
    ):
        blocks, copiers, _, _ = register_split(problem, config, H200.arch)
        assert blocks == 2
        takes = compile_cubin(render(KERNEL, problem, config, H200), H200.arch).entries["attn_decode"]
        warps = -(-(config.num_warps + copiers) // 4) * 4
        assert takes.spill_store_bytes == 0
        assert blocks * warps * 32 * (-(-takes.registers // 8) * 8) <= H200.arch.regs_per_sm, config


def test_clusters_leave_fewer_results_to_merge_or_none() -> None:
    config = replace(CONFIG, num_splits=8)
    for cluster in (1, 2, 4, 8):
        config = replace(config, cluster=cluster)
        decode, *combine = KERNEL.launches(FULL, config, H200)
        assert (decode.grid, decode.cluster) == ((8, 4, 1), (cluster, 1, 1))
        assert partials(config) == 8 // cluster
        assert len(combine) == (cluster < 8)
        assert KERNEL.workspace_bytes(FULL, config, H200) == (4 * 32 * (8 // cluster) * 513 * 4 if cluster < 8 else 0)


@pytest.mark.parametrize(("m_blocks", "num_splits", "cluster"), [(1, 8, 8), (3, 8, 2), (2, 16, 4), (3, 5, 1)])
def test_a_cluster_has_consecutive_splits_of_the_same_rows(m_blocks: int, num_splits: int, cluster: int) -> None:
    """Place of shape.cuh.jinja, and who takes which 128 columns of which row of a cluster's result."""
    places = []
    for first in range(0, m_blocks * num_splits, cluster):
        blocks = range(first, first + cluster)
        splits = [x // (m_blocks * cluster) * cluster + x % cluster for x in blocks]
        rows = {x // cluster % m_blocks for x in blocks}
        assert splits == list(range(splits[0], splits[0] + cluster))
        assert splits[0] % cluster == 0
        assert len(rows) == 1
        places += [(s, *rows) for s in splits]
    assert sorted(places) == list(product(range(num_splits), range(m_blocks)))
    for num_warps, items in product((4, 8), (1, 2, 40 * 4)):
        taken = Counter(
            i for rank in range(cluster) for w in range(num_warps)
            for i in range(rank + w * cluster, items, num_warps * cluster)
        )  # fmt: skip
        assert taken == Counter(range(items))


@pytest.mark.parametrize("config", [
    Config(8, 16, 8, 8, 8, 2, "wgmma_ws", 2, 2, 16), Config(8, 16, 4, 4, 8, 8, "wgmma_ws", 8, 2, 16),
], ids=["warpgroups", "blocks"])  # fmt: skip
def test_fewer_columns_than_a_chunk_has_are_not_pushed(config: Config) -> None:
    """Of a warpgroup, whose 64 are one block of columns, or of a block of a cluster."""
    problem, why = (
        Problem(128, 16, 2),
        "partial_bits=16: 32 columns are pushed at once, of 8 parts of head_dim=128 each",
    )
    assert KERNEL.why_invalid(problem, config, H200) == why
    assert KERNEL.why_invalid(problem, replace(config, partial_bits=0), H200) is None


def test_one_team_that_pushes_needs_no_room_for_results_in_its_ring() -> None:
    batch = Problem(512, 16, 2, q_len=5, batch=7, kv_len=5003)
    config = Config(40, 16, 8, 8, 4, 8, body="wgmma_ws", cluster=8, k_column_parts=4)
    assert "meet in a ring of 65,536 B" in (KERNEL.why_invalid(batch, config, H200) or "")
    assert KERNEL.why_invalid(batch, replace(config, partial_bits=16), H200) is None
    assert receive_buffer(batch, replace(config, partial_bits=16))[1] == 40 * 512 * 2 + 20 * 8 * 8 + 16
    # Of a window's two rows nobody pushes the six that pad them.
    window = Problem(256, 32, 16, window=1024)
    one = Config(8, 16, 4, 4, 6, 8, body="wgmma_ws", cluster=8, partial_bits=16)
    assert receive_buffer(window, one)[1] == 2 * 256 * 2 + 8 * 8 + 16


@pytest.mark.parametrize(
    ("head_dim", "cluster"), [c for c in product((128, 256, 512), (2, 4, 8)) if c[0] // c[1] >= 32]
)
def test_each_column_is_pushed_to_one_block_which_finds_it(head_dim: int, cluster: int) -> None:
    """dsmem_reduce.cuh.jinja: Slot, who pushes which columns of which rows, and who merges them."""
    config = Config(64, 16, 4, 4, 8, 2 * cluster, "wgmma_ws", cluster, 2, 16)
    columns, _ = receive_buffer(Problem(head_dim), config)
    blocks = 2  # of 64 columns, that a chunk has 16 of each of
    chunks, units = columns // (16 * blocks), head_dim // columns

    def turn(pair: int) -> int:
        return pair * max(cluster // 4, 1) if units % cluster == 0 else 0

    for num_rows in (1, 2, 5, 8, 39, 64):
        num_pairs = (num_rows + 1) // 2
        slots = -(-num_pairs * units // cluster)
        pushed: dict[tuple[int, int, int], set[tuple[int, int]]] = {}  # (rank, slot, chunk of it): rows, columns
        for pair, chunk in product(range(num_pairs), range(head_dim // (16 * blocks))):
            i = pair * units + chunk // chunks
            rank, slot = (i + turn(pair)) % cluster, i // cluster
            assert slot < slots
            cells = product(range(2), range(blocks), range(2), range(8))
            its = {(2 * pair + e, (chunk // 4 * blocks + n) * 64 + chunk % 4 * 16 + h * 8 + g) for e, n, h, g in cells}
            assert pushed.setdefault((rank, slot, chunk % chunks), its) is its, "nobody else is pushed there"
        merged: Counter[tuple[int, int]] = Counter()
        for rank in range(cluster):
            for slot in range((num_pairs * units + cluster - 1 - rank) // cluster):
                unit = slot * cluster + (rank - turn(slot * cluster // units)) % cluster
                for chunk in range(chunks):
                    of_pair, found = unit % units * chunks + chunk, set()
                    for g, n, x in product(range(8), range(blocks), range(4)):
                        m = g % 4
                        first = (of_pair // 4 * blocks + n) * 64 + of_pair % 4 * 16 + m // 2 * 8 + g // 4 * 4
                        found.add((unit // units * 2 + m % 2, first + x))
                    assert found == pushed.pop((rank, slot, chunk))
                    merged.update(found)
        assert not pushed
        assert merged == Counter(product(range(num_pairs * 2), range(head_dim)))
        if num_rows >= 8 and units % cluster == 0:  # a warp's store is for several blocks
            assert len({turn(t) % cluster for t in range(4)}) == min(cluster, 4)


def test_what_pushes_compiles_to_what_fits() -> None:
    window, batch = Problem(256, 32, 16, window=1024), Problem(512, 16, 2, q_len=5, batch=7, kv_len=5003)
    for problem, config, two in (
        (window, Config(8, 16, 4, 4, 6, 8, "wgmma_ws", 8, 2, 16), True),
        (replace(window, q_len=4), Config(8, 16, 4, 4, 6, 8, "wgmma_ws", 8, 2, 16), True),
        (batch, Config(40, 16, 8, 8, 8, 8, "wgmma_ws", 8, 4, 16), False),
        (FULL, Config(32, 16, 4, 8, 8, 24, "wgmma_ws", 8, 4, 16), False),
    ):
        blocks, copiers, _, _ = register_split(problem, config, H200.arch)
        assert blocks == 1 + two
        cubin = compile_cubin(render(KERNEL, problem, config, H200), H200.arch)
        takes, warps = cubin.entries["attn_decode"], -(-(config.num_warps + copiers) // 4) * 4
        assert takes.spill_store_bytes == 0
        assert blocks * warps * 32 * (-(-takes.registers // 8) * 8) <= H200.arch.regs_per_sm, config
        assert "serialized" not in cubin.log


class _Barrier:
    """An mbarrier: a phase ends with its arrivals and the bytes that were announced."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.phase = self.combine_tiles = 0

    def arrive(self, expected: int = 0) -> None:
        self.pending -= 1
        self.combine_tiles += expected
        self._end()

    def come(self) -> None:
        self.combine_tiles -= 1
        self._end()

    def _end(self) -> None:
        if self.pending == 0 and self.combine_tiles == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals

    def passed(self, parity: int) -> Callable[[], bool]:
        return lambda: self.phase % 2 != parity


def _pieces_of(tile: int, num_chunks: int, k_column_parts: int) -> int:
    """Of its keys and values."""
    count = min(4, num_chunks - tile * 4)
    return k_column_parts - -count * k_column_parts // 4


def _run(
    num_chunks: int, stages: int, teams: int, warpgroups: int, k_column_parts: int, rng: random.Random
) -> list[int]:
    """A block's copier and warpgroups in any order, and copies that come in any order. Returns the pieces as used.

    An agent yields what it waits for; a place whose piece is in use must hold just that piece.
    """
    free = [_Barrier(warpgroups) for _ in range(stages)]
    full = [[_Barrier(1) for _ in range(stages)] for _ in range(teams)]
    place: list[tuple[int, int] | None] = [None] * stages  # tile and number in it of what lies there
    coming: list[Callable[[], None]] = []
    used: list[int] = []

    def copier() -> Iterator[Callable[[], bool]]:
        stage, parity = 0, 0
        for tile in range(-(-num_chunks // 4)):
            for piece in range(_pieces_of(tile, num_chunks, k_column_parts)):
                yield free[stage].passed(parity ^ 1)
                barrier, at, what = full[tile % teams][stage], stage, (tile, piece)
                barrier.arrive(expected=1)
                place[at] = None

                def come(barrier: _Barrier = barrier, at: int = at, what: tuple[int, int] = what) -> None:
                    place[at] = what
                    barrier.come()

                coming.append(come)
                stage += 1
                if stage == stages:
                    stage, parity = 0, parity ^ 1

    def warpgroup(team: int) -> Iterator[Callable[[], bool]]:
        parities = [0] * stages
        for tile in range(team, -(-num_chunks // 4), teams):
            stage, in_use = tile * 2 * k_column_parts % stages, list[tuple[int, int]]()
            num_pieces = _pieces_of(tile, num_chunks, k_column_parts)
            for piece in range(num_pieces):
                yield full[team][stage].passed(parities[stage])
                parities[stage] ^= 1
                in_use.append((stage, piece))
                used.append(tile * 8 + piece)
                stage = (stage + 1) % stages
                ends = piece in (k_column_parts - 1, num_pieces - 1)  # scores are made, or the tile is done
                yield lambda: True
                for at, what in in_use:
                    assert place[at] == (tile, what)
                for at, _ in in_use if ends else in_use[:-1]:
                    free[at].arrive()
                in_use = [] if ends else in_use[-1:]

    agents = [copier(), *(warpgroup(t) for t in range(teams) for _ in range(warpgroups))]
    waits: dict[int, Callable[[], bool]] = dict.fromkeys(range(len(agents)), lambda: True)
    while waits:
        ready = [i for i, passed in waits.items() if passed()]
        if coming and (not ready or rng.random() < 0.3):
            coming.pop(rng.randrange(len(coming)))()
            continue
        assert ready, f"{num_chunks} chunks, {stages} places, {teams} teams: all wait for ever"
        i = rng.choice(ready)
        try:
            waits[i] = next(agents[i])
        except StopIteration:
            del waits[i]
    assert not coming
    return used


@pytest.mark.parametrize(("teams", "warpgroups"), [(1, 1), (1, 2), (2, 1)])
def test_pieces_are_used_as_they_lie_and_nobody_waits_for_ever(teams: int, warpgroups: int) -> None:
    rng = random.Random(teams)
    for k_column_parts, num_chunks in product((2, 4), (0, 1, 3, 4, 5, 8, 13, 30, 33)):
        combine_tiles = [
            tile * 8 + i for tile in range(-(-num_chunks // 4))
            for i in range(_pieces_of(tile, num_chunks, k_column_parts))
        ]  # fmt: skip
        for stages in (2, 3, 4, 5, 7, 8, 11, 16, 24, 32):
            used = _run(num_chunks, stages, teams, warpgroups, k_column_parts, rng)
            assert Counter(used) == Counter(dict.fromkeys(combine_tiles, warpgroups))


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 16), (256, 48), (512, 64)])
def test_a_box_of_values_is_contiguous_and_lies_in_blocks(head_dim: int, page_size: int) -> None:
    """[8 rows after 8][64 columns after 64][8][64], of any 16 keys that begin at a multiple of 16."""
    problem = Problem(head_dim, 8, 2, page_size=page_size)
    config = Config(8, 16, 4, 4, 8, body="wgmma_ws")
    cache = torch.randint(0, 2**15, (3, 2, page_size, head_dim)).to(torch.int16)
    seen = KERNEL.tensor_map(problem, config, "v_cache", tuple(cache.shape))
    assert seen is not None
    page, head, first = 2, 1, page_size - 16
    brought = box_of(cache, seen, (0, 0, 0, first // 8, page * 2 + head))
    rows = cache[page, head, first : first + 16]
    assert torch.equal(brought[0], rows.reshape(2, 8, head_dim // 64, 64).transpose(1, 2))
    assert KERNEL.tensor_map(problem, config, "k_cache", (0, 2, page_size, head_dim)) is None, "no copy without keys"


def _read_as_rows(smem: torch.Tensor, at: int, stride: int, step: int) -> torch.Tensor:
    """[64 keys][16 columns] as a product reads them from byte `at + step`: eight rows after eight `stride` bytes on,
    swizzled by the bits of the address."""
    found = torch.empty((TILE, 16), dtype=smem.dtype)
    for row, half in product(range(TILE), range(2)):
        address = at + row // 8 * stride + row % 8 * 128 + step + half * 16
        address ^= (address >> 7 & 7) << 4
        found[row, half * 8 : half * 8 + 8] = smem[address // 2 : address // 2 + 8]
    return found


@pytest.mark.parametrize(
    ("head_dim", "page_size", "k_column_parts"), [(128, 16, 2), (256, 48, 4), (512, 64, 4), (512, 64, 2)]
)
def test_products_find_keys_where_boxes_bring_them(head_dim: int, page_size: int, k_column_parts: int) -> None:
    """A tile of keys whose chunks lie in pages anywhere, a part of its columns after another."""
    problem = Problem(head_dim, 8, 2, page_size=page_size)
    config = Config(8, 16, 4, 4, 8, body="wgmma_ws", k_column_parts=k_column_parts)
    cache = torch.randint(0, 2**15, (9, 2, page_size, head_dim)).to(torch.int16)
    seen = KERNEL.tensor_map(problem, config, "k_cache", tuple(cache.shape))
    assert seen is not None
    columns, head = head_dim // k_column_parts, 1
    assert TILE * columns * 2 == stage_bytes(problem, config)
    where = [(5, 0), (2, page_size - 16), (8, 0), (0, page_size - 16)]  # page and first row of each chunk
    keys = torch.cat([cache[page, head, first : first + 16] for page, first in where])
    for part in range(k_column_parts):
        smem = torch.zeros(TILE * columns, dtype=torch.int16)
        for chunk, (page, first) in enumerate(where):
            box = box_of(cache, seen, (0, 0, part * (columns // 64), first // 8, page * 2 + head)).reshape(-1, 8, 8)
            for line, sixteen in product(range(len(box)), range(8)):  # 128 bytes of 16 each, swizzled as they land
                address = chunk * 16 * columns * 2 + line * 128 + sixteen * 16
                address ^= (address >> 7 & 7) << 4
                smem[address // 2 : address // 2 + 8] = box[line, sixteen]
        for k in range(columns // 16):
            its = keys[:, part * columns + k * 16 :][:, :16]
            assert torch.equal(_read_as_rows(smem, k // 4 * 1024, columns * 16, k % 4 * 32), its)
        for row, chunk in product(range(TILE), range(columns // 8)):  # `placed`, where keys are put by hand
            at = row // 8 * (columns * 16) + chunk // 8 * 1024 + row % 8 * 128 + (chunk % 8 ^ row % 8) * 16
            assert torch.equal(smem[at // 2 : at // 2 + 8], keys[row, part * columns + chunk * 8 :][:8])
