"""The mask of prompts with images: what a query sees, which tiles a block visits, what the ops ask for and refuse."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import kernel_on_cpu
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_fused import H200, store_with
from torch import Tensor

import kerngen
from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import compile_ptx
from kerngen.compiler.render import Chunk, assemble, render
from kerngen.errors import ProblemError
from kerngen.identity import normal_form
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.selection import Selector
from kerngen.templates import Case, find_kernel
from kerngen.templates.attn_decode.op import attn_decode
from kerngen.templates.attn_prefill import cases, reference
from kerngen.templates.attn_prefill.op import attn_prefill
from kerngen.templates.attn_prefill.spec import Config, Problem
from kerngen.templates.values import KV_FORMATS, AttnBatch, KVView, Mask
from kerngen.tuning_db import open_source
from kerngen.tuning_db.read.ids import problem_key

KERNEL = find_kernel("attn_prefill")
WITH_ENDS = [c for c in KERNEL.cases.CASES if c.problem.ends]


def _blocks(types: str) -> tuple[tuple[int, int], ...]:
    """First and last position of each image in a text of 0 (text) and other digits, each digit's runs an image."""
    return tuple((m.start(), m.end() - 1) for m in re.finditer(r"([1-9])\1*", types))


# ---- what a query sees


@pytest.mark.parametrize(
    ("window", "types", "intervals"),
    [
        (100, "0011100", [(0, 0), (0, 1), (0, 4), (0, 4), (0, 4), (0, 5), (0, 6)]),
        (3, "00111110", [(0, 0), (0, 1), (0, 6), (1, 6), (2, 6), (3, 6), (4, 6), (5, 7)]),
        (4, "0110110", [(0, 0), (0, 2), (0, 2), (0, 3), (1, 5), (2, 5), (3, 6)]),
    ],
)
def test_a_query_sees_the_interval_that_transformers_has(
    window: int, types: str, intervals: list[tuple[int, int]]
) -> None:
    """Printed from transformers' sliding mask of a model with use_bidirectional_attention="vision". Values are unit
    vectors here: the output's nonzero elements are the keys that a query sees.
    """
    n = len(types)
    ends = torch.tensor(cases.ends_of([n], [n], [_blocks(types)]), dtype=torch.int32)
    kv = KVView(*(torch.eye(n).view(1, 1, n, n) for _ in range(2)))
    table, kv_lens, starts = (torch.tensor(x, dtype=torch.int32) for x in ([[0]], [n], [0, n]))
    batch = AttnBatch(table, kv_lens, Mask(window=window, ends=ends), cu_seqlens_q=starts, max_seqlen_q=n)
    seen = TorchOps(torch.device("cpu"), torch.float32).attn_prefill(torch.zeros(n, 1, n), kv, batch)[:, 0]
    found = [(int(row.nonzero()[0]), int(row.nonzero()[-1])) for row in seen]
    assert found == intervals
    assert [int(row.count_nonzero()) for row in seen] == [last - first + 1 for first, last in intervals]


@pytest.mark.parametrize("window", [0, 1, 16, 1024])
def test_the_reference_agrees_with_torch_attention_over_a_dense_mask(window: int) -> None:
    """The rule as transformers states it: a key at or before the query, or of the query's block; and in the window."""
    draw = Random(window)
    for _ in range(6):
        kv_len = draw.randint(2, 150)
        n = draw.randint(1, kv_len)
        (images,) = cases._random_images(draw.randint(0, 99), [kv_len], 9, 60)
        images = tuple((a, b) for a, b in images if a >= kv_len - n or b < kv_len - n)  # a chunk has whole images
        block = torch.full((kv_len,), -1)
        for i, (first, last) in enumerate(images):
            block[first : last + 1] = i
        key, at = torch.arange(kv_len), torch.arange(kv_len - n, kv_len)[:, None]
        seen = (key <= at) | ((block[at] == block) & (block >= 0))
        if window:
            seen &= key > at - window
        q, k, v = (torch.randn(rows, heads, 16) for rows, heads in ((n, 4), (kv_len, 2), (kv_len, 2)))
        want = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, scale=0.3, enable_gqa=True
        )
        problem = Problem(num_q_heads=4, num_kv_heads=2, window=window, num_tokens=n, kv_len=kv_len, ends=True)
        starts = {"cu_seqlens_q": torch.tensor([0, n]), "cu_seqlens_k": torch.tensor([0, kv_len])}
        ends = torch.tensor(cases.ends_of([n], [kv_len], [images]), dtype=torch.int32)
        given = {"q": q, "k": k, "v": v, "ends": ends, "sm_scale": 0.3, "logit_cap": 0.0, **starts}
        torch.testing.assert_close(reference.expected(problem, given)["out"], want.transpose(0, 1))


# ---- which tiles a block visits: the kernels' own header, on this machine

SHAPES = ((1, 16, 16), (2, 64, 16), (2, 128, 0), (2, 32, 1), (3, 48, 40), (8, 64, 16))  # GROUP, BLOCK_M, WINDOW
BLOCK_N = 16
MOST_KEYS = 160  # that are looked at, those behind a sequence's last one among them
_VISIT = """
int __shfl_up_sync(unsigned, int, int), __shfl_sync(unsigned, int, int), __ffs(unsigned);
unsigned __ballot_sync(unsigned, bool);
#include "common/attention/ends_mask.cuh"
// Of each block of rows: its range of keys, which tiles of keys need the mask, and what each row sees.
template <int GROUP, int BLOCK_M, class Range, class... Ends>
void visit(const int* starts, const int* kv_lens, int batch, int* ranges, bool* masked, bool* seen, Ends... ends) {
    for (int seq = 0; seq < batch; ++seq) {
        const int rows = (starts[seq + 1] - starts[seq]) * GROUP;
        for (int row = 0; row < rows; row += BLOCK_M) {
            const Range range(PrefillTile{seq, row, rows, starts[seq]}, kv_lens[seq], ends...);
            *ranges++ = range.keys.first, *ranges++ = range.keys.end;
            for (int key = 0; key < MOST_KEYS; key += BLOCK_N) *masked++ = range.needs_mask(key, BLOCK_N);
            for (int i = row; i < row + BLOCK_M; ++i)
                for (int key = 0; key < MOST_KEYS; ++key) *seen++ = range.mask.visible(range.position(i), key);
        }
    }
}
extern "C" __global__ void visit_blocks(int shape, const int* starts, const int* kv_lens, const int* ends, int batch,
                                        int* ranges, bool* masked, bool* seen) {
"""
Visited = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.bool_]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if kernel_on_cpu.COMPILER is None:
        pytest.skip("neither g++ nor clang++ is on the PATH")
    text = f"constexpr int MOST_KEYS = {MOST_KEYS}, BLOCK_N = {BLOCK_N};{_VISIT}"
    given = "starts, kv_lens, batch, ranges, masked, seen"
    for i, (group, block_m, window) in enumerate(SHAPES):
        rows = f"{group}, {block_m}"
        shape = f"{rows}, WindowMask<true, {window}>"
        text += f"    if (shape == {i} && ends) visit<{rows}, EndsRange<{shape}>>({given}, ends);\n"
        text += f"    if (shape == {i} && !ends) visit<{rows}, KeyRange<{shape}>>({given});\n"
    source = assemble([Chunk(text + "}\n")], find_arch("sm80"), KERNEL.shared)
    return kernel_on_cpu.on_cpu(str(source), "visit_blocks", tmp_path_factory.mktemp("mask"))


def _blocks_of_rows(shape: int, q_lens: list[int]) -> list[tuple[int, int]]:
    """(sequence, first row) of each."""
    group, block_m, _ = SHAPES[shape]
    return [(s, row) for s, n in enumerate(q_lens) for row in range(0, n * group, block_m)]


def _visit(library: ctypes.CDLL, shape: int, q_lens: list[int], kv_lens: list[int], ends: list[int] | None) -> Visited:
    """Of each block its keys' first and end, of each tile of keys whether it is masked, of each row what it sees."""
    count = len(_blocks_of_rows(shape, q_lens))
    ranges = np.zeros((count, 2), np.int32)
    masked = np.zeros((count, MOST_KEYS // BLOCK_N), np.bool_)
    seen = np.zeros((count, SHAPES[shape][1], MOST_KEYS), np.bool_)
    starts = np.cumsum([0, *q_lens], dtype=np.int32)
    arrays = [starts, np.array(kv_lens, np.int32), None if ends is None else np.array(ends, np.int32)]
    pointers = [ctypes.c_void_p(None if a is None else a.ctypes.data) for a in (*arrays, ranges, masked, seen)]
    library.run(1, 1, 0, shape, *pointers[:3], len(q_lens), *pointers[3:])
    return ranges, masked, seen


def _random_batch(draw: Random) -> tuple[list[int], list[int], list[int]]:
    """q_lens, kv_lens and ends. Some images reach behind the chunk's last key, and some chunks begin in an image."""
    kv_lens = [draw.randint(0, 120) for _ in range(draw.randint(1, 4))]
    q_lens = [draw.choice((0, 1, kv_len, draw.randint(0, kv_len))) for kv_len in kv_lens]
    q_lens[-1] += draw.choice((0, 0, 0, 3))  # more queries than keys: the first are before all keys
    images = cases._random_images(draw.randint(0, 10**6), [n + 20 for n in kv_lens], draw.choice((3, 30)), 50)
    return q_lens, kv_lens, cases.ends_of(q_lens, kv_lens, images)


def test_blocks_visit_what_their_rows_see_and_mask_what_some_row_does_not(library: ctypes.CDLL) -> None:
    """300 random batches against the intervals q - window < k <= min(ends[q], kv_len - 1), key by key."""
    draw, partial = Random(5), 0
    for trial in range(300):
        shape = trial % len(SHAPES)
        group, block_m, window = SHAPES[shape]
        q_lens, kv_lens, ends = _random_batch(draw)
        ranges, masked, seen = _visit(library, shape, q_lens, kv_lens, ends)
        starts, keys = np.cumsum([0, *q_lens]), np.arange(MOST_KEYS)
        for block, (s, first_row) in enumerate(_blocks_of_rows(shape, q_lens)):
            where = f"trial {trial} {SHAPES[shape]} q_lens={q_lens} kv_lens={kv_lens} ends={ends} block {block}"
            last_row = min(first_row + block_m, q_lens[s] * group)
            query = np.arange(first_row, last_row)[:, None] // group
            at, end = kv_lens[s] - q_lens[s] + query, np.array(ends)[starts[s] + query]
            wanted = (keys <= np.minimum(end, kv_lens[s] - 1)) & (keys > at - (window or MOST_KEYS + 200))
            assert np.array_equal(seen[block, : len(query)], wanted), where
            first, stop = ranges[block]
            by_any = wanted.any(0).nonzero()[0]
            if len(by_any):
                assert (first, stop) == (by_any[0], by_any[-1] + 1), where
                tiles = range(first // BLOCK_N, -(-stop // BLOCK_N))
            else:
                assert first >= stop, where
                tiles = range(0)
            for tile in tiles:
                by_all = wanted[:, tile * BLOCK_N : (tile + 1) * BLOCK_N].all()
                assert masked[block, tile] == (not by_all), f"{where} tile {tile}"
                partial += not by_all
    assert partial > 1000


def test_ends_at_the_queries_change_nothing(library: ctypes.CDLL) -> None:
    """A block visits the tiles, and masks those, that it does without ends."""
    draw = Random(6)
    for trial in range(60):
        q_lens, kv_lens, _ = _random_batch(draw)
        own = cases.ends_of(q_lens, kv_lens, [()] * len(q_lens))
        shape = trial % len(SHAPES)
        found, plain = (_visit(library, shape, q_lens, kv_lens, ends) for ends in (own, None))
        rows = [min(SHAPES[shape][1], q_lens[s] * SHAPES[shape][0] - row) for s, row in _blocks_of_rows(shape, q_lens)]
        assert all(np.array_equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True))
        assert all(np.array_equal(a[:n], b[:n]) for a, b, n in zip(found[2], plain[2], rows, strict=True))


# ---- the source, and what serves


@pytest.mark.parametrize(
    ("arch", "problem", "config"),
    [
        ("sm70", Problem(dtype="fp16"), None),
        ("sm80", Problem(), None),
        ("sm90", Problem(page_size=16), Config(128, 80, 8, 1, 2, body="wgmma_ws", use_tma=True, cluster=2)),
        ("sm90", Problem(512, 32, 4, 16), Config(64, 64, 8, 2, 8, body="wgmma_ws")),
        ("sm90", Problem(512, 32, 4, 16), Config(64, 64, 8, 2, 8, body="wgmma_ws", split_kv=True)),
    ],
    ids=["volta", "mma", "wgmma", "split d", "split kv"],
)
def test_each_body_has_the_argument_that_is_passed(arch: str, problem: Problem, config: Config | None) -> None:
    """A launch passes `ends` if the problem has them: the entry's parameters are those, by kind and in that order."""
    target = Target.of(find_arch(arch))
    kinds = {"ptr": "u64", "f32": "f32", "i32": "u32", "map": "b8"}
    for asked in (problem, replace(problem, ends=True)):
        chosen = config or KERNEL.default_config(asked, target)
        ptx = compile_ptx(render(KERNEL, asked, chosen, target), target.arch).image.decode()
        found = re.search(r"\.entry attn_prefill\((.*?)\n\)", ptx, re.DOTALL)
        assert found is not None
        args = KERNEL.body(chosen, target.arch).args["attn_prefill"]
        passed = [kinds[a.kind] for a in args if not a.only or getattr(asked, a.only)]
        assert re.findall(r"\.param (?:\.align \d+ )?\.(\w+)", found[1]) == passed


@pytest.mark.parametrize("arch", ["sm70", "sm80", "sm90"])
def test_without_ends_the_source_knows_nothing_of_them(arch: str) -> None:
    target = Target.of(find_arch(arch))
    for case in WITH_ENDS:
        if KERNEL.why_unsupported(case.problem, target) is None:
            config = KERNEL.default_config(case.problem, target)
            assert config == KERNEL.default_config(replace(case.problem, ends=False), target)
            texts = [render(KERNEL, replace(case.problem, ends=ends), config, target) for ends in (False, True)]
            plain, asked = (set(re.findall(r"\w+", normal_form(text))) for text in texts)
            assert not {"ends", "EndsMask"} & plain
            assert {"ends", "EndsMask"} <= asked


def test_what_was_tuned_without_ends_is_filed_as_before_and_serves(tmp_path: Path) -> None:
    plain = Problem(page_size=64, window=1024)
    asked = replace(plain, ends=True)
    keys = [problem_key(KERNEL, p).filed().static for p in (plain, asked)]
    assert "ends" not in keys[0]
    assert keys[1] == keys[0] | {"ends": True}
    changed = {"block_n": 64, "num_stages": 1}
    with open_source(store_with(tmp_path / "a.db", KERNEL, plain, **changed)) as source:
        selector = Selector([source], H200)
        tuned, found = (selector.choice(KERNEL, p) for p in (plain, asked))
        assert (found.config, found.winner) == (tuned.config, tuned.winner)
        assert (found.config.block_n, found.config.num_stages) == (64, 1)
        assert tuned.cubin is not None
        assert found.cubin is None, "its machine code is another"
        assert found.text == render(KERNEL, asked, found.config, H200)


# ---- the ops


def _asked(case: Case) -> tuple[Tensor, KVView, AttnBatch]:
    """What the op takes for a paged case."""
    given = cases.inputs(case, torch.device("cpu"))
    mask = Mask(window=case.problem.window, ends=given["ends"])
    table = given["block_table"]
    batch = AttnBatch(
        table.where(table != cases.NO_PAGE, 0), given["kv_lens"], mask, case.problem.kv_len,
        cu_seqlens_q=given["cu_seqlens_q"], max_seqlen_q=given["max_seqlen_q"],
    )  # fmt: skip
    return given["q"], KVView(given["k"], given["v"], KV_FORMATS[case.problem.kv_format]), batch


@pytest.mark.parametrize("case", [c for c in WITH_ENDS if c.problem.page_size and not c.problem.logit_cap], ids=str)
def test_the_torch_backend_has_the_kernel_s_mask(case: Case) -> None:
    p = case.problem
    q, kv, batch = _asked(case)
    call = attn_prefill(q, kv, batch)
    assert call.problem.ends
    assert call.problem == replace(p, kv_len=call.problem.kv_len)
    wanted = reference.expected(call.problem, dict(call.arguments))["out"]
    dtype = torch.bfloat16 if p.dtype == "bf16" else torch.float16
    found = TorchOps(torch.device("cpu"), dtype).attn_prefill(q, kv, batch)
    torch.testing.assert_close(found, wanted.to(dtype))
    causal = TorchOps(torch.device("cpu"), dtype).attn_prefill(q, kv, replace(batch, mask=Mask(window=p.window)))
    assert not torch.equal(found, causal)


def test_the_library_s_op_takes_ends() -> None:
    case = next(c for c in WITH_ENDS if c.problem.dtype == "bf16" and c.problem.head_dim == 256)
    given = cases.inputs(case, torch.device("cpu"))
    _, arguments = cases.op_call(case, given) or (None, {})
    wanted = reference.expected(case.problem, given)["out"].bfloat16()
    assert torch.equal(kerngen.ops.attn_prefill(**arguments), wanted)
    with pytest.raises(ProblemError, match=r"attn_prefill: ends is torch.int32 \[\d+\]; it takes int32\[T\]"):
        kerngen.ops.attn_prefill(**arguments | {"ends": given["ends"][1:]})


def test_what_decodes_refuses_a_query_that_sees_behind_itself() -> None:
    """Its keys would be those of tokens that its launch writes."""
    q = torch.zeros(2, 2, 128)
    kv = KVView(*(torch.zeros(2, 1, 16, 128) for _ in range(2)))
    table, kv_lens, ends = (torch.tensor(x, dtype=torch.int32) for x in ([[0], [1]], [3, 4], [2, 3]))
    batch = AttnBatch(table, kv_lens, Mask(window=16, ends=ends))
    with pytest.raises(ProblemError, match="attn_decode has causal and full masks: attn_prefill takes ends"):
        attn_decode(q, kv, batch)
    with pytest.raises(ProblemError, match="attn_decode has causal and full masks: attn_prefill takes ends"):
        TorchOps(torch.device("cpu"), torch.float32).attn_decode(q, kv, batch)


def test_only_a_causal_mask_has_ends() -> None:
    with pytest.raises(ProblemError, match="kind='full': only queries of a causal mask have ends"):
        Mask("full", ends=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ProblemError, match="ends=True: without causal=True a query sees all keys"):
        Problem(causal=False, ends=True)


def test_timing_has_images_of_a_sequence_s_own() -> None:
    """The bench's 8,192 tokens have eight images, none of which lies partly outside a sequence."""
    (case,) = (c for c in KERNEL.bench.BENCH_CASES if c.problem.ends)
    assert [len(its) for its in case.options["images"]] == [8]
    two = cases.case_for(replace(case.problem, batch=2, num_tokens=1000, kv_len=1500))
    for kv_len, its in zip(two.options["kv_lens"], two.options["images"], strict=True):
        assert its
        assert all(a[1] < b[0] for a, b in pairwise(its))
        assert its[-1][1] < kv_len
