"""attn_decode by warpgroups without a GPU: refusals, launches, boxes. test_warpgroup_bodies.py builds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_tensor_maps import box_of

from kerngen.arch import Target, find_arch, find_device
from kerngen.templates import find_kernel
from kerngen.templates.attn_decode.spec import Config, Problem, dealt, k_tiles
from kerngen.tuning.space import candidates

KERNEL = find_kernel("attn_decode")
H200 = Target.of(find_device("H200"))
FULL = Problem(512, 32, 4, q_len=4, source="qk", num_rotated_pairs=64)
CONFIG = Config(32, 16, 8, 8, 10, num_splits=33, warpgroups=True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"together": True}, "together=True: with warpgroups=True splits are merged by a second launch"),
        ({"split_d": 2}, "split_d=2: one warpgroup or two, 4 or 8 warps"),
        ({"num_warps": 16}, "num_warps=16: one to three warpgroups"),
        ({"num_warps": 4}, "num_warps=4 is no multiple of split_d=8"),
        ({"block_n": 32}, "block_n=32: a page of page_size=64 is sure to hold boxes of 16 keys"),
        ({"block_m": 12}, "block_m=12 is no multiple of 8 up to 64"),
        ({"block_m": 72}, "block_m=72 is no multiple of 8 up to 64"),
        ({"block_m": 40}, "block_m=40: 32 rows fill 32"),
        ({"num_stages": 5}, "num_stages=5: a tile of keys and two boxes of values are used at once; at least 6"),
        ({"num_stages": 13}, "B of shared memory"),
        ({"num_warps": 12, "split_d": 4}, "output, scores and statistics take 168 registers a thread; with 24"),
    ],
    ids=str,
)
def test_refusals_say_what_decided(changes: dict[str, int], why: str) -> None:
    assert KERNEL.why_invalid(FULL, CONFIG, H200) is None
    assert why in (KERNEL.why_invalid(FULL, replace(CONFIG, **changes), H200) or "")


def test_results_of_many_teams_need_the_room_of_the_rings() -> None:
    problem = Problem(128, 64, 4, q_len=4)
    config = Config(64, 16, 4, 8, 8, warpgroups=True)
    why = KERNEL.why_invalid(problem, config, H200)
    assert why == "65,536 B of results of 2 teams meet in rings of 32,768 B"
    assert KERNEL.why_invalid(problem, replace(config, num_stages=16), H200) is None


@pytest.mark.parametrize("name", ["sm70", "sm80", "sm120"])
def test_others_have_no_such_products(name: str) -> None:
    problem = replace(FULL, dtype="fp16")
    assert "needs wgmma" in (KERNEL.why_invalid(problem, CONFIG, Target.of(find_arch(name))) or "")


def test_no_search_chooses_it_before_a_gpu_has_confirmed_it() -> None:
    assert not KERNEL.body(CONFIG, H200.arch).proven
    assert not any(c.warpgroups for c in candidates(KERNEL, FULL, H200).valid)
    assert not KERNEL.default_config(FULL, H200).warpgroups


def test_launches_have_warps_that_copy() -> None:
    """One; or four, where the registers of all are dealt out. Splits are merged as those of other bodies."""
    decode, combine = KERNEL.launches(FULL, CONFIG, H200)
    assert (decode.grid, decode.block, decode.reads_ahead) == ((33, 4, 1), (9 * 32, 1, 1), True)
    apart = KERNEL.launches(FULL, replace(KERNEL.default_config(FULL, H200), num_splits=33), H200)
    assert combine == apart[1]
    assert KERNEL.workspace_bytes(FULL, CONFIG, H200) == 4 * 32 * 33 * (512 + 1) * 4
    one_each = replace(CONFIG, split_d=4)
    assert dealt(FULL, one_each) == (4, 232)
    assert KERNEL.launches(FULL, one_each, H200)[0].block == (12 * 32, 1, 1)


def test_keys_have_half_of_the_boxes_in_whole_tiles() -> None:
    assert [k_tiles(replace(CONFIG, num_stages=n)) for n in (6, 8, 15, 16, 24, 31)] == [1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 16), (256, 48), (512, 64)])
def test_a_box_is_contiguous_and_lies_in_blocks(head_dim: int, page_size: int) -> None:
    """[8 rows after 8][64 columns after 64][8][64], of any 16 keys that begin at a multiple of 16."""
    problem = Problem(head_dim, 8, 2, page_size=page_size)
    config = Config(8, 16, 4, 4, 8, warpgroups=True)
    cache = torch.randint(0, 2**15, (3, 2, page_size, head_dim)).to(torch.int16)
    seen = KERNEL.tensor_map(problem, config, "k_cache", tuple(cache.shape))
    assert seen is not None
    page, head, first = 2, 1, page_size - 16
    brought = box_of(cache, seen, (0, 0, 0, first // 8, page * 2 + head))
    rows = cache[page, head, first : first + 16]
    assert torch.equal(brought[0], rows.reshape(2, 8, head_dim // 64, 64).transpose(1, 2))
    assert KERNEL.tensor_map(problem, replace(config, warpgroups=False), "k_cache", tuple(cache.shape)) is None


def test_traffic_covers_the_cost() -> None:
    for problem in (FULL, Problem(256, 32, 16, window=1024), Problem(512, 16, 2, q_len=5, batch=7, kv_len=5003)):
        config = replace(CONFIG, block_m=min(32, -(-problem.rows // 8) * 8))
        moved, least = KERNEL.traffic(problem, config, H200), KERNEL.cost(problem)
        assert moved is not None
        assert len(moved) == 2
        assert moved[0].flops >= least.flops
        assert (moved[0].l2_bytes or 0) >= moved[0].dram_bytes == least.bytes
