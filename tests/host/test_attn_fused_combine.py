"""attn_decode's fused combine without a GPU: refusals, launches, pieces, builds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest

from kerngen.arch import ARCHES, Arch, Target, find_arch, find_device
from kerngen.compiler.compile import compile_cubin, require_target
from kerngen.compiler.render import render
from kerngen.errors import ToolchainError
from kerngen.templates import find_kernel
from kerngen.templates.attn_decode.spec import Config, Problem, combine_tiles
from kerngen.templates.kernel import Case
from kerngen.tuning.space import candidates

KERNEL = find_kernel("attn_decode")
H200 = Target.of(find_device("H200"))
WINDOW = Problem(256, 32, 16, window=1024, source="qkv", num_rotated_pairs=128)
FULL = Problem(512, 32, 4, source="qk", num_rotated_pairs=64)
NEWER = [a for a in ARCHES.values() if a.has_ldmatrix]
SHAPES = [(8, 1, 1), (8, 2, 1), (8, 1, 3), (8, 8, 1), (16, 8, 5), (32, 16, 8), (32, 8, 4)]  # block_m, group, q_len


def _config(problem: Problem, target: Target, num_splits: int, fused_combine: bool = True) -> Config:
    """By mma.sync, the candidate whose warps share a tile most: what waits of warpgroups' blocks is none's."""
    found = (c for c in KERNEL.candidates(problem, target) if c.body == "mma")
    return replace(max(found, key=lambda c: c.split_d), num_splits=num_splits, fused_combine=fused_combine)


# ---- refusals


def test_refusals_say_what_decided() -> None:
    whole = _config(FULL, H200, 33)
    assert KERNEL.why_invalid(FULL, whole, H200) is None, "4 * 33 blocks, an SM each"
    why = KERNEL.why_invalid(FULL, replace(whole, num_splits=34), H200)
    assert why == "fused_combine=True: 136 blocks wait for each other, and 132 SMs hold one each; at most 132"
    assert "136 blocks" in (KERNEL.why_invalid(replace(FULL, batch=2), replace(whole, num_splits=17), H200) or "")
    assert "num_splits=1" in (KERNEL.why_invalid(FULL, replace(whole, num_splits=1), H200) or "")
    assert KERNEL.why_invalid(FULL, replace(whole, num_splits=1, fused_combine=False), H200) is None
    assert KERNEL.why_invalid(FULL, replace(whole, num_splits=34, fused_combine=False), H200) is None


def test_rows_of_several_blocks_count() -> None:
    """128 rows are 4 blocks of 32, each with its own splits."""
    problem = Problem(256, 32, 2, q_len=8)
    config = replace(_config(problem, H200, 16), block_m=32)
    assert KERNEL.why_invalid(problem, config, H200) is None
    assert "136 blocks" in (KERNEL.why_invalid(problem, replace(config, num_splits=17), H200) or "")


def test_a_smaller_board_holds_fewer() -> None:
    l4 = Target.of(find_device("L4"))
    config = _config(FULL, l4, 15)
    assert l4.device.num_sms < 4 * 15
    assert f"{l4.device.num_sms} SMs" in (KERNEL.why_invalid(FULL, config, l4) or "")


def test_volta_launches_twice() -> None:
    target = Target.of(find_arch("sm70"))
    problem = replace(FULL, dtype="fp16")
    config = _config(problem, target, 4)
    assert "fused_combine=False serves" in (KERNEL.why_invalid(problem, config, target) or "")
    assert len(KERNEL.launches(problem, replace(config, fused_combine=False), target)) == 2
    assert not any(c.fused_combine for c in candidates(KERNEL, problem, target).valid)


def test_no_search_chooses_it_before_a_gpu_has_confirmed_it() -> None:
    found = candidates(KERNEL, FULL, H200).valid
    assert {c.num_splits for c in found} >= {2, 8, 33, 66}
    assert not any(c.fused_combine for c in found if not c.warpgroups)
    bodies = [KERNEL.body(replace(_config(FULL, H200, 8), fused_combine=t), H200.arch) for t in (False, True)]
    assert [body.proven for body in bodies] == [True, False]


# ---- launches and the workspace


@pytest.mark.parametrize("problem", [WINDOW, FULL], ids=["window", "full"])
def test_one_launch_whose_blocks_wait_for_each_other(problem: Problem) -> None:
    config = _config(problem, H200, 8)
    (launch,) = KERNEL.launches(problem, config, H200)
    first, second = KERNEL.launches(problem, replace(config, fused_combine=False), H200)
    meeting = 16  # bytes where teams meet, which those have no registers for
    assert launch == replace(first, cooperative=True, smem_bytes=first.smem_bytes - meeting)
    assert not first.cooperative
    assert second.entry == "attn_combine"
    assert prod(launch.grid) <= H200.device.num_sms


@pytest.mark.parametrize("problem", [WINDOW, FULL], ids=["window", "full"])
def test_traffic_has_no_second_launch_but_waits(problem: Problem) -> None:
    config = _config(problem, H200, 8)
    fused_combine = KERNEL.traffic(problem, config, H200)
    apart = KERNEL.traffic(problem, replace(config, fused_combine=False), H200)
    assert fused_combine is not None
    assert apart is not None
    assert (len(fused_combine), len(apart)) == (1, 2)
    assert fused_combine[0].waits == apart[0].waits + 2
    assert (fused_combine[0].l2_bytes or 0) > (apart[0].l2_bytes or 0)


@pytest.mark.parametrize(("block_m", "group", "q_len"), SHAPES)
@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_pieces_cover_what_a_block_writes(head_dim: int, block_m: int, group: int, q_len: int) -> None:
    problem = Problem(head_dim, 2 * group, 2, q_len=q_len)
    for num_splits in (2, 3, 5, 8, 13, 33, 132):
        config = Config(block_m=block_m, num_splits=num_splits, fused_combine=True)
        piece, owners, piece_rows, cell = combine_tiles(problem, config)
        quads = min(block_m, problem.rows) * head_dim // 4
        assert piece % 8 == 0, "whole lines"
        assert owners <= num_splits
        assert (owners - 1) * piece < quads <= owners * piece
        touched = [{q // (head_dim // 4) for q in range(i * piece, min((i + 1) * piece, quads))} for i in range(owners)]
        assert max(map(len, touched)) == piece_rows
        assert cell - piece >= piece_rows / 4, "a place for the lse of each"


def test_workspace_has_a_place_for_each_word() -> None:
    """Two rows of 64 quads between 8 blocks: pieces of 16, each in a row, from each of 8 splits, with a line of lse."""
    config = _config(WINDOW, H200, 8)
    assert combine_tiles(WINDOW, config) == (16, 8, 1, 16 + 8)
    one = 8 * 8 * (16 * 16 + 128)
    assert KERNEL.workspace_bytes(WINDOW, config, H200) == 16 * one
    assert KERNEL.workspace_bytes(replace(WINDOW, batch=3), config, H200) == 48 * one
    # Three rows among 5 blocks: pieces of 40 quads, which touch two rows.
    three = Problem(256, 2, 2, q_len=3)
    config = replace(config, num_splits=5)
    assert combine_tiles(three, config) == (40, 5, 2, 40 + 8)
    assert KERNEL.workspace_bytes(three, config, H200) == 2 * 5 * 5 * (40 * 16 + 128)
    assert KERNEL.workspace_bytes(three, replace(config, num_splits=1, fused_combine=False), H200) == 0


# ---- sources


def test_two_launches_have_the_source_that_they_had() -> None:
    """Its digest is what shipped winners are keyed by. A word of what is only for blocks that merge would change it."""
    for problem, arch in product((WINDOW, FULL), NEWER):
        problem, target = replace(problem, dtype="fp16"), Target.of(arch)
        config = _config(problem, target, 4)
        if KERNEL.why_invalid(problem, config, target) is not None:
            config = replace(config, num_splits=2)
        text, apart = (str(render(KERNEL, problem, replace(config, fused_combine=t), target)) for t in (True, False))
        for word in ("combine_splits", "ll_store_partials", "ll_load", "PIECE", "ld.relaxed"):
            assert word in text
            assert word not in apart
        assert "return store_empty_partials(workspace, batch, place);" in apart
        # What is left of the one when its own lines are taken out is left of the other.
        lines = set(text.splitlines())
        missing = [line.strip() for line in apart.splitlines() if line not in lines]
        assert missing == [
            "constexpr bool TOGETHER = false, BLOCK_MBARRIER = HAS_CP_ASYNC && SPLIT_D > 1 "
            "&& NUM_TEAMS > 1 && !TOGETHER;",
            "return store_empty_partials(workspace, batch, place);",
            "store_partials<MERGE_TILES * 8, HEAD_DIM>(",
            "out, workspace, batch, place, first * 8, row_merge,",
            "},",
            "[](int d) { return d; });",
        ]


BUILT = ("sm75", "sm80", "sm90", "sm120")


def _builds(arch: Arch) -> list[tuple[Case, Config]]:
    """The arch's turn of those that differ in what the merge is compiled for: the first case of each, of few splits and
    of many.
    """
    target, seen, found = Target.of(arch), set(), []
    for case in KERNEL.cases.CASES:
        p = case.problem
        if KERNEL.why_unsupported(p, target) is not None:
            continue
        for num_splits in (2, 3, 16):
            config = _config(p, target, num_splits)
            if KERNEL.why_invalid(p, config, target) is not None:
                continue
            if (
                shape := (p.head_dim, min(config.block_m, p.rows), p.rows % config.block_m, combine_tiles(p, config))
            ) in seen:
                continue
            seen.add(shape)
            found.append((case, config))
    return found[BUILT.index(arch.name) :: 4 * len(BUILT)]


@pytest.mark.parametrize("name", BUILT)
def test_builds_within_the_limits(name: str) -> None:
    arch = find_arch(name)
    try:
        require_target(arch)
    except ToolchainError as e:
        pytest.skip(str(e))
    target, complaints = Target.of(arch), []
    builds = _builds(arch)
    assert len(builds) >= 3
    for case, config in builds:
        cubin = compile_cubin(render(KERNEL, case.problem, config, target), arch)
        (launch,) = KERNEL.launches(case.problem, config, target)
        made = cubin.entries["attn_decode"]
        spilled = max(made.spill_store_bytes, made.spill_load_bytes)
        if spilled > KERNEL.max_spill_bytes or made.static_smem_bytes > 0:
            complaints.append(f"{case} {config}: {made}")
        assert made.registers * launch.block[0] <= arch.regs_per_sm
    assert not complaints, "\n".join(complaints)
