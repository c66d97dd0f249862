"""Block-sparse attention: which tiles of keys are kept, and the kernels that choose them, on the host."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch
from torch import Tensor

from kerngen.arch import ARCHES, Target
from kerngen.compiler.render import render
from kerngen.errors import ProblemError
from kerngen.templates import Case, find_kernel
from kerngen.templates.attn_prefill.op import attn_prefill
from kerngen.templates.common.attention.attention_torch import attend
from kerngen.templates.common.attention.tile_lists import LIST_KEYS, LIST_QUERIES, num_entries, query_blocks
from kerngen.templates.common.attention.tile_lists_torch import as_lists, kept_tiles, means_of, of_lists, tile_scores
from kerngen.templates.key_means.op import key_means
from kerngen.templates.tile_lists.op import TileRule, tile_lists
from kerngen.templates.tile_scores import op as scores_op
from kerngen.templates.values import AttnBatch, KVView, Mask

NUM_FIRST, NUM_LAST, MEAN_KEYS = 2, 4, 32
D, NUM_Q, NUM_KV = 128, 4, 2
H200 = Target.of(ARCHES["sm90"])


def drawn(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of n tokens. Keys come in runs that some queries look for, so that tiles weigh differently."""
    draw = torch.Generator().manual_seed(seed)
    topics = torch.randn(8, NUM_KV, D, generator=draw)
    of = torch.randint(0, 8, (-(-n // 100),), generator=draw).repeat_interleave(100)[:n]
    k = topics[of] + 0.5 * torch.randn(n, NUM_KV, D, generator=draw)
    wanted = topics[torch.randint(0, 8, (n,), generator=draw)].repeat_interleave(NUM_Q // NUM_KV, 1)
    q = 0.1 * wanted + 0.05 * torch.randn(n, NUM_Q, D, generator=draw)
    return q, k, torch.randn(n, NUM_KV, D, generator=draw)


def chosen(
    q: Tensor, k: Tensor, start: int, end: int, alpha: float, dense_from: int = 1 << 30, last: int = NUM_LAST
) -> dict[int, Tensor]:
    """Position of a block's first query -> tiles that it keeps, [num_kv_heads, tiles], of a chunk of a prompt."""
    means, found = means_of(k[:end], MEAN_KEYS), {}
    for at in range(start, end, LIST_QUERIES):
        queries = q[at : min(at + LIST_QUERIES, end)]
        scores = tile_scores(queries, means, at, MEAN_KEYS, 1.0)
        found[at] = kept_tiles(scores, at, len(queries), NUM_KV, math.log2(alpha), NUM_FIRST, last, dense_from)
    return found


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000, 2048])
@pytest.mark.parametrize("alpha", [1e-9, 0.1, 0.999])
def test_the_first_the_last_and_the_own_tile_are_always_in(n: int, alpha: float) -> None:
    q, k, _ = drawn(n)
    for at, kept in chosen(q, k, 0, n, alpha).items():
        own = at // LIST_KEYS
        assert kept.shape == (NUM_KV, num_entries(min(at + LIST_QUERIES, n)))
        assert kept[:, :NUM_FIRST].all()
        assert kept[:, max(own - NUM_LAST + 1, 0) :].all()


def test_a_higher_alpha_keeps_no_more() -> None:
    q, k, _ = drawn(3000)
    before, counts = {}, []
    for alpha in (1e-9, 0.01, 0.1, 0.3, 0.6, 0.9, 0.999):
        kept = chosen(q, k, 0, 3000, alpha)
        assert all((kept[at] <= before.get(at, kept[at])).all() for at in kept)
        before = kept
        counts.append(sum(int(x.sum()) for x in kept.values()))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2 * counts[-1]


def test_queries_at_the_end_of_a_prompt_see_all() -> None:
    q, k, _ = drawn(2000)
    kept = chosen(q, k, 0, 2000, 0.9, dense_from=14 * 128)
    assert [at // 128 for at, x in kept.items() if x.all()][-2:] == [14, 15]
    assert not kept[13 * 128].all()


@pytest.mark.parametrize("cuts", [(128, 256, 1024), (1280,), tuple(range(128, 2048, 128))])
def test_chunks_choose_what_the_whole_prompt_does(cuts: tuple[int, ...]) -> None:
    """Where chunks begin at multiples of a block."""
    q, k, _ = drawn(2048)
    whole = chosen(q, k, 0, 2048, 0.2)
    parts: dict[int, Tensor] = {}
    for start, end in zip((0, *cuts), (*cuts, 2048), strict=True):
        parts |= chosen(q, k, start, end, 0.2)
    assert all(torch.equal(whole[at], parts[at]) for at in whole)
    assert not all(x.all() for x in whole.values())


def test_blocks_within_a_tile_see_themselves() -> None:
    """A chunk that begins where a tile of keys does not: of its first block two tiles are its own."""
    q, k, _ = drawn(1500)
    for at, kept in chosen(q, k, 333, 1500, 0.999, last=1).items():
        assert kept[:, at // 128 : (min(at + 127, 1499)) // 128 + 1].all()


def test_few_keys_that_matter_among_many_are_found() -> None:
    """One key that a whole block of queries looks for: its mean of 32 stands out where a mean of 128 would less."""
    draw = torch.Generator().manual_seed(3)
    n, needle = 64 * 128, 20 * 128 + 77
    k = torch.randn(n, 1, D, generator=draw)
    direction = torch.randn(D, generator=draw)
    k[needle, 0] += 14 * direction / direction.norm()
    q = (direction / direction.norm() + 0.3 * torch.randn(128, 1, D, generator=draw) / D**0.5).expand(128, 1, D)
    scores = tile_scores(q, means_of(k, 16), n - 128, 16, 1.0)
    assert int(scores[0].argmax()) == needle // 128


def test_attention_over_lists_is_that_over_their_keys() -> None:
    """attend with `kept` equals attend to the keys alone that are kept."""
    q, k, v = drawn(1000)
    draw = torch.Generator().manual_seed(1)
    kept = torch.rand(8, NUM_KV, 8, generator=draw) < 0.5
    for block in range(8):
        kept[block, :, block] = True
    kept[:, :, 0] = False
    kept[0, :, 0] = True
    found = attend(q, k, v, 1000, kept=kept, sm_scale=0.1)
    for at in (0, 127, 128, 500, 999):
        for head in range(NUM_Q):
            tiles = kept[at // 128, head // 2].nonzero().flatten()
            keys = torch.cat(
                [torch.arange(t * 128, min(t * 128 + 128, at + 1)) for t in tiles.tolist() if t <= at // 128]
            )
            weights = torch.softmax(k[keys, head // 2] @ q[at, head] * 0.1, 0)
            assert torch.allclose(found[at, head], weights @ v[keys, head // 2], atol=1e-5)


def test_all_tiles_are_dense_attention() -> None:
    q, k, v = drawn(700)
    everything = torch.ones(6, NUM_KV, 6, dtype=torch.bool)
    assert torch.equal(attend(q, k, v, 700, kept=everything), attend(q, k, v, 700))


def test_lists_are_numbers_from_the_last_down() -> None:
    kept = torch.tensor([[[True, False, True, True], [True, False, False, False]]])
    counts, lists = as_lists(kept)
    assert counts.tolist() == [[3, 1]]
    assert lists.tolist() == [[[3, 2, 0, -1], [0, -1, -1, -1]]]
    assert torch.equal(of_lists(counts, lists, 4), kept)


@pytest.mark.parametrize("page_size", [32, 64, 96])
def test_paged_calls_choose_and_see_what_whole_tensors_do(page_size: int) -> None:
    """key_means, tile_scores, tile_lists and attn_prefill by their references, on scattered pages, in two chunks."""
    n, start, alpha = 1664, 640, 0.2
    q, k, v = drawn(n)
    num_pages = -(-n // page_size)
    table = torch.randperm(num_pages, generator=torch.Generator().manual_seed(2)).int()[None]
    caches = [torch.full((num_pages, NUM_KV, page_size, D), torch.nan) for _ in range(2)]
    means = torch.full((num_pages, NUM_KV, page_size // MEAN_KEYS, D), torch.nan)
    kv, density, out = KVView(*caches), torch.zeros(2, dtype=torch.int64), []
    for begin, end in ((0, start), (start, n)):
        at = torch.arange(begin, end)
        for cache, rows in zip(caches, (k, v), strict=True):
            cache[table[0, at // page_size].long(), :, at % page_size] = rows[begin:end]
        ends = torch.tensor([0, end - begin], dtype=torch.int32)
        batch = AttnBatch(table, torch.tensor([end], dtype=torch.int32), max_kv_len=end, cu_seqlens_q=ends,
                          max_seqlen_q=end - begin)  # fmt: skip
        answer(key_means(means, kv, batch, torch.tensor([begin], dtype=torch.int32), end - begin))
        scores = answer(scores_op.tile_scores(q[begin:end], means, page_size, batch))
        rule = TileRule(math.log2(alpha), NUM_FIRST, NUM_LAST)
        dense_from = torch.tensor([1 << 30], dtype=torch.int32)
        counts, lists = answer(tile_lists(scores, density, dense_from, NUM_KV, end - begin, batch, rule))
        listed = AttnBatch(table, batch.kv_lens, Mask(counts=counts, lists=lists), end, 1, ends, end - begin)
        out.append(answer(attn_prefill(q[begin:end], kv, listed)))
    wanted = chosen(q, k, 0, n, alpha)
    kept = torch.zeros(len(wanted), NUM_KV, num_entries(n), dtype=torch.bool)
    for i, its in enumerate(wanted.values()):
        kept[i, :, : its.shape[1]] = its
    assert density.tolist() == [int(kept.sum()), sum(its.numel() for its in wanted.values())]
    assert density[0] < density[1]
    assert torch.allclose(torch.cat(out), attend(q, k, v, n, kept=kept), atol=1e-5)


def answer(call: Any) -> Any:
    """What the reference makes of a call, in its arguments."""
    expected = find_kernel(call.kernel).reference.expected(call.problem, call.arguments)
    for name, value in expected.items():
        call.arguments[name].copy_(value)
    return call.result


def test_masks_with_lists_are_causal_alone() -> None:
    counts, lists = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, dtype=torch.int32)
    assert not Mask(counts=counts, lists=lists).is_causal
    for wrong in ({"window": 5}, {"kind": "full"}, {"ends": counts[0]}):
        with pytest.raises(ProblemError, match="causal mask without window"):
            Mask(counts=counts, lists=lists, **wrong)
    with pytest.raises(ProblemError, match="have counts"):
        Mask(lists=lists)


def test_lists_of_another_number_of_tokens_are_refused() -> None:
    q, cache = torch.zeros(300, 2, 128), torch.zeros(8, 2, 64, 128)
    counts, lists = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2, 3, dtype=torch.int32)
    batch = AttnBatch(
        torch.zeros(1, 8, dtype=torch.int32), torch.tensor([300]), Mask(counts=counts, lists=lists), 300, 1,
        torch.tensor([0, 300]), 300,
    )  # fmt: skip
    with pytest.raises(ProblemError, match="2 lists; 300 tokens of 1 sequences have 3"):
        attn_prefill(q, KVView(cache, cache), batch)


@pytest.mark.parametrize("q_lens", [[0, 1, 127, 128, 129, 0, 300], [128] * 5, [64] * 70])
def test_no_two_blocks_have_one_list(q_lens: list[int]) -> None:
    blocks = query_blocks(q_lens)
    at = [block[0] for block in blocks]
    assert len(set(at)) == len(at)
    assert max(at) < sum(q_lens) // LIST_QUERIES + len(q_lens)


# ---- the kernels' own source

NEEDS_COMPILER = pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="no C++ compiler here")


def _pointers(arguments: dict[str, Any], names: list[str]) -> list[Any]:
    made = []
    for name in names:
        value = arguments[name]
        if isinstance(value, Tensor):
            made.append(ctypes.c_void_p(value.data_ptr()))
        else:
            made.append(ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value))
    return made


def run_case(kernel: Any, case: Case, config: Any, folder: Path) -> None:
    """The kernel's source on the host gives what its reference says."""
    entry, inputs = kernel.name, kernel.cases.inputs(case, torch.device("cpu"))
    expected = kernel.reference.expected(case.problem, inputs)
    library = kernel_on_cpu.on_cpu(str(render(kernel, case.problem, config, H200)), entry, folder)
    (launch,) = kernel.launches(case.problem, config, H200)
    names = [a.name for a in kernel.body(config, H200.arch).args[entry]]
    library.set_grid(launch.grid[0], launch.grid[1], 16)
    library.run(math.prod(launch.grid), launch.block[0], 0, *_pointers(inputs, names))
    tolerance = kernel.reference.tolerance(case.problem)
    for name, right in expected.items():
        torch.testing.assert_close(
            inputs[name].to(right.dtype), right, atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=True
        )


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["alpha.1", "at-the-threshold", "nothing-first", "h2-1_b70_t150_k200"])
def test_the_kernel_makes_lists_as_the_reference(name: str, tmp_path: Path) -> None:
    kernel = find_kernel("tile_lists")
    (case,) = (c for c in kernel.cases.CASES if c.name == name)
    run_case(kernel, case, kernel.config_type(64), tmp_path)


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["d256-bf16-32-of-64", "d512-bf16-shared", "d512-bf16-int8"])
def test_the_kernel_makes_means_as_the_reference(name: str, tmp_path: Path) -> None:
    kernel = find_kernel("key_means")
    (case,) = (c for c in kernel.cases.CASES if c.name == name)
    run_case(kernel, case, kernel.config_type(128), tmp_path)
