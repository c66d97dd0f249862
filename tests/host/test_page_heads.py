"""Caches that are heads of larger pages, as a tensor [num_pages, 2 * num_kv_heads, page_size, head_dim] has K and V."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from sheets import PlayedCompiler
from test_fused import H200, store_with
from torch import Tensor

import kerngen
from kerngen.arch import Target, find_arch
from kerngen.compiler.render import render
from kerngen.compiler.source_digest import source_digest_of
from kerngen.errors import LaunchError, ProblemError
from kerngen.runtime.launcher import require_layout
from kerngen.runtime.selection import Selector
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Arg, Kernel, fields_of, static_fields
from kerngen.templates.values import KVView, page_strides
from kerngen.tuning_db import Store, open_source
from kerngen.tuning_db.read.freshness import notes_of
from kerngen.tuning_db.read.ids import problem_key

DECODE, PREFILL, ROPE, WRITE = map(find_kernel, ("attn_decode", "attn_prefill", "qkv_norm_rope", "kv_write"))
EACH_KERNEL = pytest.mark.parametrize("kernel", [DECODE, PREFILL, ROPE, WRITE], ids=lambda k: k.name)
PAGES, HEADS, SIZE, DIM = 3, 2, 16, 128
FULL = DECODE.problem_type(head_dim=512, num_q_heads=32, num_kv_heads=4)
ROWS = torch.arange(PAGES * 6 * SIZE * DIM, dtype=torch.int32).to(torch.int16)


def _side_by_side(heads: int = HEADS, pages: int = PAGES) -> KVView:
    whole = torch.zeros(pages, 2 * heads, SIZE, DIM, dtype=torch.bfloat16)
    return KVView(whole[:, :heads], whole[:, heads:])


def _paged(kernel: Kernel) -> Any:
    """A problem of `kernel` whose caches are of pages of twice the heads."""
    page_size = {"page_size": 64} if kernel is PREFILL else {}
    problem = kernel.problem_type(dtype="fp16", **page_size)
    return replace(problem, page_heads=2 * problem.num_kv_heads)


# ---- the value


def test_a_view_knows_its_pages() -> None:
    contiguous = KVView(*(torch.zeros(PAGES, HEADS, SIZE, DIM) for _ in range(2)))
    assert contiguous.page_heads == 0
    assert _side_by_side().page_heads == 2 * HEADS
    assert _side_by_side(heads=1).page_heads == 2
    assert _side_by_side(pages=1).page_heads == 0, "of a single page each cache is contiguous"
    wide = torch.zeros(PAGES, 5, SIZE, DIM)
    assert KVView(wide[:, 1:3], wide[:, 3:]).page_heads == 5
    meta = torch.zeros(PAGES, 4, SIZE, DIM, device="meta")
    assert KVView(meta[:, :2], meta[:, 2:]).page_heads == 4


def _refused() -> dict[str, tuple[Tensor, Tensor]]:
    whole = torch.zeros(PAGES, 4, SIZE, DIM, dtype=torch.bfloat16)
    k, v = whole[:, :2], whole[:, 2:]
    rows_first = torch.zeros(PAGES, SIZE, 4, DIM, dtype=torch.bfloat16).transpose(1, 2)
    in_one_row = torch.zeros(PAGES, HEADS, SIZE, 2 * DIM, dtype=torch.bfloat16)
    ragged = torch.zeros(PAGES * 4 * SIZE * DIM + 999, dtype=torch.bfloat16)
    strides = 4 * SIZE * DIM + 8, SIZE * DIM, DIM, 1
    return {
        "heads within a token": (rows_first[:, :2], rows_first[:, 2:]),
        "k and v within a row": (in_one_row[..., :DIM], in_one_row[..., DIM:]),
        "every other head": (whole[:, ::2], whole[:, 1::2]),
        "one page for all": (k[:1].expand(PAGES, -1, -1, -1), v[:1].expand(PAGES, -1, -1, -1)),
        "v is apart": (k, v.contiguous()),
        "k is apart": (k.contiguous(), v),
        "no whole heads between pages": (
            ragged.as_strided((PAGES, 2, SIZE, DIM), strides), ragged.as_strided((PAGES, 2, SIZE, DIM), strides),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("caches", _refused().values(), ids=_refused())
def test_caches_that_lie_in_another_way_are_refused(caches: tuple[Tensor, Tensor]) -> None:
    words = (
        r"[kv]_cache \(3, 2, 16, 128\) has strides \(.*: both caches are contiguous, or heads of pages \[num_pages, "
        r"page_heads, page_size, head_dim\]; with \d page_heads the strides are \(\d+, 2048, 128, 1\)"
    )
    with pytest.raises(ProblemError, match=words):
        _ = KVView(*caches).page_heads


def test_rows_that_no_vector_can_be_read_of_are_refused() -> None:
    flat, shape = torch.zeros(PAGES * 4 * SIZE * DIM + 4, dtype=torch.bfloat16), (PAGES, 2, SIZE, DIM)
    k, v = (flat.as_strided(shape, page_strides(shape, 4), first) for first in (0, 2 * SIZE * DIM + 4))
    with pytest.raises(ProblemError, match="v_cache begins 8200 bytes into its storage, which is no multiple of 16"):
        _ = KVView(k, v).page_heads


@EACH_KERNEL
def test_a_page_has_room_for_the_cache(kernel: Kernel) -> None:
    problem = _paged(kernel)
    heads = problem.num_kv_heads
    assert replace(problem, page_heads=heads).page_heads == heads
    with pytest.raises(ProblemError, match=f"page_heads={heads - 1}: a page has at least the num_kv_heads={heads}"):
        replace(problem, page_heads=heads - 1)


def test_what_has_no_pages_has_none_of_any_heads() -> None:
    with pytest.raises(ProblemError, match="page_heads=32: dense k and v have no pages"):
        PREFILL.problem_type(page_heads=32)
    with pytest.raises(ProblemError, match="page_heads=2: q_only has no caches"):
        ROPE.problem_type(num_kv_heads=0, q_only=True, page_heads=2)


@pytest.mark.parametrize("page_heads", [0, 4])
def test_a_launch_refuses_tensors_that_lie_in_another_way(page_heads: int) -> None:
    """The kernel's addresses are compiled in: what fits another problem would be read beyond its end."""
    arg, problem = Arg("k_cache", "ptr", page_heads="page_heads"), replace(FULL, page_heads=page_heads)
    paged, contiguous = torch.zeros(PAGES, 8, SIZE, DIM)[:, :4], torch.zeros(PAGES, 4, SIZE, DIM)
    if page_heads:
        problem = replace(FULL, page_heads=8)
        require_layout("attn_decode", arg, "k_cache", paged, problem)
        with pytest.raises(LaunchError, match=r"k_cache .*strides \(8192, .*in pages of 8 heads they are \(16384, "):
            require_layout("attn_decode", arg, "k_cache", contiguous, problem)
    else:
        require_layout("attn_decode", arg, "k_cache", contiguous, problem)
        with pytest.raises(LaunchError, match=r"k_cache .*is not contiguous"):
            require_layout("attn_decode", arg, "k_cache", paged, problem)


# ---- the ops


@pytest.mark.parametrize(
    ("kernel", "case"),
    [(k, c) for k in (DECODE, PREFILL, ROPE, WRITE) for c in k.cases.CASES if c.problem.page_heads],
    ids=lambda v: getattr(v, "name", None),
)
def test_ops_ask_for_the_pages_of_their_caches_and_give_what_contiguous_ones_give(kernel: Kernel, case: Any) -> None:
    names = ("k", "v") if kernel is PREFILL else ("k_cache", "v_cache")
    inputs = kernel.cases.inputs(case, torch.device("cpu"))
    op, arguments = kernel.op_call(case, inputs)
    caches = {name: inputs[name].contiguous() for name in names}
    out = {"out": inputs["out"].clone()} if "out" in inputs else {}
    _, apart = kernel.op_call(case, inputs | caches | out)
    asked, plain = (op.of_flat(given).problem for given in (arguments, apart))
    assert static_fields(asked) == static_fields(case.problem)
    assert plain == replace(asked, page_heads=0)
    run = getattr(kerngen.ops, op.name)
    found, wanted = (
        given.get("out") if made is None else made for given in (arguments, apart) for made in [run(**given)]
    )
    assert (found is None) == (kernel is WRITE)
    if found is not None:  # a CPU may add in another order where a tensor lies otherwise in memory
        torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(found.dtype).eps, atol=1e-6)
    for name, cache in caches.items():
        torch.testing.assert_close(inputs[name], cache, rtol=0, atol=0, equal_nan=True)


def test_a_compiled_step_writes_both_halves_of_a_page() -> None:
    """Functionalisation makes two arguments of views that share one tensor."""
    case = next(c for c in ROPE.cases.CASES if c.problem.page_heads == 2 * c.problem.num_kv_heads)
    op, arguments = ROPE.op_call(case, ROPE.cases.inputs(case, torch.device("cpu")))
    pages = [torch.zeros(arguments["k_cache"].shape).repeat(1, 2, 1, 1).bfloat16() for _ in range(2)]

    def step(whole: Tensor) -> Tensor:
        k, v = whole.chunk(2, dim=1)
        made: Tensor = getattr(kerngen.ops, op.name)(**arguments | {"k_cache": k, "v_cache": v})
        return made

    found = torch.compile(step, backend="aot_eager", fullgraph=True)(pages[0])
    assert torch.equal(found, step(pages[1]))
    assert torch.equal(*pages)
    assert all(half.any() for half in pages[0].chunk(2, dim=1))


def test_decode_layers_takes_contiguous_caches_alone() -> None:
    kernel = find_kernel("decode_layers")
    case = min(kernel.cases.CASES, key=lambda c: kernel.cost(c.problem).bytes)
    op, arguments = kernel.op_call(case, kernel.cases.inputs(case, torch.device("cpu")))
    paged = [torch.cat((cache, cache), dim=1)[:, : cache.shape[1]] for cache in arguments["v_caches"]]
    with pytest.raises(ProblemError, match="decode_layers takes contiguous caches, no heads of larger pages"):
        op.of_flat({**arguments, "v_caches": paged})


# ---- bulk copies


def _box(flat: Tensor, seen: Any, at: tuple[int, ...]) -> Tensor:
    """What a copy from element `at` of each axis brings, the box's axes outermost first."""
    steps = 1, *(stride // flat.element_size() for stride in seen.strides)
    assert all(a + b <= d for a, b, d in zip(at, seen.box, seen.dims, strict=True)), "within the tensor"
    first = sum(a * s for a, s in zip(at, steps, strict=True))
    return flat.as_strided(seen.box[::-1], steps[::-1], flat.storage_offset() + first)


@pytest.mark.parametrize(("first", "of"), [*product((0, 2, 4), ("k", "v"))])
def test_boxes_of_decode_lie_in_the_heads_of_the_cache(first: int, of: str) -> None:
    """first: of the cache's two heads among the six of a page. The last axis ends with the last page's second head."""
    problem = DECODE.problem_type(head_dim=DIM, num_q_heads=4, num_kv_heads=2, page_size=SIZE, page_heads=6)
    config = DECODE.config_type(8, 16, 4, 4, 6, body="wgmma_ws")
    cache = ROWS.view(PAGES, 6, SIZE, DIM)[:, first : first + 2]
    seen = DECODE.tensor_map(problem, config, f"{of}_cache", tuple(cache.shape))
    assert seen is not None
    assert seen.dims[-1] == 2 * 6 + 2
    blocks = seen.box[2]
    for page, head in product(range(PAGES), range(2)):
        brought = _box(cache, seen, (0, 0, 0, 0, page * 6 + head))[0]  # [rows / 8, blocks, 8, 64]
        wanted = cache[page, head, :16, : 64 * blocks].view(2, 8, blocks, 64).transpose(1, 2)
        assert torch.equal(brought, wanted)


@pytest.mark.parametrize("first", [0, 2, 4])
def test_boxes_of_prefill_lie_in_the_heads_of_the_cache(first: int) -> None:
    problem = PREFILL.problem_type(head_dim=DIM, num_q_heads=4, num_kv_heads=2, page_size=SIZE, page_heads=6)
    config = PREFILL.config_type(128, 64, body="wgmma_ws", use_tma=True)
    cache = ROWS.view(PAGES, 6, SIZE, DIM)[:, first : first + 2]
    seen = PREFILL.tensor_map(problem, config, "k", tuple(cache.shape))
    assert seen is not None
    assert seen.dims == (DIM, SIZE, 2, PAGES)
    for page, head, column in product(range(PAGES), range(2), (0, 64)):
        brought = _box(cache, seen, (column, 0, head, page))[0, 0]
        assert torch.equal(brought, cache[page, head, : seen.box[1], column : column + 64])


# ---- the source, and what serves


@EACH_KERNEL
@pytest.mark.parametrize("arch", ["sm70", "sm80", "sm90"])
def test_the_source_differs_by_the_heads_of_a_page_alone(kernel: Kernel, arch: str) -> None:
    target, paged = Target.of(find_arch(arch)), _paged(kernel)
    config, heads = kernel.default_config(paged, target), paged.num_kv_heads
    assert config == kernel.default_config(replace(paged, page_heads=0), target)
    text = render(kernel, paged, config, target)
    assert f"PAGE_HEADS = {2 * heads};" in text
    one_less = text.replace(f"PAGE_HEADS = {2 * heads};", f"PAGE_HEADS = {heads};")
    assert one_less == render(kernel, replace(paged, page_heads=0), config, target)


@EACH_KERNEL
def test_what_was_tuned_is_filed_as_before(kernel: Kernel) -> None:
    plain, paged = (problem_key(kernel, p) for p in (kernel.tuned_as(_paged(kernel)), _paged(kernel)))
    assert plain.static["page_heads"] == 0
    assert "page_heads" not in plain.filed().static
    assert paged.filed().static == plain.filed().static | {"page_heads": paged.static["page_heads"]}
    assert paged.static_key != plain.static_key, "its machine code is another"


def test_a_winner_serves_every_layout_with_code_of_its_own(tmp_path: Path) -> None:
    store_with(tmp_path / "a.db", DECODE, replace(FULL, kv_len=2048), num_splits=20)
    path = store_with(tmp_path / "a.db", DECODE, FULL, num_splits=20)
    paged = replace(FULL, page_heads=8)
    with open_source(path) as source:
        selector = Selector([source], H200)
        tuned, found = (selector.choice(DECODE, p) for p in (FULL, paged))
        assert tuned.cubin is not None
        assert (found.config, found.winner, found.source) == (tuned.config, tuned.winner, tuned.source)
        assert found.config.num_splits == 20
        assert found.cubin is None, "the winner's code reads other addresses"
        assert "PAGE_HEADS = 8;" in found.text
        assert found.text == render(DECODE, paged, found.config, H200)
        assert selector.choice(DECODE, replace(paged, kv_len=8000)) is found
        assert selector.tuned_lengths(DECODE, paged) == selector.tuned_lengths(DECODE, FULL) == [2048, 8192]

        beyond = [selector.choice(DECODE, replace(p, kv_len=131072)) for p in (FULL, paged)]
        assert beyond[0].config == beyond[1].config
        assert (beyond[1].winner, beyond[1].provenance) == (None, "default")

    with Store.open(path) as store:  # as a bundle has what no winner brought along
        made = PlayedCompiler().submit(found.text, H200.arch).result()
        config = fields_of(found.config)
        notes = notes_of(source_digest_of(DECODE), DECODE, config, made.arch)
        store.add_build(made, DECODE.name, found.text, config, static_fields(paged), notes=notes)
        store.rewrite_lines()
    with open_source(path) as source:
        built = Selector([source], H200).choice(DECODE, paged)
        assert built.cubin is not None
        assert built.cubin.image == made.image


def test_what_was_tuned_in_this_layout_comes_first(tmp_path: Path) -> None:
    paged = replace(FULL, page_heads=8)
    store_with(tmp_path / "a.db", DECODE, FULL, num_splits=20)
    with open_source(store_with(tmp_path / "a.db", DECODE, paged, num_splits=27)) as source:
        selector = Selector([source], H200)
        assert [selector.choice(DECODE, p).config.num_splits for p in (FULL, paged)] == [20, 27]
        assert selector.choice(DECODE, paged).cubin is not None
        assert selector.choice(DECODE, replace(paged, page_heads=5)).config.num_splits == 20


def test_defaults_are_those_of_contiguous_caches() -> None:
    selector = Selector([], H200)
    for kv_len in (1, 500, 8192, 100_000):
        plain = replace(FULL, kv_len=kv_len)
        assert selector.choice(DECODE, replace(plain, page_heads=8)).config == selector.choice(DECODE, plain).config
