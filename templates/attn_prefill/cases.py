"""Shapes of attn_prefill: edges first. What a kernel must not read holds NaN, and table entries out of range."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Any

import torch
from torch import Tensor

from kerngen.templates.attn_prefill.op import attn_prefill, attn_prefill_dense, attn_prefill_into
from kerngen.templates.attn_prefill.spec import Problem
from kerngen.templates.call import Op
from kerngen.templates.common.attention.heads_torch import in_pages
from kerngen.templates.common.attention.kv_formats_torch import in_format
from kerngen.templates.common.attention.tile_lists import num_entries, num_lists, query_blocks
from kerngen.templates.common.attention.tile_lists_torch import as_lists
from kerngen.templates.kernel import Case, asking

Images = tuple[tuple[int, int], ...]  # of a sequence, the first and the last position of each

NO_PAGE = 0x3FFFFFFF  # a table entry that faults if it is followed
IMAGE_TOKENS, IMAGE_EVERY = 280, 1024  # of an image, as Gemma-4 makes it by default
_LOGIT_CAP = 2.0  # low enough to bend most scores of the cases


def _case(
    name: str,
    q_lens: list[int],
    kv_lens: list[int],
    seed: int = 0,
    into: bool = False,
    images: tuple[Images, ...] | None = None,
    lists: str = "",
    **fields: Any,
) -> Case:
    """A case with one sequence for each entry of q_lens (new tokens) and kv_lens (keys, the new ones included). into:
    whether the op that asks for it is given where the result goes. images: of each sequence; None for a causal mask.
    lists: of LISTS, how many tiles they have; none without it.
    """
    problem = Problem(batch=len(q_lens), num_tokens=sum(q_lens), kv_len=max(kv_lens), ends=images is not None,
                      lists=bool(lists), **fields)  # fmt: skip
    options = {"q_lens": q_lens, "kv_lens": kv_lens, "into": into, "images": images, "lists": lists}
    return Case(name, problem, seed, options)


def ends_of(q_lens: Sequence[int], kv_lens: Sequence[int], images: Sequence[Images]) -> list[int]:
    """Of each query the last key that it sees: its own position or, in an image, that image's last one."""
    found = []
    for q_len, kv_len, its in zip(q_lens, kv_lens, images, strict=True):
        last = {p: end for first, end in its for p in range(first, end + 1)}
        found += [last.get(p, p) for p in range(kv_len - q_len, kv_len)]
    return found


# Lengths around 1, a page, a tile of 64 packed rows (32 tokens at group 2) and of 128 keys.
_SELF = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 0]
_CHUNK_Q = [1, 17, 64, 0, 33, 1, 2]
_CHUNK_KV = [200, 17, 129, 50, 97, 1, 128]
_WINDOW_Q = [39, 40, 41, 1, 1, 1, 150, 30]  # window 40
_WINDOW_KV = [39, 40, 41, 39, 40, 41, 150, 333]
# A chunk that is an image; images at a chunk's begin and end; one of one token, and one right behind another; one that
# begins before its chunk, after a prefix. Most are longer than the window of 16.
_IMAGES_Q = [40, 64, 1, 0, 150, 33]
_IMAGES_KV = [40, 200, 1, 50, 150, 97]
_IMAGES: tuple[Images, ...] = (
    ((0, 39),), ((136, 170), (190, 199)), ((0, 0),), (), ((2, 2), (3, 60), (61, 149)), ((50, 80),),
)  # fmt: skip


def _random_images(seed: int, kv_lens: list[int], text: int, image: int) -> tuple[Images, ...]:
    """Of each sequence runs of up to `text` tokens of text and images of up to `image` tokens, by turns, to its end."""
    draw, found = Random(seed), []
    for kv_len in kv_lens:
        its: list[tuple[int, int]] = []
        at = draw.randint(0, text)
        while at < kv_len:
            end = min(at + draw.randint(1, image), kv_len)
            its.append((at, end - 1))
            at = end + draw.randint(0, text)
        found.append(tuple(its))
    return tuple(found)


def _edges() -> list[Case]:
    cases = []
    for head_dim in (128, 256, 512):
        for dtype in ("fp16", "bf16"):
            shape: dict[str, Any] = {
                "head_dim": head_dim,
                "num_q_heads": 4,
                "num_kv_heads": 2,
                "dtype": dtype,
            }
            tag = f"d{head_dim}-{dtype}"
            cases += [
                _case(f"{tag}-dense-self", _SELF, _SELF, 1, **shape),
                _case(f"{tag}-paged-chunk", _CHUNK_Q, _CHUNK_KV, 2, page_size=16, **shape),
                _case(f"{tag}-paged-window", _WINDOW_Q, _WINDOW_KV, 3, page_size=16, window=40, **shape),
                _case(f"{tag}-images", _IMAGES_Q, _IMAGES_KV, 21, images=_IMAGES, page_size=16, window=16, **shape),
            ]
        shape = {"head_dim": head_dim, "dtype": "fp16"}
        two: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2}
        wide = two | {"num_q_heads": 16}
        tag = f"d{head_dim}-fp16"
        cases += [
            _case(f"{tag}-paged-cap", _CHUNK_Q, _CHUNK_KV, 4, page_size=64, logit_cap=True, **shape, **two),
            _case(f"{tag}-dense-window", _WINDOW_Q, _WINDOW_KV, 5, window=40, **shape, **two),
            _case(f"{tag}-dense-full", [5, 64, 0, 1], [77, 64, 9, 129], 6, causal=False, **shape, **two),
            _case(f"{tag}-full-window", [5, 90, 1], [77, 90, 129], 7, causal=False, window=24, page_size=8,
                  **shape, **two),
            # Of each page's heads K has the first, and V, in a tensor of its own, the last; NaN lies between.
            _case(f"{tag}-pages4", _CHUNK_Q, _CHUNK_KV, 17, page_size=16, page_heads=4, **shape, **two),
            _case(f"{tag}-pages5-window", _WINDOW_Q, _WINDOW_KV, 18, page_size=64, page_heads=5, window=40, **shape,
                  **two),
            _case(f"{tag}-group8", [9, 40, 3], [9, 100, 65], 8, page_size=32, **shape, **wide),
        ]  # fmt: skip
    return cases


def _with_images() -> list[Case]:
    """Images of random lengths, some longer than the window, in chunks after a prefix."""
    shape: dict[str, Any] = {"head_dim": 256, "num_q_heads": 4, "num_kv_heads": 2, "dtype": "fp16"}
    q_lens, kv_lens = [300, 65, 1, 129], [300, 500, 77, 400]
    first, second, third = (_random_images(seed, kv_lens, 40, 90) for seed in range(3))
    long = ((40, 319), (790, 830), (860, 1979), (2200, 2299)), ()
    return [
        _case("images", q_lens, kv_lens, 22, images=first, page_size=64, window=16, **shape),
        _case("images-all-keys", q_lens, kv_lens, 23, images=second, page_size=64, logit_cap=True, **shape),
        _case("images-dense", q_lens, kv_lens, 24, images=third, window=16, **shape),
        _case("long-images", [1500, 260], [2300, 260], 25, images=long, page_size=64, window=1024, **shape),
    ]


def _formats() -> list[Case]:
    """Codes and scales, among rows whose scales are NaN; K and V in one pool."""
    two: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "kv_format": "int8"}
    cases = []
    for head_dim, dtype in ((128, "fp16"), (256, "bf16"), (512, "bf16")):
        shape = {"head_dim": head_dim, "dtype": dtype, **two}
        tag = f"d{head_dim}-{dtype}-int8"
        cases += [
            _case(f"{tag}-chunk", _CHUNK_Q, _CHUNK_KV, 30, page_size=16, **shape),
            _case(f"{tag}-window", _WINDOW_Q, _WINDOW_KV, 31, page_size=64, window=40, **shape),
        ]
    for kv_format, dtype in (
        ("shared", "fp16"), ("shared", "bf16"), ("shared_int8", "fp16"), ("shared_int8", "bf16"), ("fp8", "fp16"),
        ("fp8", "bf16"),
    ):  # fmt: skip
        shape = {"head_dim": 512, "dtype": dtype, **two, "kv_format": kv_format}
        cases.append(_case(f"d512-{dtype}-{kv_format}-chunk", _CHUNK_Q, _CHUNK_KV, 34, page_size=64, **shape))
    shape = {"head_dim": 256, "dtype": "fp16", **two}
    return [
        *cases,
        _case("d256-fp16-int8-images", _IMAGES_Q, _IMAGES_KV, 32, images=_IMAGES, page_size=32, window=16, **shape),
        _case("d512-fp16-int8-chunks", [64, 1, 0, 37, 2], [5003, 300, 9, 1029, 127], 33, page_size=64,
              **(shape | {"head_dim": 512})),
    ]  # fmt: skip


# Chunks behind prefixes, in which each way of making lists shows: some end within a tile, or begin within one.
_LIST_Q = [128, 300, 1, 0, 129, 64, 40]
_LIST_KV = [128, 1580, 900, 50, 385, 2112, 1000]


def _with_lists() -> list[Case]:
    cases = []
    two: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2}
    for lists in ("all", "half", "one", "holes"):
        for dtype in ("fp16", "bf16"):
            cases.append(_case(f"d512-{dtype}-lists-{lists}", _LIST_Q, _LIST_KV, 40, lists=lists, page_size=64,
                               head_dim=512, dtype=dtype, **two))  # fmt: skip
    group8: dict[str, Any] = {"head_dim": 512, "num_q_heads": 8, "num_kv_heads": 1, "lists": "half"}
    return [
        *cases,
        _case("d128-fp16-lists", _LIST_Q, _LIST_KV, 41, lists="half", page_size=16, head_dim=128, dtype="fp16", **two),
        _case("d256-fp16-lists-cap", _LIST_Q, _LIST_KV, 42, lists="holes", page_size=16, head_dim=256, dtype="fp16",
              logit_cap=True, **two),
        _case("d512-bf16-lists-dense", _LIST_Q, _LIST_KV, 43, lists="half", head_dim=512, dtype="bf16", **two),
        _case("d512-fp16-lists-int8", _LIST_Q, _LIST_KV, 44, lists="half", page_size=64, head_dim=512, dtype="fp16",
              kv_format="int8", **two),
        _case("d512-bf16-lists-shared", _LIST_Q, _LIST_KV, 45, lists="half", page_size=64, head_dim=512, dtype="bf16",
              kv_format="shared", **two),
        _case("lists-group8", [256, 40], [1664, 3000], 46, page_size=64, dtype="bf16", **group8),
        _case("lists-split", [64, 1, 0, 37], [5003, 300, 9, 1029], 47, page_size=64, dtype="fp16", **group8),
    ]  # fmt: skip


CASES: tuple[Case, ...] = (
    *_edges(),
    *_with_lists(),
    *_formats(),
    # No key at all, and queries before the first key: zeros.
    _case("no-keys", [3, 5, 2], [0, 2, 2], 9, head_dim=128, num_q_heads=4, num_kv_heads=2, page_size=16, dtype="fp16"),
    # A group that divides no tile, and a page size that divides none either.
    _case("group3-page24", [50, 1, 86], [70, 30, 86], 10, head_dim=128, num_q_heads=6, num_kv_heads=2, page_size=24,
          dtype="fp16"),
    *(
        _case(f"into-{dtype}", [5, 0, 17], [40, 3, 17], 20, True, head_dim=128, num_q_heads=4, num_kv_heads=2,
              page_size=16, page_heads=4, dtype=dtype)
        for dtype in ("fp16", "bf16")
    ),
    _case("pages4-page24", [50, 1, 86], [70, 30, 86], 19, head_dim=128, num_q_heads=6, num_kv_heads=2, page_size=24,
          page_heads=4, dtype="fp16"),
    # More sequences than the 32 that a warp searches at once.
    _case("batch75", [i % 7 for i in range(75)], [i % 7 + i % 11 for i in range(75)], 11, head_dim=128,
          num_q_heads=4, num_kv_heads=1, page_size=16, dtype="fp16"),
    # A block table of 44 KB: it must be read where it lies.
    _case("context-177k", [5], [177000], 12, head_dim=256, num_q_heads=2, num_kv_heads=1, page_size=16, dtype="fp16"),
    # Many tiles, with and without masks, and the longest first.
    _case("long-causal", [700, 260], [1500, 260], 13, head_dim=128, num_q_heads=2, num_kv_heads=1, dtype="fp16"),
    _case("long-window", [900], [2100], 14, head_dim=256, num_q_heads=2, num_kv_heads=1, page_size=64, window=300,
          dtype="fp16"),
    *_with_images(),
    _case("long-d512", [500], [900], 15, head_dim=512, num_q_heads=8, num_kv_heads=1, page_size=64, dtype="fp16"),
    # Few queries behind many keys, and sequences beside them that have fewer keys than parts.
    _case("chunks-d512", [64, 1, 0, 37, 2], [5003, 300, 9, 1029, 127], 16, head_dim=512, num_q_heads=8, num_kv_heads=1,
          page_size=16),
)  # fmt: skip


def case_for(problem: Problem) -> Case:
    """`problem` as equally long sequences of kv_len keys (at least their own queries), for timing; with `ends` an image
    at the begin of each IMAGE_EVERY tokens.
    """
    batch = max(problem.batch, 1)
    q_lens = [problem.num_tokens // batch + (i < problem.num_tokens % batch) for i in range(batch)]
    kv_lens = [max(problem.kv_len, n) for n in q_lens]
    options: dict[str, Any] = {"q_lens": q_lens, "kv_lens": kv_lens, "sm_scale": problem.head_dim**-0.5}
    if problem.ends:
        options["images"] = tuple(
            tuple((at, at + IMAGE_TOKENS - 1) for at in range(0, kv_len - IMAGE_TOKENS + 1, IMAGE_EVERY))
            for kv_len in kv_lens
        )
    if problem.lists:
        options["lists"] = "quarter"
    return Case("tuning", problem, 0, options)


# Of a list's tiles, how many it has: all; each with that chance, and the one of its last query; that one alone; each
# with chance a half, and one at least: queries may then see no key.
LISTS = {"all": 1.0, "half": 0.5, "quarter": 0.25, "one": 0.0, "holes": 0.5}


def _lists(case: Case, num_kv_heads: int, device: torch.device | str) -> dict[str, Any]:
    """counts, lists and max_tiles. Lists of nobody, and what is behind a list's end, are out of range."""
    how, draw = case.options["lists"], torch.Generator("cpu").manual_seed(case.seed)
    q_lens, kv_lens = case.options["q_lens"], case.options["kv_lens"]
    max_tiles = num_entries(max(kv_lens))
    shape = num_lists(sum(q_lens), len(q_lens)), num_kv_heads
    counts = torch.full(shape, NO_PAGE, dtype=torch.int32)
    lists = torch.full((*shape, max_tiles), NO_PAGE, dtype=torch.int32)
    for at, s, first, count in query_blocks(q_lens):
        tiles = num_entries(kv_lens[s] - q_lens[s] + first + count)
        kept = torch.rand(num_kv_heads, tiles, generator=draw) < LISTS[how]
        if how == "holes":
            kept[:, 0] |= ~kept.any(1)
        else:
            kept[:, -1] = True
        if how == "quarter":  # of all of them, whatever the draw: what is timed
            kept = torch.zeros_like(kept)
            for head in range(num_kv_heads):
                kept[head, torch.randperm(tiles - 1, generator=draw)[: max(-(-tiles // 4) - 1, 0)]] = True
            kept[:, -1] = True
        counts[at], found = as_lists(kept)
        lists[at, :, :tiles] = found.where(found >= 0, NO_PAGE)
    return {"counts": counts.to(device), "lists": lists.to(device), "max_tiles": max_tiles}


def inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Every argument by name; `out` is NaN. Scores have a standard deviation of 3: single keys carry weight, so that
    one key too many or too few shows (options may set sm_scale)."""
    p = case.problem
    q_lens, kv_lens = list(case.options["q_lens"]), list(case.options["kv_lens"])
    dtype = torch.bfloat16 if p.dtype == "bf16" else torch.float16
    generator = torch.Generator(device).manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    q = random(sum(q_lens), p.num_q_heads, p.head_dim)
    arguments: dict[str, Any] = {
        "out": torch.full_like(q, float("nan")),
        "q": q,
        "cu_seqlens_q": starts(q_lens),
        "cu_seqlens_k": None,
        "kv_lens": None,
        "block_table": None,
        "ends": None,
        "counts": None,
        "lists": None,
        "max_tiles": 0,
        "sm_scale": case.options.get("sm_scale", 3 * p.head_dim**-0.5),
        "logit_cap": _LOGIT_CAP if p.logit_cap else 0.0,
        "batch": len(q_lens),
        "max_pages": 0,
        "max_seqlen_q": max(q_lens, default=0),
    }
    if p.ends:
        ends = ends_of(q_lens, kv_lens, case.options["images"])
        arguments["ends"] = torch.tensor(ends, dtype=torch.int32, device=device)
    if p.lists:
        arguments |= _lists(case, p.num_kv_heads, device)
    # Per sequence, the keys that some query sees.
    seen = [
        (max(0, kv - q - p.window + 1) if p.window and q else 0 if q else kv, kv)
        for q, kv in zip(q_lens, kv_lens, strict=True)
    ]
    if p.page_size:
        return arguments | _paged(p, seen, random, generator, device)
    k, v = (torch.full((sum(kv_lens), p.num_kv_heads, p.head_dim), float("nan"), dtype=dtype, device=device)
            for _ in range(2))  # fmt: skip
    begin = 0
    for lo, hi in seen:
        k[begin + min(lo, hi) : begin + hi] = random(hi - min(lo, hi), p.num_kv_heads, p.head_dim)
        v[begin + min(lo, hi) : begin + hi] = random(hi - min(lo, hi), p.num_kv_heads, p.head_dim)
        begin += hi
    return arguments | {"k": k, "v": v, "cu_seqlens_k": starts(kv_lens)}


def _paged(
    p: Problem, seen: list[tuple[int, int]], random: Any, generator: torch.Generator, device: torch.device
) -> dict[str, Any]:
    """Caches of scattered pages. Only rows in `seen` hold numbers, only their pages are in the table."""
    size = p.page_size
    used = [range(min(lo, hi) // size, -(-hi // size)) for lo, hi in seen]
    num_pages = sum(map(len, used)) + 2
    max_pages = max((-(-hi // size) for _, hi in seen), default=0) + 1
    order = torch.randperm(num_pages, generator=generator, device=device)
    table = torch.full((len(seen), max_pages), NO_PAGE, dtype=torch.int32, device=device)
    shape = (num_pages, p.num_kv_heads, size, p.head_dim)
    dtype = torch.bfloat16 if p.dtype == "bf16" else torch.float16
    k, v = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    k, v = in_pages(k, v, p.page_heads, is_one=False)
    taken = 0
    for s, (pages, (lo, hi)) in enumerate(zip(used, seen, strict=True)):
        table[s, pages.start : pages.stop] = order[taken : taken + len(pages)].int()
        taken += len(pages)
        at = torch.arange(min(lo, hi), hi, device=device)
        for cache in (k, v):
            cache[table[s, at // size].long(), :, at % size] = random(len(at), p.num_kv_heads, p.head_dim)
    kv_lens = torch.tensor([hi for _, hi in seen], dtype=torch.int32, device=device)
    k, v = in_format(k, v, p.kv_format)
    return {"k": k, "v": v, "block_table": table, "kv_lens": kv_lens, "max_pages": max_pages}


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]] | None:
    """The op that asks for this case, and its arguments. None where no op has that: later keys seen in pages; ends or
    lists with dense keys; a cache with scales.
    """
    p = case.problem
    if not p.page_size:
        return None if p.ends or p.lists else asking(attn_prefill_dense, case, inputs, max_seqlen_k=p.kv_len)
    if not p.causal or p.kv_format != "plain":
        return None
    own = attn_prefill_into if case.options.get("into") else attn_prefill
    return asking(own, case, inputs, k_cache=inputs["k"], v_cache=inputs["v"], max_kv_len=p.kv_len)
