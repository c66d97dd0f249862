"""Shapes of attn_decode: edges first. What a kernel must not read holds NaN, or faults if it is followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kerngen.templates.attn_decode.op import attn_decode, attn_decode_into, attn_decode_qkv, attn_decode_raw_q
from kerngen.templates.attn_decode.spec import Problem
from kerngen.templates.call import Op
from kerngen.templates.common.attention.heads_torch import in_pages, inverse_frequencies
from kerngen.templates.common.attention.kv_formats_torch import in_format
from kerngen.templates.common.rows.spec import is_shared
from kerngen.templates.kernel import Case, asking

NO_PAGE = 0x3FFFFFFF  # a table entry that faults if it is followed
_LOGIT_CAP = 2.0  # low enough to bend most scores of the cases


def _case(
    name: str, kv_lens: list[int], seed: int = 0, options: Mapping[str, Any] | None = None, **fields: Any
) -> Case:
    """options: `skipped`, the tokens whose slot is -1; `first_position`, what is added to all of them; `into`, whether
    the op that asks for it is given where the result goes.
    """
    problem = Problem(batch=len(kv_lens), kv_len=max(kv_lens), **fields)
    return Case(name, problem, seed, {"kv_lens": kv_lens, **(options or {})})


def _edges() -> list[Case]:
    cases = []
    for seed, (head_dim, dtype, page) in enumerate(
        (d, t, page) for d, page in ((128, 16), (256, 32), (512, 64)) for t in ("fp16", "bf16")
    ):
        tag = f"d{head_dim}-{dtype}"
        two: dict[str, Any] = {"head_dim": head_dim, "num_q_heads": 4, "num_kv_heads": 2, "dtype": dtype}
        eight: dict[str, Any] = {"head_dim": head_dim, "num_q_heads": 8, "num_kv_heads": 1, "dtype": dtype}
        # 0, 1, around a page, around the window, and shorter than the queries
        around_page = [0, 1, page - 1, page, page + 1, 3 * page + 5]
        around_window = [39, 40, 41, 42, 43, 44, 0, 300]
        cases += [
            _case(f"{tag}-full", around_page, seed, page_size=page, **two),
            _case(f"{tag}-window40", around_window, seed + 10, page_size=page, window=40, **two),
            _case(f"{tag}-q4", [0, 1, 3, 4, 5, *around_page[2:]], seed + 20, page_size=page, q_len=4, **eight),
            _case(f"{tag}-q4-window40", [2, *around_window], seed + 30, page_size=16, window=40, q_len=4, **two),
        ]
    return cases


def _groups() -> list[Case]:
    """Every group size and the ends of q_len: one tile of rows, several, and several blocks of rows."""
    cases = []
    for head_dim in (128, 256, 512):
        for group, q_len in ((1, 1), (1, 8), (2, 8), (2, 16), (4, 3), (8, 8), (8, 16), (16, 1), (16, 5)):
            shape: dict[str, Any] = {"num_q_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim, "q_len": q_len}
            cases.append(_case(f"d{head_dim}-group{group}-q{q_len}", [130, 7, 1000], 40, dtype="fp16", **shape))
    return cases


def _raw() -> list[Case]:
    """From the projection: new tokens around pages, tiles (of 16 and 32 keys), splits, windows and position 0."""
    cases = []
    for seed, (head_dim, dtype, page) in enumerate(
        (d, t, page) for d, page in ((128, 16), (256, 32), (512, 64)) for t in ("fp16", "bf16")
    ):
        tag = f"d{head_dim}-{dtype}"
        two: dict[str, Any] = {"head_dim": head_dim, "num_q_heads": 4, "num_kv_heads": 2, "dtype": dtype}
        for source in ("raw_q", "qkv", "qk"):
            turned = head_dim // 2 if source == "qkv" else head_dim // 8
            raw: dict[str, Any] = {"source": source, "num_rotated_pairs": turned, "page_size": page, **two}
            lens = [0, 1, page - 1, page, page + 1, 3 * page + 5, 500]
            cases += [
                _case(f"{tag}-{source}", lens, 100 + seed, **raw),
                _case(f"{tag}-{source}-q4-window40", [0, 2, 3, 4, 5, 16, 17, 18, 33, 34, 39, 40, 41, 43, 44, 300],
                      110 + seed, q_len=4, window=40, **raw),
            ]  # fmt: skip
    for head_dim in (128, 256, 512):
        for group, q_len in ((1, 8), (2, 2), (2, 16), (4, 3), (8, 6), (8, 8), (8, 12), (16, 1), (16, 5), (16, 7)):
            shape: dict[str, Any] = {"num_q_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim, "q_len": q_len}
            shape |= {"num_rotated_pairs": head_dim // 2, "dtype": "fp16", "source": "qkv"}
            cases.append(_case(f"d{head_dim}-qkv-group{group}-q{q_len}", [130, 7, 1000, 65], 120, **shape))
    shape = {"head_dim": 256, "num_q_heads": 16, "num_kv_heads": 2, "num_rotated_pairs": 128, "dtype": "fp16"}
    cases += [
        # Windows shorter than the new tokens: a row of blocks sees some of them, another the others.
        *(
            _case(f"qkv-q8-window{window}", [8, 5, 20, 100, 0, 33], 130 + window, q_len=8, window=window, source="qkv",
                  page_size=16, **shape)
            for window in (1, 2, 7)
        ),
        *(
            _case(f"qk-q3-window{window}", [31, 32, 33, 34, 35, 64, 65, 66, 67], 140, q_len=3, window=window,
                  source="qk", page_size=16, **shape)
            for window in (31, 32, 33)
        ),
        _case("qkv-q16-window40", [16, 5, 33, 47, 48, 49, 0, 300], 138, q_len=16, window=40, source="qkv", page_size=32,
              **shape),
        # Slots of -1: their rows stay, and are read as they are.
        _case("qkv-q4-skipped", [70, 4, 129, 2], 150, {"skipped": [0, 3, 5, 8, 9, 10, 11]}, q_len=4, source="qkv",
              **shape),
        _case("qk-skipped", [70, 4, 129], 151, {"skipped": [0, 2]}, source="qk", **shape),
        _case("qkv-late", [70, 4, 129], 152, {"first_position": 262014}, source="qkv", **shape),
        _case("qkv-odd-pairs", [70, 4], 153, source="qkv", **(shape | {"num_rotated_pairs": 20})),
        _case("qkv-no-pairs", [70, 4], 154, source="qkv", **(shape | {"num_rotated_pairs": 0})),
        _case("qkv-cap", [200, 33], 155, q_len=2, source="qkv", logit_cap=True, **shape),
        _case("raw_q-177k", [177000], 156, source="raw_q", page_size=16, **shape),
        _case("qkv-ragged-window1024", [1023, 1024, 1025, 5, 0, 4099], 157, q_len=2, window=1024, source="qkv",
              **shape),
    ]  # fmt: skip
    return cases


def _pages() -> list[Case]:
    """K and V as heads of larger pages: apart, each among NaN, where they are read alone; of one tensor where they are
    written.
    """
    cases = []
    for seed, (head_dim, dtype, page) in enumerate(((128, "fp16", 16), (256, "bf16", 32), (512, "fp16", 64))):
        two: dict[str, Any] = {"head_dim": head_dim, "num_q_heads": 4, "num_kv_heads": 2, "dtype": dtype}
        pairs: dict[str, Any] = {"num_rotated_pairs": head_dim // 2}
        tag = f"d{head_dim}-{dtype}-pages"
        lens = [0, 1, page - 1, page + 1, 3 * page + 5, 700]
        cases += [
            _case(f"{tag}4", lens, 160 + seed, page_size=page, page_heads=4, **two),
            _case(f"{tag}5-raw_q-q4-window40", [2, 39, 41, 44, 300], 170 + seed, page_size=page, page_heads=5, q_len=4,
                  window=40, source="raw_q", **two, **pairs),
            _case(f"{tag}4-qkv-q2", lens, 180 + seed, page_size=page, page_heads=4, q_len=2, source="qkv", **two,
                  **pairs),
            _case(f"{tag}2-qk", [page, 130], 190 + seed, page_size=page, page_heads=2, source="qk",
                  **(two | {"num_kv_heads": 1}), **pairs),
        ]  # fmt: skip
    return cases


def _formats() -> list[Case]:
    """Codes and scales, among rows whose scales are NaN; K and V in one pool."""
    cases = []
    for seed, (kv_format, head_dim, dtype, page) in enumerate((
        ("int8", 128, "fp16", 16), ("int8", 256, "bf16", 32), ("int8", 512, "bf16", 64),
        ("int4", 128, "bf16", 16), ("int4", 256, "fp16", 32), ("int4", 512, "bf16", 64), ("int4", 512, "fp16", 16),
        ("fp8", 128, "fp16", 16), ("fp8", 256, "bf16", 32), ("fp8", 512, "bf16", 64), ("fp8", 512, "fp16", 16),
        ("int3", 128, "bf16", 16), ("int3", 256, "fp16", 32), ("int3", 512, "bf16", 64), ("int3", 512, "fp16", 16),
    )):  # fmt: skip
        two: dict[str, Any] = {"head_dim": head_dim, "num_q_heads": 4, "num_kv_heads": 2, "dtype": dtype}
        two |= {"page_size": page, "kv_format": kv_format}
        turned: dict[str, Any] = {"num_rotated_pairs": head_dim // 2}
        tag, lens = f"d{head_dim}-{dtype}-{kv_format}", [0, 1, page - 1, page, page + 1, 3 * page + 5, 700]
        cases += [
            _case(tag, lens, 200 + seed, **two),
            _case(f"{tag}-qkv-q4-window40", [0, 2, 3, 4, 5, 17, 33, 39, 41, 44, 300], 210 + seed, q_len=4, window=40,
                  source="qkv", **two, **turned),
        ]  # fmt: skip
    for seed, (kv_format, dtype) in enumerate(
        (kv_format, dtype)
        for kv_format in ("shared", "shared_int8", "shared_int4", "shared_int3")
        for dtype in ("fp16", "bf16")
    ):
        one: dict[str, Any] = {"head_dim": 512, "num_q_heads": 8, "num_kv_heads": 1, "dtype": dtype}
        one |= {"kv_format": kv_format}
        tag, lens = f"d512-{dtype}-{kv_format}", [0, 1, 63, 64, 65, 197, 700]
        cases += [
            _case(tag, lens, 230 + seed, page_size=64, **one),
            _case(f"{tag}-qk-q2", lens, 240 + seed, q_len=2, source="qk", page_size=32, num_rotated_pairs=64, **one),
        ]  # fmt: skip
    shared: dict[str, Any] = {"head_dim": 512, "num_q_heads": 4, "num_kv_heads": 1, "dtype": "fp16"}
    shared |= {"num_rotated_pairs": 64}
    cases += [
        _case(f"{kv_format}-raw_q", [64, 130, 1000], 250, source="raw_q", kv_format=kv_format, **shared)
        for kv_format in ("shared", "shared_int8", "shared_int4", "shared_int3")
    ]
    # Rows of several tiles of eight, so that blocks take more of them and queries stay in shared memory.
    many: dict[str, Any] = {"head_dim": 512, "num_q_heads": 16, "num_kv_heads": 1, "source": "qk", "q_len": 5}
    cases += [
        _case(f"d512-fp16-{kv_format}-qk-rows80", [5, 64, 333], 224, dtype="fp16", kv_format=kv_format,
              num_rotated_pairs=64, **many)
        for kv_format in ("int4", "shared_int4", "fp8", "int3", "shared_int3")
    ]  # fmt: skip
    both: dict[str, Any] = {"head_dim": 512, "num_q_heads": 16, "num_kv_heads": 2, "dtype": "fp16", "kv_format": "int8"}
    cases += [
        _case("d512-fp16-int4-raw_q-q3", [64, 130, 1000], 223, source="raw_q", q_len=3, num_rotated_pairs=64,
              **(both | {"kv_format": "int4"})),
        _case("d512-fp16-fp8-raw_q-q3", [64, 130, 1000], 225, source="raw_q", q_len=3, num_rotated_pairs=64,
              **(both | {"kv_format": "fp8"})),
        _case("d512-fp16-int3-raw_q-q3", [64, 130, 1000], 226, source="raw_q", q_len=3, num_rotated_pairs=64,
              **(both | {"kv_format": "int3"})),
        _case("d512-fp16-int8-qk", [64, 130, 1000], 220, source="qk", num_rotated_pairs=64, **both),
        _case("d512-fp16-int8-raw_q-q3", [64, 130, 1000], 221, source="raw_q", q_len=3, num_rotated_pairs=64, **both),
        _case("d256-fp16-int8-skipped", [70, 4, 129, 2], 222, {"skipped": [0, 3, 5, 8, 9, 10, 11]}, q_len=4,
              source="qkv", num_rotated_pairs=128, **(both | {"head_dim": 256})),
    ]  # fmt: skip
    return cases


def _full_masks() -> list[Case]:
    """Blocks whose tokens see each other, with a window and without."""
    cases = []
    for seed, (head_dim, dtype) in enumerate((d, t) for d in (128, 256, 512) for t in ("fp16", "bf16")):
        eight: dict[str, Any] = {"head_dim": head_dim, "num_q_heads": 8, "num_kv_heads": 1, "dtype": dtype}
        for window in (0, 40):
            cases.append(_case(f"d{head_dim}-{dtype}-not-causal-window{window}", [16, 17, 55, 56, 57, 130, 1000],
                               260 + seed, q_len=16, page_size=16, window=window, causal=False, **eight))  # fmt: skip
    codes: dict[str, Any] = {"head_dim": 128, "num_q_heads": 8, "num_kv_heads": 1, "dtype": "fp16", "q_len": 16}
    cases += [
        _case(f"d128-fp16-{kv_format}-not-causal", [16, 33, 700], 270, kv_format=kv_format, causal=False, **codes)
        for kv_format in ("int8", "int4")
    ]
    return cases


CASES: tuple[Case, ...] = (
    *_edges(),
    *_groups(),
    *_raw(),
    *_pages(),
    *_formats(),
    *_full_masks(),
    *(
        _case(f"into-{dtype}", [130, 0, 41], 64, {"into": True}, num_q_heads=4, num_kv_heads=2, dtype=dtype,
              page_heads=4)
        for dtype in ("fp16", "bf16")
    ),
    *(
        _case(f"d{d}-cap", [200, 33], 50, head_dim=d, num_q_heads=8, num_kv_heads=1, q_len=2, page_size=16,
              dtype="fp16", logit_cap=True)
        for d in (128, 256, 512)
    ),
    # Fewer tiles than splits in one row, many in another; the window's first tile in the middle of a page.
    _case("ragged-window1024", [1023, 1024, 1025, 5, 0, 4099], 60, head_dim=256, num_q_heads=8, num_kv_heads=4,
          window=1024, dtype="fp16", q_len=2),
    _case("ragged-d512", [3000, 0, 17, 1], 61, head_dim=512, num_q_heads=8, num_kv_heads=1, dtype="fp16"),
    # A block table of 44 KB: it must be read where it lies.
    _case("context-177k", [177000], 62, head_dim=128, num_q_heads=8, num_kv_heads=1, page_size=16, dtype="fp16"),
    _case("context-177k-window", [177000], 63, head_dim=256, num_q_heads=2, num_kv_heads=1, page_size=16, window=1024,
          dtype="fp16"),
)  # fmt: skip


def case_for(problem: Problem) -> Case:
    """`problem` as equally long sequences, for timing."""
    kv_lens = [problem.kv_len] * problem.batch
    return Case("tuning", problem, 0, {"kv_lens": kv_lens, "sm_scale": problem.head_dim**-0.5})


def inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Every argument by name; `out` is NaN, and so are the rows of the caches that the kernel is to write.

    Scores have a standard deviation of 3: single keys carry weight, so that one key too many or too few shows
    (options may set sm_scale). Pages are scattered; only visible rows hold numbers, only their pages are in the table.
    """
    p = case.problem
    kv_lens = list(case.options["kv_lens"])
    dtype = torch.bfloat16 if p.dtype == "bf16" else torch.float16
    generator = torch.Generator(device).manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    seen = [(max(0, n - p.q_len - p.window + 1) if p.window else 0, n) for n in kv_lens]
    used = [range(first // p.page_size, -(-end // p.page_size)) for first, end in seen]
    num_pages = sum(map(len, used)) + 2
    max_pages = max(-(-n // p.page_size) for n in kv_lens) + 1
    order = torch.randperm(num_pages, generator=generator, device=device).int()
    table = torch.full((len(kv_lens), max_pages), NO_PAGE, dtype=torch.int32, device=device)
    k, v = (random(num_pages, p.num_kv_heads, p.page_size, p.head_dim) for _ in range(2))
    k, v = in_pages(k, v, p.page_heads, p.owns_kv)
    taken = 0
    for s, (pages, (first, end)) in enumerate(zip(used, seen, strict=True)):
        mine = order[taken : taken + len(pages)]
        taken += len(pages)
        table[s, pages.start : pages.stop] = mine
        if len(pages):
            for cache in (k, v):
                cache[mine[0].long(), :, : first - pages.start * p.page_size] = float("nan")
                cache[mine[-1].long(), :, end - (pages.stop - 1) * p.page_size :] = float("nan")
    for cache in (k, v):
        cache[order[taken:].long()] = float("nan")
    tokens = len(kv_lens) * p.q_len
    made = _raw_inputs(case, k, v, table, order[taken], generator) if p.source != "q" else {}
    q = random(tokens, p.num_heads, p.head_dim)
    return {
        "out": torch.full_like(q[:, : p.num_q_heads], float("nan")),
        "q": q if p.source == "q" else (2 * q).flatten(1),
        **dict(zip(("k_cache", "v_cache"), in_format(k, v, p.kv_format), strict=True)),
        "block_table": table,
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "sm_scale": case.options.get("sm_scale", 3 * p.head_dim**-0.5),
        "logit_cap": _LOGIT_CAP if p.logit_cap else 0.0,
        "eps": 1e-6,
        **{name: made.get(name) for name in ("q_weight", "k_weight", "inv_freq", "positions", "slot_mapping")},
        "batch": len(kv_lens),
        "max_pages": max_pages,
    }


def _raw_inputs(
    case: Case, k: Tensor, v: Tensor, table: Tensor, spare: Tensor, generator: torch.Generator
) -> dict[str, Any]:
    """Weights about 1, positions, and slots where `table` has the tokens. Rows of k and v that they name become NaN.

    spare: a page that no sequence has; slots of tokens before position 0 name it, and it must stay as it is.
    """
    p, device = case.problem, k.device
    at = torch.tensor(case.options["kv_lens"], device=device)[:, None] - p.q_len + torch.arange(p.q_len, device=device)
    at = at.flatten()  # [tokens]
    page = table.repeat_interleave(p.q_len, 0).gather(1, at.clamp(min=0)[:, None] // p.page_size).squeeze(1)
    slots = torch.where(at < 0, spare, page).long() * p.page_size + at.clamp(min=0) % p.page_size
    slots[case.options.get("skipped", [])] = -1
    new = slots[(slots >= 0) & (at >= 0)]

    def weight() -> Tensor:
        return (1 + 0.25 * torch.randn(p.head_dim, generator=generator, device=device)).to(k.dtype)

    made = {
        "q_weight": weight(),
        "inv_freq": inverse_frequencies(p.head_dim, p.num_rotated_pairs, device),
        "positions": at.clamp(min=0) + case.options.get("first_position", 0),
    }
    if p.owns_kv:
        for cache in (k, v):
            cache[new // p.page_size, :, new % p.page_size] = float("nan")
        made |= {"k_weight": weight(), "slot_mapping": slots}
    elif is_shared(p.kv_format):
        made["k_weight"] = weight()
    return made


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]] | None:
    """The op that asks for this case, and its arguments. None for a cache with scales, which no library's op takes."""
    p = case.problem
    if p.kv_format != "plain":
        return None
    if p.source == "q":
        own = attn_decode_into if case.options.get("into") else attn_decode
        return asking(own, case, inputs, max_kv_len=p.kv_len)
    if p.source == "raw_q":
        return asking(attn_decode_raw_q, case, inputs, max_kv_len=p.kv_len, q_raw=inputs["q"])
    return asking(attn_decode_qkv, case, inputs, max_kv_len=p.kv_len, qkv=inputs["q"])
