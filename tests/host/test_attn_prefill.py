"""attn_prefill without a GPU: its grid, its splits, and its reference is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kerngen.arch import ARCHES, Target, find_arch
from kerngen.templates import find_kernel
from kerngen.templates.attn_prefill import cases, reference, spec
from kerngen.templates.attn_prefill.spec import Problem
from kerngen.templates.common.attention.attention_torch import attend
from kerngen.templates.kernel import Case

KERNEL = find_kernel("attn_prefill")
ALL_ARCHES = tuple(ARCHES.values())
SHAPES = {128: (32, 8), 256: (32, 16), 512: (32, 4)}


def problem(head_dim: int, **fields: object) -> Problem:
    heads, kv_heads = SHAPES[head_dim]
    base = Problem(head_dim=head_dim, num_q_heads=heads, num_kv_heads=kv_heads, dtype="fp16")
    return replace(base, **fields)  # type: ignore[arg-type]


def test_block_table_costs_no_shared_memory() -> None:
    """A context of 177,000 tokens in pages of 16 has a table of 44 KB: it fits where a short one does."""
    volta = find_arch("sm70")
    for head_dim in SHAPES:
        long = problem(head_dim, page_size=16, num_tokens=8, kv_len=177_000)
        short = replace(long, kv_len=64)
        config = KERNEL.default_config(long, Target.of(volta))
        assert KERNEL.why_invalid(long, config, Target.of(volta)) is None
        assert KERNEL.smem_bytes(long, config, Target.of(volta)) == KERNEL.smem_bytes(short, config, Target.of(volta))


def test_grid_covers_every_split_of_the_tokens() -> None:
    """However num_tokens falls into `batch` sequences, there is a block for each tile of each sequence."""
    sm90 = find_arch("sm90")
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        batch = 1 + trial % 9
        lengths = torch.randint(0, 1 + 40 * (trial % 5), (batch,), generator=generator).tolist()
        p = problem(512, batch=batch, num_tokens=sum(lengths))
        config = KERNEL.default_config(p, Target.of(sm90))
        launch = KERNEL.launches(p, config, Target.of(sm90))[0]
        tiles = sum(-(-n * 8 // config.block_m) for n in lengths)
        assert launch.grid[0] >= tiles * p.num_kv_heads
        rows = config.block_m * config.cluster
        assert launch.grid[0] <= (sum(lengths) * 8 // rows + 1 + batch) * config.cluster * p.num_kv_heads


H200 = Target.of(find_arch("sm90"))
SPLIT = replace(spec._WGMMA_TILES[512][0], use_tma=True, split_kv=True)


def test_few_tokens_behind_many_keys_fill_the_gpu() -> None:
    """A part of the keys for each block that there would be room for, and the grid says so."""
    p = problem(512, page_size=64, num_tokens=64, kv_len=8192)  # 16 tiles of 128 rows, by clusters of two blocks
    attend, combine = KERNEL.launches(p, SPLIT, H200)
    assert attend.grid[1] == spec.num_splits(p, SPLIT, H200) == 4
    assert (combine.grid, combine.block) == ((64 * 32, 1, 1), (128, 1, 1))
    assert KERNEL.workspace_bytes(p, SPLIT, H200) == 64 * 32 * (16 + 4 * 512) * 4
    half = replace(p, num_q_heads=16, num_kv_heads=2)
    assert spec.num_splits(half, SPLIT, H200) == 8
    assert [spec.num_splits(replace(p, num_tokens=n), SPLIT, H200) for n in (128, 192, 256, 8192)] == [2, 1, 1, 1]
    assert [spec.num_splits(replace(half, num_tokens=n), SPLIT, H200) for n in (128, 192, 256, 512)] == [4, 2, 2, 1]


def test_whole_keys_are_one_launch() -> None:
    p = problem(512, page_size=64, num_tokens=64, kv_len=8192)
    for some, config in ((p, replace(SPLIT, split_kv=False)), (replace(p, num_tokens=8192), SPLIT), (p, SPLIT)):
        splits = spec.num_splits(some, config, H200)
        assert len(KERNEL.launches(some, config, H200)) == 1 + (splits > 1)
        assert (KERNEL.workspace_bytes(some, config, H200) > 0) == (splits > 1)
    assert spec.num_splits(replace(p, kv_len=384), SPLIT, H200) == 1  # merging would take longer


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64, 100, 500, 512, 1000, 4096])
@pytest.mark.parametrize("kv_len", [0, 1, 64, 129, 1000, 9224, 262144])
def test_splits_have_keys_and_room(num_tokens: int, kv_len: int) -> None:
    p = problem(512, page_size=64, num_tokens=num_tokens, kv_len=kv_len)
    splits = spec.num_splits(p, SPLIT, H200)
    assert 1 <= splits <= spec.MAX_SPLITS
    assert splits == 1 or 128 * splits <= kv_len + 127
    assert KERNEL.workspace_bytes(p, SPLIT, H200) <= spec.MAX_PARTIAL_BYTES


def test_the_default_splits_where_few_blocks_are() -> None:
    p = problem(512, page_size=64, kv_len=8192)
    chosen = {n: KERNEL.default_config(replace(p, num_tokens=n), H200).split_kv for n in (1, 64, 512, 1024, 8192)}
    assert chosen == {1: True, 64: True, 512: True, 1024: False, 8192: False}
    assert not KERNEL.default_config(problem(256, page_size=64, num_tokens=64), H200).split_kv


def test_only_halves_split() -> None:
    config = KERNEL.default_config(problem(256), H200)
    why = KERNEL.why_invalid(problem(256), replace(config, split_kv=True), H200)
    assert "warps_d=2" in why


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 7, 100])
@pytest.mark.parametrize(("queries", "kv_len"), [(1, 1), (5, 5), (5, 40), (40, 40), (0, 9)])
def test_visible_pairs_counts_what_the_mask_shows(causal: bool, window: int, queries: int, kv_len: int) -> None:
    p = problem(128, causal=causal, window=window, num_tokens=queries, kv_len=kv_len)
    count = 0
    for i in range(queries):
        at = kv_len - queries + i
        count += sum((not causal or key <= at) and (window == 0 or key > at - window) for key in range(kv_len))
    assert spec.visible_pairs(p) == count
    assert KERNEL.cost(p).flops == 4 * 128 * 32 * count


def test_reference_equals_softmax_by_hand() -> None:
    """Two queries at the end of three keys, window 2, worked out key by key."""
    q = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]])
    k = torch.tensor([[[9.0, 9.0]], [[1.0, 0.5]], [[2.0, 1.0]]])
    v = torch.tensor([[[5.0, 5.0]], [[1.0, 0.0]], [[0.0, 1.0]]])
    out = attend(q, k, v, 3, window=2, sm_scale=0.5)
    first = torch.softmax(torch.tensor([4.5, 0.5]), 0)  # query at position 1 sees keys 0 and 1
    second = torch.softmax(torch.tensor([0.5, 1.0]), 0)  # query at position 2 sees keys 1 and 2
    torch.testing.assert_close(out[0, 0], first[0] * v[0, 0] + first[1] * v[1, 0])
    torch.testing.assert_close(out[1, 0], second[0] * v[1, 0] + second[1] * v[2, 0])


def test_reference_agrees_with_torch_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((13, 4), (29, 2), (29, 2)))
    seen = torch.arange(29)[None, :] <= torch.arange(13)[:, None] + 16
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, scale=0.3, enable_gqa=True
    )
    got = attend(q, k, v, 29, sm_scale=0.3)
    torch.testing.assert_close(got, want.transpose(0, 1))


@pytest.mark.parametrize("case", [c for c in cases.CASES if "177k" not in c.name], ids=str)
def test_cases_poison_what_must_not_be_read(case: Case) -> None:
    """The reference is finite although unseen keys are NaN; a query with no key gives zeros."""
    inputs = cases.inputs(case, torch.device("cpu"))
    assert bool(inputs["out"].isnan().all())
    out = reference.expected(case.problem, inputs)["out"]
    assert bool(out.isfinite().all())
    if case.name == "no-keys":
        assert not bool(out[:3].any())
        assert bool(out[8:].any())
    if case.problem.page_size:
        assert bool(KERNEL.values_of(case.problem, "k", inputs["k"]).isnan().any())
